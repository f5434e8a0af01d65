"""Inner loops that selection spends its time in, each beside its torch reference, which defines what it computes."""

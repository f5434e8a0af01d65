"""The loops in torch operations, for any device."""

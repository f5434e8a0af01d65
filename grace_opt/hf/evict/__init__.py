"""Token eviction: which of a prompt's tokens each KV head keeps, and how a budget is divided among layers and heads."""

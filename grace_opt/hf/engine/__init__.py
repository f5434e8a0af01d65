"""The engine: the cache, its layers, the attention functions, and what carries them through `generate`."""

"""RULER's tasks and its published scores, for smaller caches: ``python -m bench.ruler``."""

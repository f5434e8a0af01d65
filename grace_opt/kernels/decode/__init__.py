"""Attention of a few new queries over a pruned key cache, in a few bits or dense."""

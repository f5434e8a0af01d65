"""The interaction matrix W of queries and keys."""

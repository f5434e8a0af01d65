"""Problems to solve: from files in the literature's formats, made by seed, or handed over to other libraries."""

from .files import HOLD_K, SUFFIXES, TERMS, Instance, read, write

__all__ = ["HOLD_K", "SUFFIXES", "TERMS", "Instance", "read", "write"]

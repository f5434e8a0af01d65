"""Problems to solve: from files in the literature's formats, made by seed, or handed over to other libraries."""

from .files import OBJECTIVE_TERMS, SUFFIXES, SUFFIXES_WITH_K, Instance, read, write

__all__ = ["OBJECTIVE_TERMS", "SUFFIXES", "SUFFIXES_WITH_K", "Instance", "read", "write"]

"""Problems to solve: from files in the literature's formats, made by seed, or handed over to other libraries.

======================  ========================================================
file                    what is in it
======================  ========================================================
``files``               `read` and `write`, whatever the format
``formats``             k-cluster, MDPLIB and DIMACS as text
``matrix_market``       MatrixMarket, every line counted
``generators``          instances by seed: attention, planted, ties, k-cluster, dispersion
``convert``             a `Problem` for cvxpy, D-Wave's models and networkx
======================  ========================================================
"""

from .files import HOLD_K, SUFFIXES, TERMS, Instance, read, write

__all__ = ["HOLD_K", "SUFFIXES", "TERMS", "Instance", "read", "write"]

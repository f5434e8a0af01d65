"""Several methods on one problem: their answers side by side, as a table, a DataFrame and JSON.

======================  ========================================================
file                    what is in it
======================  ========================================================
``comparison``          `Comparison`, what `grace_opt.compare` returns
``table``               the table that it prints
``values``              solutions as plain values for JSON
======================  ========================================================
"""

from .comparison import Comparison, ComparisonError

__all__ = ["Comparison", "ComparisonError"]

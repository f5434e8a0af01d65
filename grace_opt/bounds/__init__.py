"""Certified lower bounds: no k-vertex set weighs less, whatever rounding and early stopping did.

======================  ========================================================
file                    what is in it
======================  ========================================================
``batched``             `row_bound`, `eigenvalue_bound`, `continuous_bound`, and `certificate`, the best of them
``tight``               `plain_bound`, `qcr_bound`, `dnn_bound`, `tight_bound`: tighter and dearer, compiled
``fixing``              which vertices are in every optimal set, and which in none
``subproblem``          what is left once vertices are fixed, in plain numpy
``qcr``                 convex relaxations by a diagonal shift (QCR)
``dnn``                 multipliers for products of pairs (DNN + RLT)
``sdp_primal``          the semidefinite relaxation, by cvxpy
``sdp_dual``            a valid bound from any of its dual points
======================  ========================================================
"""

from .batched import (
    LEVELS,
    MOST_FAST,
    certificate,
    continuous_bound,
    dnn_bound,
    eigenvalue_bound,
    plain_bound,
    qcr_bound,
    row_bound,
    row_bound_in_time,
    tight_bound,
)

__all__ = [
    "LEVELS",
    "MOST_FAST",
    "certificate",
    "continuous_bound",
    "dnn_bound",
    "eigenvalue_bound",
    "plain_bound",
    "qcr_bound",
    "row_bound",
    "row_bound_in_time",
    "tight_bound",
]

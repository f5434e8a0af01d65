"""Certified lower bounds: no k-vertex set weighs less, in spite of rounding and early stopping."""

from .batched import continuous_bound, eigenvalue_bound, entry_bound, row_bound, row_bound_in_time
from .certificates import LEVELS, certificate, form_bound, prepare, seconds_to_certify
from .factored import factored_bound
from .fixing import Fixing, fixed_vertices
from .tight import dnn_bound, fast_bound, plain_bound, qcr_bound, tight_bound

__all__ = [
    "LEVELS",
    "Fixing",
    "certificate",
    "continuous_bound",
    "dnn_bound",
    "eigenvalue_bound",
    "entry_bound",
    "factored_bound",
    "fast_bound",
    "fixed_vertices",
    "form_bound",
    "plain_bound",
    "prepare",
    "qcr_bound",
    "row_bound",
    "row_bound_in_time",
    "seconds_to_certify",
    "tight_bound",
]

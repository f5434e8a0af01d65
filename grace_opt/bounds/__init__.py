"""Certified lower bounds: no k-vertex set weighs less, whatever rounding and early stopping did."""

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

"""Which integers float64 holds exactly, and the error for one that it does not."""

from __future__ import annotations

from ..errors import ProblemError

#: Every integer up to this one is exact in float64.
MAX_EXACT_INTEGER = 2**53


def too_large_error(name: str, worst: int, wanted: str = "") -> ProblemError:
    """Return the error for an integer that float64 does not hold exactly."""
    if wanted:
        return ProblemError(f"{name} holds the integer {worst}: give {wanted}.")
    floats = f"{name}.astype(float)" if name.isidentifier() else "W.astype(float)"
    return ProblemError(
        f"{name} holds the integer {worst}, beyond 2**53 = {MAX_EXACT_INTEGER}, where float64 stops being exact: "
        f"divide by a common factor or, if rounding is fine, give floats: {floats}, or in a file "
        f"{worst}.0."
    )

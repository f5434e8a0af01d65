r"""The objective f for batches of sets, exchange costs, and conversion of vertex sets between masks and indices.

.. math:: f(S) = 1_S^\top W 1_S = \sum_{i \in S} W_{ii} + 2 \sum_{i < j \in S} W_{ij}

For solvers and tests; users read `Solution.objective`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels.solve.exchange.reference import row_sums as row_sums
from .kernels.solve.exchange.reference import swap_costs as swap_costs
from .kernels.solve.indices import indices_from_mask as indices_from_mask
from .kernels.solve.indices import mask_from_indices as mask_from_indices
from .kernels.solve.objective import magnitude as magnitude
from .kernels.solve.objective import objective as one_per_instance
from .problem import Weights


def evaluate(W: Tensor | Weights, mask: Tensor) -> Tensor:
    """Objective f(S) in float64.

    Parameters
    ----------
    W : Tensor, shape (..., n, n), float32 or float64, or Weights
    mask : Tensor, shape (..., n), bool

    Returns
    -------
    Tensor, shape (...), float64
        Exact up to its last digit, however large the weights that cancel.

    Notes
    -----
    O(n²) per instance. Rounding errors of additions are kept and added back. If nearly everything cancels, the sum is
    computed again without rounding, by `math.fsum`: a large weight never hides a small one.

    References
    ----------
    Ogita, Rump & Oishi, SIAM J. Sci. Comput. 26 (2005).

    Examples
    --------
    >>> W = torch.tensor([[4.0, 1.0, -2.0], [1.0, 3.0, 0.0], [-2.0, 0.0, 5.0]])
    >>> evaluate(W, torch.tensor([True, False, True]))
    tensor(5., dtype=torch.float64)
    """
    if not isinstance(W, Tensor):
        return W.objective(mask)
    if W.shape[:-1] == mask.shape:
        return one_per_instance(W, mask)
    if W.ndim == 2 and mask.numel():  # many choices of one instance
        return torch.stack([evaluate(W, one) for one in mask.reshape(-1, mask.shape[-1])]).reshape(mask.shape[:-1])
    return one_per_instance(W.expand(*mask.shape[:-1], *W.shape[-2:]), mask)

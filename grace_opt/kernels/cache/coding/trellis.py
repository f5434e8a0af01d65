r"""Trellis codes in torch operations, for any device: the definition of the compiled loop.

A code of b bits chooses among the levels of b + 1 bits, half of which the codes before it rule out. With :math:`u_t`
the lowest bit of the code of column t, the two lowest bits of what is read are

.. math:: z_{0,t} = u_{t-1}, \qquad z_{1,t} = u_t \oplus u_{t-2} \oplus u_{t-3},

and the others are the code's others. So levels whose numbers have the same two lowest bits, a *subset*, are four apart,
and the three last bits u, the *state*, say which two of the four subsets a code can choose from. The codes of a row are
those of the least sum of squared errors of all that this allows, found by Viterbi's algorithm.

When: the same bits shall cost less error: .83 of it with one bit, .73 with two, .67 with three, for a Gaussian.
Source: Marcellin and Fischer, IEEE Trans. Communications 38 (1990), with Ungerboeck's code of eight states (IEEE Trans.
Information Theory 28, 1982).
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Of the last bits u there are this many, and subsets of levels.
STATES, SUBSETS = 8, 4


def subset(state: int, bit: int) -> int:
    """Return the subset of levels that a bit u chooses in a state, the last bit u being the state's lowest.

    Examples
    --------
    >>> [[subset(state, bit) for bit in (0, 1)] for state in range(8)]
    [[0, 2], [1, 3], [2, 0], [3, 1], [2, 0], [3, 1], [0, 2], [1, 3]]
    """
    return state & 1 | (bit ^ state >> 1 & 1 ^ state >> 2) << 1


#: What leads to each state: the states before, and the subsets that the state's lowest bit chose in these.
_BEFORE = [(state >> 1, (state >> 1) + STATES // 2) for state in range(STATES)]
_CHOSEN = [[subset(before, state & 1) for before in pair] for state, pair in enumerate(_BEFORE)]


def as_read(codes: Tensor) -> Tensor:
    """Return trellis codes ``(..., n)`` uint8 of b bits as the codes of b + 1 bits that they are read as.

    Examples
    --------
    >>> as_read(torch.tensor([1, 0, 3, 0, 2], dtype=torch.uint8)).tolist()
    [2, 1, 4, 3, 6]
    """
    last = torch.nn.functional.pad(codes & 1, (STATES.bit_length() - 1, 0))
    first, second, third, own = (last[..., start : start + codes.shape[-1]] for start in range(4))
    return third | (own ^ second ^ first) << 1 | codes >> 1 << 2


def searched(scaled: Tensor, levels: Tensor, bits: Tensor) -> Tensor:
    """Return the codes ``(R, n)`` uint8 with the least sum of squared errors, by Viterbi's algorithm.

    Parameters
    ----------
    scaled : Tensor (R, n), float32
        Divided by their scales.
    levels : Tensor (R, 256), float32
        Of each row, as it is read; ascending.
    bits : Tensor (R,)
        Of each row's codes.
    """
    rows, count = scaled.shape
    errors = torch.full((SUBSETS, rows, count), torch.inf, dtype=torch.float32, device=scaled.device)
    nearest = torch.zeros(errors.shape, dtype=torch.uint8, device=scaled.device)
    used, most = 2 << bits.long(), 2 << int(bits.max()) if len(bits) else 0
    for code in range(most):
        error = (scaled - levels[:, code, None]).square_()
        own, number = errors[code % SUBSETS], nearest[code % SUBSETS]
        closer = (error < own) & (code < used)[:, None]
        own.copy_(torch.where(closer, error, own))
        number.masked_fill_(closer, code)
    before, chosen = (torch.tensor(part, dtype=torch.int64, device=scaled.device) for part in (_BEFORE, _CHOSEN))
    costs = torch.full((STATES, rows), torch.inf, dtype=torch.float32, device=scaled.device)
    costs[0], by_column = 0.0, errors.permute(2, 0, 1)
    second = torch.empty(count, STATES, rows, dtype=torch.bool, device=scaled.device)
    for column in range(count):
        one, other = (costs[before[:, n]] + by_column[column][chosen[:, n]] for n in (0, 1))
        torch.lt(other, one, out=second[column])
        costs = torch.minimum(one, other)
        costs -= costs[0].clone()  # so that they stay small, and float32 precise
    state, codes = costs.argmin(0), torch.empty(rows, count, dtype=torch.uint8, device=scaled.device)
    every = torch.arange(rows, device=scaled.device)
    for column in reversed(range(count)):
        way = second[column, state, every].long()
        level = nearest[chosen[state, way], every, column]
        codes[:, column] = level >> 2 << 1 | state.to(torch.uint8) & 1
        state = before[state, way]
    return codes

"""Hulls, steps and moves, compiled: group after group, and instance after instance."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .._shared.jit import c_function, inlined
from .._shared.memory import array_at, empty
from .._shared.threads import ALONE_BELOW, array_of, call_with, split_batch
from .._shared.whole import sorted_places
from .reference import LARGEST_SLOPE, SMALLEST_SLOPE


def lower_hulls(losses: Tensor, costs: Tensor, admissible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `grace_opt.kernels.steps.lower_hulls`; the batch is shared among threads."""
    batch, groups, count = losses.shape
    kinds = torch.float64, torch.float64, torch.uint8
    inputs = [array_of(tensor, kind) for tensor, kind in zip((losses, costs, admissible), kinds, strict=True)]
    outputs = [np.zeros((batch, groups, count), np.int64), *(np.zeros((batch, groups, count - 1)) for _ in range(2))]
    sizes = groups, count

    def fill(*arrays: npt.NDArray[Any]) -> None:
        call_with(hulls_at, arrays, (len(arrays[0]), *sizes))

    split_batch(fill, (*inputs, *outputs), alone=losses.numel() < ALONE_BELOW)
    levels, cost, slope = (torch.from_numpy(array) for array in outputs)
    return levels, cost, slope


def within_budget(
    losses: Tensor,
    costs: Tensor,
    admissible: Tensor,
    limits: Tensor,
    hull_levels: Tensor,
    hull_cost: Tensor,
    hull_slope: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `grace_opt.kernels.steps.within_budget`; the batch is shared among threads.

    Parameters
    ----------
    losses, costs, admissible : Tensor (B, n, L)
    limits : Tensor (B,)
    hull_levels : Tensor (B, n, L), int64
    hull_cost, hull_slope : Tensor (B, n, L - 1), float64
    """
    order = hull_slope.flatten(1).sort(dim=-1, descending=True, stable=True).indices
    number, whole = torch.float64, torch.int64
    tensors = losses, costs, admissible, limits, hull_levels, hull_cost, hull_slope, order
    kinds = number, number, torch.uint8, number, whole, number, number, whole
    inputs = [array_of(tensor, kind) for tensor, kind in zip(tensors, kinds, strict=True)]
    levels, price, sizes = np.zeros(losses.shape[:2], np.int64), np.zeros(len(losses)), losses.shape[1:]

    def fill(*arrays: npt.NDArray[Any]) -> None:
        call_with(spend_at, arrays, (len(arrays[0]), *sizes))

    split_batch(fill, (*inputs, levels, price), alone=losses.numel() < ALONE_BELOW)
    return torch.from_numpy(levels), torch.from_numpy(price)


@inlined(error_model="numpy")
def hulls(losses, costs, admissible, levels, added, slopes):
    """Fill `levels` (B, n, L) int64, and `added` and `slopes` (B, n, L - 1) float64.

    losses, costs : (B, n, L) float64; admissible : (B, n, L) bool or uint8
    """
    count = losses.shape[2]
    for b in range(losses.shape[0]):
        for i in range(losses.shape[1]):
            loss, cost, may = losses[b, i], costs[b, i], admissible[b, i]
            level = 0
            for to in range(count):
                if may[to] and (
                    not may[level] or cost[to] < cost[level] or (cost[to] == cost[level] and loss[to] < loss[level])
                ):
                    level = to
            levels[b, i, 0] = level
            bound = LARGEST_SLOPE
            for s in range(count - 1):
                steepest, shortest, step = 0.0, np.inf, level
                for to in range(count):
                    saved, extra = loss[level] - loss[to], cost[to] - cost[level]
                    if may[to] and saved > 0 and extra > 0:
                        slope = min(max(saved / extra, SMALLEST_SLOPE), LARGEST_SLOPE)
                        # Levels that cost the same are compared by their losses: slopes may round to the same.
                        if slope > steepest or (
                            slope == steepest and (extra < shortest or (extra == shortest and loss[to] < loss[step]))
                        ):
                            steepest, shortest, step = slope, extra, to
                if steepest == 0:
                    levels[b, i, s + 1 :] = level
                    break
                added[b, i, s] = cost[step] - cost[level]
                bound = min(bound, steepest)  # rounding must not reverse the order of steps
                slopes[b, i, s] = bound
                level = step
                levels[b, i, s + 1] = level


@inlined(error_model="numpy")
def spend(losses, costs, admissible, limits, hull_levels, hull_cost, hull_slope, order, levels, price):
    """Fill `levels` (B, n) int64 and `price` (B,) float64.

    losses, costs : (B, n, L) float64; admissible : (B, n, L) bool or uint8; limits : (B,) float64
    hull_levels : (B, n, L) int64; hull_cost, hull_slope : (B, n, S) float64
    order : (B, n S) int64, the steps, the steepest first
    """
    groups, count = losses.shape[1], losses.shape[2]
    steps = count - 1
    best, proposed = empty((groups,), np.float64), empty((groups,), np.int64)
    for b in range(losses.shape[0]):
        chosen, cost, loss = levels[b], costs[b], losses[b]
        least, end, last, fits = 0.0, 0.0, np.inf, True
        for i in range(groups):
            chosen[i] = hull_levels[b, i, 0]
            least += cost[i, chosen[i]]
        slack = limits[b] - least
        for place in range(groups * steps):
            i, s = order[b, place] // steps, order[b, place] % steps
            size = hull_cost[b, i, s]
            before = end
            end += size
            fits = fits and end <= slack
            if fits:
                if hull_slope[b, i, s] > 0:
                    chosen[i] = hull_levels[b, i, s + 1]
                if size > 0:
                    last = hull_slope[b, i, s]
            elif size > 0:
                first = hull_slope[b, i, s]
                none_left = min(max(slack - before, 0.0), size) == 0
                price[b] = 0.5 * (first + last) if first > 0 and last < np.inf and none_left else first
                break
        while True:
            spent = 0.0
            for i in range(groups):
                spent += cost[i, chosen[i]]
            slack = limits[b] - spent
            for i in range(groups):
                now, gain, level = chosen[i], 0.0, 0
                for to in range(count):
                    saved, extra = loss[i, now] - loss[i, to], cost[i, to] - cost[i, now]
                    if admissible[b, i, to] and saved > 0 and extra <= slack:
                        value = LARGEST_SLOPE if extra <= 0 else min(max(saved / extra, SMALLEST_SLOPE), LARGEST_SLOPE)
                        if value > gain:
                            gain, level = value, to
                best[i], proposed[i] = -gain, level
            end, moved = 0.0, False
            for i in sorted_places(best):
                if best[i] == 0:
                    break
                end += max(cost[i, proposed[i]] - cost[i, chosen[i]], 0.0)
                if end > slack:
                    break
                chosen[i], moved = proposed[i], True
            if not moved:
                break


# As Python calls them: with the addresses of the arrays, and their sizes.


@c_function("void(intp)")
def hulls_at(data):
    """Call `hulls`."""
    table = array_at(data, (9,), np.int64)
    batch, groups, count = table[6], table[7], table[8]
    hulls(
        array_at(table[0], (batch, groups, count), np.float64),
        array_at(table[1], (batch, groups, count), np.float64),
        array_at(table[2], (batch, groups, count), np.uint8),
        array_at(table[3], (batch, groups, count), np.int64),
        array_at(table[4], (batch, groups, count - 1), np.float64),
        array_at(table[5], (batch, groups, count - 1), np.float64),
    )


@c_function("void(intp)")
def spend_at(data):
    """Call `spend`."""
    table = array_at(data, (13,), np.int64)
    batch, groups, count = table[10], table[11], table[12]
    steps = count - 1
    spend(
        array_at(table[0], (batch, groups, count), np.float64),
        array_at(table[1], (batch, groups, count), np.float64),
        array_at(table[2], (batch, groups, count), np.uint8),
        array_at(table[3], (batch,), np.float64),
        array_at(table[4], (batch, groups, count), np.int64),
        array_at(table[5], (batch, groups, steps), np.float64),
        array_at(table[6], (batch, groups, steps), np.float64),
        array_at(table[7], (batch, groups * steps), np.int64),
        array_at(table[8], (batch, groups), np.int64),
        array_at(table[9], (batch,), np.float64),
    )

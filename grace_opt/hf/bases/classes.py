"""Classes of tokens: sorted by the attention that they receive, a prompt's tokens share bits with those like them.

The first class has the 2 % of the tokens that matter most, then come 10, 30 and 58 %. Sizes are multiples of 8, except
that of the last class, which takes the rest: bit planes hold eight tokens to a byte. A class with fewer than 8 tokens
merges into the next one, so short prompts have fewer classes.

Source: the fractions of an ablation over two to six classes; six bring no more than four.
"""

from __future__ import annotations

from torch import Tensor

#: Share of the tokens in each class, most important first.
FRACTIONS = (0.02, 0.1, 0.3, 0.58)
#: Sizes of all classes but the last are multiples of this, and no class of several is smaller.
CLASS_STEP = 8
#: Number of last tokens of a calibration text that belong to no class.
WINDOW = 32
#: Bits of a token's class.
CLASS_BITS = 2
#: Weight that every token has, whatever attention it received, as a share of the mean weight: later queries may ask for
#: what no query has asked for yet.
WEIGHT_FLOOR = 0.05


def class_sizes(count: int, classes: int | None = None) -> tuple[int, ...]:
    """Return the number of tokens in each class, most important first.

    If `count` grows by 64 or more, no class gets smaller; where a class is added, it is the first, and all others keep
    their places counted from the end.

    Parameters
    ----------
    count : int
        Number of tokens.
    classes : int, optional
        Number of classes, as when a prompt's classes grow; by default as many as have 8 tokens each.

    Examples
    --------
    >>> class_sizes(1756)
    (32, 168, 520, 1036)
    >>> class_sizes(100), class_sizes(100, classes=1), class_sizes(5), class_sizes(0)
    ((8, 24, 68), (100,), (5,), ())
    """
    if count == 0:
        return ()
    for number in (classes,) if classes is not None else range(len(FRACTIONS), 1, -1):
        found = _sizes(count, number)
        if classes is not None or min(found) >= CLASS_STEP:
            return found
    return (count,)


def _sizes(count: int, classes: int) -> tuple[int, ...]:
    merged = len(FRACTIONS) - classes + 1
    percents = [round(100 * share) for share in (sum(FRACTIONS[:merged]), *FRACTIONS[merged:-1])][: classes - 1]
    # Each size on its own rather than cuts between them: a cut that moves would make the class behind it smaller.
    first = [percent * count // (100 * CLASS_STEP) * CLASS_STEP for percent in percents]  # in integers: no rounding
    return (*first, count - sum(first))


def token_weights(first: Tensor, second: Tensor, floor: float = WEIGHT_FLOOR) -> tuple[Tensor, Tensor]:
    """Return how much a squared error in each token's key and in its value counts, ``(H, T)`` each.

    Parameters
    ----------
    first, second : Tensor
        ``(H, T)``: means of p and of p², the attention that each of these tokens receives.
    floor : float
        Added to every token, as a share of the mean.

    Notes
    -----
    A key's error changes the logit, and counts by p. A value's error changes the output by p times itself and would
    count by p²; the geometric mean of that and its mean over tokens does better for queries that come later.

    Examples
    --------
    >>> import torch
    >>> keys, values = token_weights(torch.tensor([[0.75, 0.25]]), torch.tensor([[0.5, 0.0]]), floor=0.5)
    >>> keys, values
    (tensor([[1.0000, 0.5000]]), tensor([[0.4419, 0.0884]]))
    """
    values = (second.clamp(min=0) * second.mean(-1, keepdim=True)).sqrt()
    return tuple(weight + floor * weight.mean(-1, keepdim=True) for weight in (first, values))  # type: ignore[return-value]

"""Attention of one new token over few of the stored tokens, with a bound on the attention that is not read.

On the CPU in float32 compiled loops; everywhere else, and if weights or gradients are needed, torch's `reference` and,
for samples, `sampled`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..._shared.operation import Compiled, Operation, trial_of
from . import host, sampled_host
from . import reference as reference
from . import sampled as sampled
from .hashes import HashTables as HashTables
from .pages import FirstChannels as FirstChannels
from .pages import PageRanges as PageRanges
from .pages import PageScores as PageScores
from .reference import Few as Few
from .stored import Stored as Stored
from .tensors import unsupported_reason

#: Fewer tokens take torch so little time that compiling would not pay off.
CPU_MIN_TOKENS = 256
OPERATION = Operation(
    "reading",
    "attention over few of the stored tokens",
    cpu=Compiled(
        f"float32, one new token, from {CPU_MIN_TOKENS} stored ones on, without softcap; codes (bits=) have their own",
        trial_of(__name__, "cpu"),
        "torch",
    ),
)


def attention_for(
    query: Tensor, stored: Stored, mask: Tensor | None, softcap: float | None, pages: PageScores | HashTables
) -> Callable[..., Few]:
    """Return what computes attention on these tensors: the compiled loop if it supports them, else the reference.

    Parameters
    ----------
    query, stored, mask, softcap, pages
        As in `tensors.unsupported_reason`.
    """
    few = stored.keys.shape[2] < CPU_MIN_TOKENS
    if few or unsupported_reason(query, stored, mask, softcap, pages) is not None:
        return reference_for(pages)
    return sampled_host.read_sample if isinstance(pages, HashTables) else host.read_attention


def reference_for(pages: PageScores | HashTables) -> Callable[..., Few]:
    """Return what defines attention over few tokens, chosen by pages or drawn by tables."""
    return sampled.attention if isinstance(pages, HashTables) else reference.attention

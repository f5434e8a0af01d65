"""`Store`: one way to hold a layer's older tokens.

A layer of the cache (`grace_opt.hf.engine.layer`) has a dense tail of the newest tokens and, once the prompt is over, a
store of the older ones. It asks the store for everything, and nobody asks which store it is. For ``B`` sequences, ``H``
KV heads and ``n`` tokens, keys are ``(B, H, n, d)`` and values ``(B, H, n, d_v)``.

A store is immutable: what grows or moves it returns another one that shares the unchanged parts, so beams and copies
may hold the same. `grace_opt.hf.stores.maker` makes them, and has the base class of simple ones.

Source: the two segments are ThinK's (arXiv 2407.21018).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from ...errors import CacheError
from ..bases.divergence import Divergence
from ..models.attention import Attended
from ..models.observation import Observation
from .counting import bits_of, tensors_in
from .packed.tokens import QuantizedTokens, StoredTensor
from .plan import LayerPlan
from .tail import Tail
from .tally import ReadTally


class Step(NamedTuple):
    """A call of the attention function with new tokens, over a store and the dense tail.

    Attributes
    ----------
    module : Module
        The model's attention module.
    query : Tensor
        ``(B, H_q, L, d)``, post-RoPE.
    tail, value : Tensor
        ``(B, H, S_t, d)`` and ``(B, H, S_t, d_v)``, the new tokens among them.
    mask : Tensor or None
        ``(B or 1, H_q or 1, L, S)``, bool (True attends) or additive, for all tokens that were fed in; None means
        causal, without padding.
    wants_weights : bool
        Whether the attention weights are needed.
    tally : ReadTally
        Is told what was read, if not all.
    arguments : dict
        The other arguments of transformers' attention functions: ``scaling``, ``softcap``, ``dropout``, ….
    """

    module: nn.Module
    query: Tensor
    tail: Tensor
    value: Tensor
    mask: Tensor | None
    wants_weights: bool
    tally: ReadTally
    arguments: dict[str, Any]


class Store(ABC):
    """A layer's older tokens.

    Attributes
    ----------
    length : int
        Number of tokens of the sequence that it covers, padding included; with eviction, more than are stored.
    positions : Tensor or None
        ``(B, 1 or H, stored)`` int32: positions of the stored tokens in the sequence; None means all tokens, in order.
    """

    if TYPE_CHECKING:  # fields of a dataclass, or properties

        @property
        def length(self) -> int: ...

        @property
        def positions(self) -> Tensor | None: ...

    #: Newer tokens are appended only once they have been attended to.
    appends_attended = False
    #: Some heads store fewer tokens than others, and begin with zeros that a mask must hide.
    needs_mask = False
    #: Newest stored tokens that are not stored for good yet.
    waiting = 0
    #: How unlike the texts of its calibration the prompt is; None if nobody has measured it.
    divergence: Divergence | None = None
    #: What to write where a model needs keys of full width.
    full_width_instead = "fused=False"

    # ------------------------------------------------- growing, shrinking

    def warning(self, plan: LayerPlan, newer: int) -> str | None:
        """Say what of the prompt stays dense, although a store was made; `newer` tokens are in the tail."""
        return None

    @abstractmethod
    def extended(self, plan: LayerPlan, tokens: Tail) -> Store:
        """Append newer tokens."""

    def within(self, plan: LayerPlan, tail: Tail, rows: int) -> Store:
        """Return it with as few bytes as so many sequences may have under a limit; raises `CacheError` if it cannot."""
        return self

    def remembered(self) -> Callable[[], None]:
        """Return what takes back all that steps from now on note in this object; it is immutable otherwise."""
        return lambda: None

    def positions_with(self, newer: int) -> Tensor | None:
        """Return `positions`, followed by those of so many newer tokens."""
        if self.positions is None:
            return None
        more = torch.arange(self.length, self.length + newer, device=self.positions.device, dtype=torch.int32)
        return torch.cat([self.positions, more.expand(*self.positions.shape[:2], -1)], dim=-1)

    def cropped(self, length: int) -> Store:
        """Keep only the first ``length`` tokens.

        Raises
        ------
        CacheError
            If the stored tokens cannot be cut there.
        """
        raise CacheError(
            f"the cache can be cropped to {self.length} tokens or more, not to {length}: a {type(self).__name__} "
            "cannot be cut; call reset() and start again"
        )

    def beside(self, others: Sequence[Store], lengths: Sequence[int]) -> Store:
        """Return the first tokens of single sequences, of this and of others, as a batch that is padded on the left.

        Parameters
        ----------
        others : sequence of Store
            All of the kind of this one.
        lengths : sequence of int
            How many of each; this one's first.

        Raises
        ------
        CacheError
            If they cannot be cut there, or not be padded.
        """
        raise CacheError(f"a {type(self).__name__} cannot be padded")

    def before_tail(self, tail: int) -> Store:
        """Return it for a tail that was cut to so many tokens."""
        return self

    def real_alone(self, plan: LayerPlan, over: Observation, tail: Tail) -> Tail:
        """Return the tail as it is to be stored later, where what padding holds matters."""
        return tail

    # ------------------------------------------------------------ reading

    @property
    @abstractmethod
    def stored(self) -> int:
        """Number of tokens that each KV head stores; of heads that differ, the most."""

    @property
    def compressed(self) -> int:
        """Number of stored tokens that take less than dense ones."""
        return self.stored

    def needs_our_attention(self, fused: bool) -> bool:
        """Whether only grace_opt's attention function can read it: where tokens are not all there, in order."""
        return self.positions is not None

    @abstractmethod
    def dense(self, tail: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return all keys and values at full width: the stored tokens', then the tail's."""

    def attend(self, step: Step) -> Attended | None:
        """Compute attention over the stored tokens and the tail; None: the caller does, over `dense`."""
        return None

    def attended(self, keys: Tensor, step: Step, mask: Tensor | None) -> None:  # noqa: B027 - few need it
        """Take note of attention that the caller is about to compute, over ``dense`` keys and the stored columns."""

    def compresses(self, row: int, tokens: int, sinks: int) -> bool:
        """Whether any of a sequence's tokens is compressed, of which `tokens` that are real came before the tail."""
        return tokens > sinks  # padding is stored first

    def kept_channels(self) -> Tensor | None:
        """Return the indices of the channels that keys keep, ``(B, H, d')``; None where none are dropped."""
        return None

    # --------------------------------------------- moving, counting, files

    @abstractmethod
    def parts(self) -> dict[str, StoredTensor]:
        """Return the tensors that it consists of, by name."""

    def held(self) -> dict[str, StoredTensor]:
        """Return all tensors kept alive, by name: `parts`, and what is made again from them."""
        return self.parts()

    @abstractmethod
    def changed(self, change: Callable[[Any], Any]) -> Self:
        """Return it with a function applied to all tensors."""

    def select(self, rows: Tensor) -> Self:
        """Select sequences of the batch in this order, repeated if listed repeatedly."""

        def pick(part: StoredTensor) -> StoredTensor:
            return part.select(rows) if isinstance(part, QuantizedTokens) else part[rows.to(part.device)]

        return self.changed(pick)

    def to(self, device: torch.device | str) -> Self:
        """Move to another device without waiting."""
        return self.changed(lambda part: part.to(device, non_blocking=True))

    def owned(self) -> Store:
        """Return it with copies of what are views of the prompt's tensors, so that these can be freed."""
        return self

    def outside_inference(self) -> Self:
        """Return it with copies of tensors that were made in inference mode, which autograd cannot keep."""

        def unusable(part: StoredTensor) -> bool:
            return isinstance(part, Tensor) and part.is_inference()

        if not any(map(unusable, self.parts().values())):
            return self
        return self.changed(lambda part: part.clone() if unusable(part) else part)

    def sizes(self) -> Counter[str]:
        """Return bytes by kind: ``keys``, ``sink_keys``, ``values``, ``indices``, ``reading`` and finer ones."""
        found: Counter[str] = Counter()
        for name, part in self.held().items():
            found["reading" if name.startswith("reading.") else _kind(name)] += part.nbytes
        return found

    def bits(self, widths: Sequence[int], sinks: int) -> tuple[list[float], list[int], int]:
        """Count bits as if the model had 16: of keys and of values, the elements of both, and bits of dense sinks.

        Parameters
        ----------
        widths : (int, int)
            Numbers of keys and of values that one token has, in all sequences and heads.
        sinks : int
            Number of first tokens that are dense.
        """
        found: Counter[str] = Counter()
        for name, part in self.parts().items():
            found[_kind(name)] += sum(map(bits_of, tensors_in(part)))
        keys = found["keys"] + found["indices"]
        sunk = sinks if found["sink_keys"] else 0
        elements = [widths[0] * (self.length - sunk), widths[1] * self.length]
        return [float(keys), float(found["values"])], elements, found["sink_keys"]

    @abstractmethod
    def to_file(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors by name, and plain values for JSON, from which its maker makes the same again."""


def _kind(name: str) -> str:
    """Return the kind of a part in `Store.sizes`, by its name."""
    if "sink_keys" in name:
        return "sink_keys"
    return "values" if "values" in name else "keys" if "keys" in name else "indices"

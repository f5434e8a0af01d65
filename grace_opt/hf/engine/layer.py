"""One layer of the cache: a dense tail of the newest tokens, and a store of the older ones.

In order: ``update`` appends to the dense tail and passes it to the attention function
(:mod:`grace_opt.hf.engine.attention`). After the prompt's dense attention, that function passes its queries and padding
to :meth:`observe`. When the prompt is over (:mod:`grace_opt.hf.engine.prompt`), the layer's maker
(:mod:`grace_opt.hf.stores.maker`) makes a store of its older tokens. From then on ``update`` returns the dense tail
with the store attached, and blocks that have left the recent window go to the store.

For ``B`` sequences, ``H`` KV heads and head width ``d``, the tail is ``(B, H, S_t, d)``: the recent window and all that
came after it. What the store holds is its own affair; it covers the tokens before (``Store.length``).

Source: ``DynamicLayer`` of transformers, with the same interface; ThinK (arXiv 2407.21018) for two segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from ..._util.arrays import without_autocast
from ..._util.parameters import integer
from ..._util.warning import warn
from ...errors import CacheError, OptionError
from ..models.compat import crop_is_relative
from ..models.filler import Filler
from ..models.observation import Observation
from ..stores.channels.choice import raise_for_verdict
from ..stores.coded.maker import CODED
from ..stores.maker import StoreMaker
from ..stores.old_tokens import without_full_mask
from ..stores.packed.tokens import StoredTensor
from ..stores.plan import LayerPlan
from ..stores.store import Store
from ..stores.tail import TAIL_GROWTH, Tail
from ..stores.tally import ReadTally
from .layer_context import LayerContext, with_context
from .prompt import NO_TOKENS, Prompt

_CROP_IS_RELATIVE = crop_is_relative()


class PrunedKeyLayer(DynamicLayer):
    """A dynamic cache layer whose older tokens are in a store.

    Parameters
    ----------
    plan : LayerPlan
        How this layer's tokens are to be stored.
    maker : StoreMaker
        Makes the store of its older tokens.
    """

    def __init__(self, plan: LayerPlan, maker: StoreMaker) -> None:
        super().__init__()
        self.plan, self.maker = plan, maker
        self.prompt = Prompt(plan)
        self.tail: Tail | None = None
        self.compressed: Store | None = None
        #: What the steps of `read=` have read.
        self.tally = ReadTally()
        self.head_dim = 0
        #: The model's attention implementation when keys were last returned, if the cache knows it.
        self.implementation = ""
        self._awaits_attention = False
        self._filler = Filler()
        self._announced = False
        self._fresh = False  # compressed, and unchanged since
        self._postponed: Observation | None = None
        #: Whether compressing the prompt has begun and, because of an error or Ctrl-C, not ended.
        self.interrupted = False
        self._verdict: Tensor | None = None  # a check that the device has not finished yet
        #: Takes the step of several tokens back, in all layers, if it cannot keep a limit of bytes.
        self.undo: Callable[[], None] | None = None

    # ------------------------------------------------------------ growing

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take type, device and shape from the first keys and values; store nothing yet."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.head_dim = key_states.shape[-1]
        self.tail = Tail(key_states[:, :, :0], value_states[:, :, :0])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the new tokens and return the keys and values for the attention function.

        Returns
        -------
        keys, values : Tensor
            The dense tail. Before the prompt is compressed, that is everything; afterwards, the compressed part is
            attached to the keys. With ``fused=False``, all tokens at full width, unless they are stored in another
            order.

        Raises
        ------
        CacheError
            If the previous step's keys never reached grace_opt's attention function, or the shapes do not match the
            cached tokens.
        """
        self.check_attended()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.settle()
        tail = self._stored()
        self._check_continues(tail, key_states, value_states)
        over = self.prompt.pending(key_states.shape[-2])
        if over is not None:
            tail = self._compress(over, tail.keys, tail.values)
        if self._fresh and self.compressed is not None:
            self.compressed, self._fresh = self.compressed.owned(), False
        if self.compressed is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.compressed = self.compressed.outside_inference()
        if self.compressed is not None and self.compressed.appends_attended:
            # Before the new tokens come: those here have been attended to, and stay.
            self._move_old_tail(0)
            tail = self._stored()
        tail.append(key_states, value_states, self._growth(key_states.shape[-2]))
        if self.compressed is not None and not self.compressed.appends_attended:
            # Among candidates, only the first token is sure to stay; the others may be cropped again.
            self._move_old_tail(key_states.shape[-2] - 1 if self.prompt.assisted else 0)
        tail, old = self._stored(), self.compressed
        if old is not None and not self.needs_our_attention:
            return old.dense(tail.keys, tail.values)  # which suits any attention function
        self._awaits_attention = True
        context = LayerContext(self, old)
        return with_context(tail.keys, context), with_context(tail.values, context)

    @property
    def needs_our_attention(self) -> bool:
        """Whether only grace_opt's attention function can read what is now stored."""
        return self.compressed is not None and self.compressed.needs_our_attention(self.plan.config.fused)

    def _growth(self, new: int) -> int:
        """Return for how many tokens the tail allocates room: under a limit of bytes, for no more than it will hold."""
        bits, block = self.plan.bits, self.plan.config.tail_block
        if bits is None or bits.limit is None or block is None:
            return TAIL_GROWTH
        most = self.plan.config.recent_window + block
        return min(max(most - self._stored().length - new, 0), TAIL_GROWTH)

    def keep_within(self) -> None:
        """Under a limit of bytes, store what has left the recent window, before a step or after a turn's attention.

        A text that began too short to be coded is coded from here on.

        Raises
        ------
        CacheError
            If the tokens cannot be stored in so few bytes; nothing has changed.
        """
        bits, block = self.plan.bits, self.plan.config.tail_block
        if bits is None or bits.limit is None or block is None:
            return
        if self.tail is None or self.prompt.waiting:
            return
        if self.compressed is None and self.tail.length >= self.plan.config.recent_window + block:
            self.compressed = CODED.of_beginning(self.plan, self.tail)
            try:
                self._move_old_tail(0)
            except BaseException:
                self.compressed = None
                raise
        else:
            self._move_old_tail(0)

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return 0 if self.tail is None else len(self.tail.keys)

    def fit_rows(self, rows: int) -> None:
        """Under a limit of bytes, code again if so many sequences would otherwise take too many.

        Raises
        ------
        CacheError
            If they cannot be coded in so few; nothing has changed.
        """
        if self.compressed is not None and self.tail is not None:
            self.compressed = self.compressed.within(self.plan, self.tail, rows)

    def attention_over(self, new: int) -> None:
        """Take note that attention over the store has been computed for so many new tokens."""
        if new > 1:
            with self._or_undone():
                self.keep_within()

    @contextmanager
    def _or_undone(self) -> Iterator[None]:
        """Take the step back in all layers if the first one cannot keep a limit of bytes; others come to the same."""
        undo, self.undo = self.undo, None
        try:
            yield
        except CacheError:
            if undo is not None:
                undo()
            raise

    def _move_old_tail(self, unsure: int) -> None:
        """Store each full block of tokens that has left the recent window; unsure tokens do not count."""
        block, tail = self.plan.config.tail_block, self._stored()
        if block is None or self.compressed is None:
            return
        spare = tail.length - unsure - self.plan.config.recent_window
        if spare >= block:
            moved, store = spare // block * block, self.compressed
            with without_autocast(tail.keys):
                for first in range(0, moved, block):
                    store = store.extended(self.plan, tail.cut(first, first + block))
            self.compressed, self.tail = store, tail.cut(moved, tail.length)

    # --------------------------------------- with the attention function

    def check_attended(self) -> None:
        """Raise if returned keys never reached grace_opt's attention function: they cannot be pruned."""
        if not self._awaits_attention:
            return
        lost = f"the keys of layer {self.plan.index} did not reach grace_opt's attention function, "
        if self.implementation.startswith("grace_"):
            raise CacheError(
                f'{lost}although "{self.implementation}" is selected: this model changes its keys between cache and '
                "attention (as multi-head latent attention does, for example in DeepSeek), and cannot be pruned; use "
                "transformers' own DynamicCache for it"
            )
        raise CacheError(
            f'{lost}so the cache could only stay dense; write model.set_attn_implementation("grace_sdpa") before '
            'generating ("grace_eager" for models that need eager attention) and start from a new or reset() cache'
        )

    def check_numbers(self) -> None:
        """Raise if the channels were chosen from unusable numbers; may wait for the device, once."""
        if self._verdict is not None and not torch.compiler.is_compiling():
            verdict, self._verdict = self._verdict, None
            raise_for_verdict(self.plan.index, verdict.tolist())

    def check_filled_by(self, module: nn.Module) -> None:
        """Raise if the layer was filled by a model with other weights than those of this attention module."""
        self._filler.check(module, self.plan.index)

    def attended(self) -> bool:
        """Record that the attention function has received what ``update`` returned; say if it is the first to."""
        first, self._awaits_attention = self._awaits_attention, False
        return first

    def observe(self, now: Observation, keys: Tensor, values: Tensor, at_once: bool = True) -> None:
        """Receive the attention function's queries, and compress if the prompt is over.

        Parameters
        ----------
        now : Observation
            Queries and padding of this forward pass.
        keys, values : Tensor
            All that is cached, as ``update`` returned it. Not read from the layer, which may have been offloaded since.
        at_once : bool
            False postpones the compression to `settle` while ``torch.compile`` is tracing, because it cannot be traced.
        """
        over = self.prompt.observe(now)
        if over is not None and not at_once and torch.compiler.is_compiling():
            self._postponed = over
        elif over is not None:
            with self._or_undone():
                self._compress(over, keys, values)
        elif now.length == 1 and self.prompt.declared is None:
            self._announce_short(1)

    @property
    def is_postponed(self) -> bool:
        """Whether `settle` has anything to do."""
        return self._postponed is not None

    def settle(self) -> None:
        """Compress what was postponed while ``torch.compile`` was tracing the prompt."""
        if self._postponed is not None:
            tail, over, self._postponed = self._stored(), self._postponed, None
            self._compress(over, tail.keys, tail.values)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _compress(self, over: Observation, keys: Tensor, values: Tensor) -> Tail:
        self.interrupted = True
        self._verdict = self.maker.check_numbers(self.plan, over, keys, values)
        with torch.no_grad(), without_autocast(keys):
            prompt = keys[:, :, : over.length], values[:, :, : over.length]
            found = self.maker.of_prompt(self.plan, without_full_mask(over), *prompt)
        self.interrupted = False
        if found is None:
            self._announce_short(over.length)
            return self._stored()
        tail, home = Tail(keys, values).beyond(found.length), self._stored().keys.device
        if not any(_share(part, values) for part in found.parts().values()):  # nothing else needs the prompt's values
            tail = tail.cut(0, tail.length)
        tail = found.real_alone(self.plan, over, tail)
        self._announce(found.warning(self.plan, tail.length))
        if home != keys.device:  # an offloading cache has moved the layer away meanwhile
            found = found.to(home)
            tail.map(lambda tensor: tensor.to(home, non_blocking=True))
        self.compressed, self.tail, self._fresh = found, tail, True
        return tail

    def _announce_short(self, length: int) -> None:
        if self.plan.bits is not None and self.plan.bits.limit is not None:
            return  # it is coded once there are enough tokens
        self._announce(self.maker.why_dense(self.plan, length))

    def _announce(self, what: str | None) -> None:
        if what is not None and self.plan.announces and not self._announced:
            self._announced = True
            warn(what)

    # -------------------------------------------------------------- sizes

    @property
    def pruned_length(self) -> int:
        """Number of stored tokens that take less than dense ones."""
        return 0 if self.compressed is None else self.compressed.compressed

    @property
    def evicted_length(self) -> int:
        """Number of tokens that were read and that each KV head has dropped, every head its own; the least of heads."""
        return 0 if self.compressed is None else self.compressed.length - self.compressed.stored

    def get_seq_length(self) -> int:
        """Number of tokens that were added and not cropped: pruned, dense and evicted."""
        old = 0 if self.compressed is None else self.compressed.length
        return old + (0 if self.tail is None else self.tail.length)

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return length and offset for the mask; old transformers pass the new tokens' positions, not their number."""
        count = query_length if isinstance(query_length, int) else query_length.shape[0]
        if count == 0 and not self.get_seq_length():
            raise CacheError(NO_TOKENS)
        if count == 0:
            raise CacheError(
                f"there are no new tokens: the input is taken for the whole text, of which the cache already holds "
                f"{self.get_seq_length()} tokens; give all of it, these first, and for another prompt make a new "
                "CompressedCache or call reset()"
            )
        return self.get_seq_length() + count, 0

    def stored_parts(self) -> dict[str, StoredTensor]:
        """Return all tensors that the layer keeps alive, by name; the tail's buffers include spare room."""
        parts: dict[str, StoredTensor] = {} if self.compressed is None else {**self.compressed.held()}
        if self.tail is not None:
            parts["tail_keys"], parts["tail_values"] = self.tail.buffers
        return parts

    @property
    def keys(self) -> Tensor | None:
        """The keys of `full_width`, for code that reads caches (Mllama's does); None while the layer is empty."""
        return None if self.tail is None else self.full_width()[0]

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        self._refuse(value)

    @property
    def values(self) -> Tensor | None:
        """The values of `full_width`; None while the layer is empty."""
        return None if self.tail is None else self.full_width()[1]

    @values.setter
    def values(self, value: Tensor | None) -> None:
        self._refuse(value)

    def _refuse(self, value: Tensor | None) -> None:
        if value is not None:
            raise CacheError(f"layer {self.plan.index} of the cache cannot be written to; only update() adds tokens")

    def full_width(self) -> tuple[Tensor, Tensor]:
        """Return all keys at full width, pruned channels as zeros, and all values; takes memory for a dense layer."""
        tail = self._stored()
        dense = tail.keys, tail.values
        return dense if self.compressed is None else self.compressed.dense(*dense)

    # --------------------------------------- shrinking, re-ordering, moving

    def activate_past_recording(self) -> None:
        """Record that assisted decoding follows; called by transformers."""
        if self.plan.bits is not None and self.plan.bits.limit is not None:
            raise CacheError(
                "max_bytes= and assisted decoding: candidates stay dense until they are accepted, however many they "
                "are; write bits=, or generate without an assistant"
            )
        self.prompt.assisted = True

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens, from the pruned segment too if necessary.

        Parameters
        ----------
        tokens_to_remove : int
            Negative: remove that many tokens. Zero or positive: as in the installed transformers. Old versions read it
            as the length to keep; in newer ones zero removes nothing and positive numbers are refused.
        """
        tokens_to_remove = integer("tokens_to_remove", tokens_to_remove)
        self.settle()
        length = self.get_seq_length()
        if tokens_to_remove >= 0 and _CROP_IS_RELATIVE:
            if tokens_to_remove > 0:
                if tokens_to_remove >= length:
                    raise OptionError(
                        f"crop({tokens_to_remove}) of {length} tokens: write crop(-n) to remove n tokens, at most "
                        f"{length} of them; reset() removes all"
                    )
                raise OptionError(
                    f"crop({tokens_to_remove}) of {length} tokens is ambiguous; write crop(-{tokens_to_remove}) to "
                    f"remove that many, or crop({tokens_to_remove - length}) to keep that many"
                )
            return
        keep = length + tokens_to_remove if tokens_to_remove < 0 else tokens_to_remove
        if keep >= length:
            return
        if keep <= 0:
            self.reset()
            return
        if self._fresh and self.prompt.declared is None and tokens_to_remove >= 0:
            # This is how generate() of old transformers drops candidates that assisted decoding did not accept.
            raise CacheError(
                f"crop({tokens_to_remove}) right after an undeclared prompt: assisted decoding has fed its candidates "
                "together with the prompt, and they were taken for observed queries. Declare the prompt's end, "
                "CompressedCache(..., prompt_length=inputs.input_ids.shape[1]), or generate inside `with "
                f"grace_opt.hf.attach(model):`; to shorten the prompt yourself, write crop({keep - length})"
            )
        self.prompt.crop(keep, self.plan.index)
        tail = self._stored()
        old = 0 if self.compressed is None else self.compressed.length
        if self.compressed is not None and keep < old:
            self.compressed = self.compressed.cropped(keep)
        self.tail = tail.cut(0, max(keep - old, 0))
        if self.compressed is not None:
            self.compressed = self.compressed.before_tail(self.tail.length)

    def reset(self) -> None:
        """Forget everything, ready for another prompt."""
        self.tail = self.compressed = None
        self.prompt.reset()
        self._filler, self.tally = Filler(), ReadTally()
        self.is_initialized = False
        self._awaits_attention = self._fresh = self.interrupted = False
        self._verdict = self._postponed = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select sequences in this order, repeated if listed repeatedly, as beam search does."""
        rows = beam_idx
        self.settle()
        if self.tail is not None:
            self.tail.map(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))
        if self.compressed is not None:
            self.compressed = self.compressed.select(rows)
        self.prompt.map_rows(rows)

    def offload(self) -> None:
        """Move everything to the CPU."""
        self._move("cpu")

    def prefetch(self) -> None:
        """Move everything back to where it came from."""
        if self.is_initialized:
            self._move(self.device)

    def _move(self, device: torch.device | str) -> None:
        self.settle()
        if self.tail is not None:
            self.tail.map(lambda tensor: tensor.to(device, non_blocking=True))
        if self.compressed is not None:
            self.compressed = self.compressed.to(device)

    # ------------------------------------------------------------- checks

    def _stored(self) -> Tail:
        if self.tail is None:
            raise CacheError(f"layer {self.plan.index} of the cache is empty; run the model on a prompt first")
        return self.tail

    def _check_continues(self, tail: Tail, key_states: Tensor, value_states: Tensor) -> None:
        (batch, heads, _, width), (rows, key_heads, _, key_width) = tail.buffers[0].shape, key_states.shape
        expected, found = (batch, heads, width), (rows, key_heads, key_width)
        if expected != found:
            raise CacheError(
                f"layer {self.plan.index} of the cache holds (batch, KV heads, head_dim) = {expected} but the new "
                f"keys have {found}; use one cache per batch and model, or call reset() in between"
            )
        # Under autocast, rotated keys stay in float32, and values alone tell. Values in fewer bits fit in.
        pairs = (
            ("keys", tail.buffers[0].dtype, key_states.dtype),
            ("values", tail.buffers[1].dtype, value_states.dtype),
        )
        for what, held, new in pairs:
            if held != new and (what == "keys" or torch.promote_types(held, new) != held):
                held_name, new_name = (str(each).removeprefix("torch.") for each in (held, new))
                raise CacheError(
                    f"layer {self.plan.index} of the cache holds {held_name}, but the new {what} are {new_name}; load "
                    f"the model with dtype={held} (or go on under the torch.autocast that the prompt was read under), "
                    "or read the prompt again in a new cache"
                )


def _share(part: StoredTensor, tensor: Tensor) -> bool:
    """Return whether a stored part is a view of the tensor's memory."""
    return isinstance(part, Tensor) and part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()

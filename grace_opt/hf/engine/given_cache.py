"""`GivenCache`: follows a cache through one ``generate``: handed back where the model drops it, and counted at the end.

When: a block of `attach` gives ``generate`` a cache. Phi-3, PhiMoE and Phi-4-multimodal leave it out of the step in
which their text outgrows ``original_max_position_embeddings``: rotary embeddings change there for all tokens, so the
text is read again, and transformers would go on with a dense cache of its own. Ours is emptied and put into that step
instead; the text so far is its new prompt.

Source: ``prepare_inputs_for_generation`` in transformers' ``models/phi3/modeling_phi3.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..models.method_hook import LOCK, MethodHook
from .cache import CompressedCache
from .in_step import undo_of
from .layer import PrunedKeyLayer

_LIMIT = "original_max_position_embeddings"


class GivenCache:
    """A cache in one call of ``generate``.

    Parameters
    ----------
    model : PreTrainedModel
        The model that generates.
    cache : CompressedCache
        What it was given.
    length : int, optional
        Number of tokens of the input, those of the cache included; None if only ``generate`` can know it.
    unsaid : int
        How many of them are embeddings, which ``generate`` does not return.
    keeps_prompt : bool
        Whether it can be given back, at the end, what it held when the prompt was over.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: CompressedCache,
        length: int | None,
        unsaid: int = 0,
        keeps_prompt: bool = False,
    ) -> None:
        self.keeps_prompt = keeps_prompt
        self.cache, self._model, self._length, self._unsaid = cache, model, length, unsaid
        self._hook: PrepareHook | None = None
        #: Gives the layers back what they held when the prompt was over; None if they never held it alone.
        self.at_prompt: Callable[[], None] | None = None
        #: Where the model has dropped the cache for good: how many tokens it has read since, and how many there were.
        self._dropped: tuple[int, int] | None = None

    @contextmanager
    def followed(self) -> Iterator[None]:
        """See to it, while ``generate`` runs, that the model keeps the cache."""
        try:
            with LOCK:
                self._hook = PrepareHook.of(self._model)
                self._hook.given.append(self)
                self._hook.install()
            yield
        finally:
            try:
                self._leave()
            except BaseException:  # an interrupt while leaving
                self._leave()
                raise

    def _leave(self) -> None:
        with LOCK:
            if self._hook is not None:
                self._hook.given[:] = [each for each in self._hook.given if each is not self]
                if not self._hook.given:
                    self._hook.remove()

    def note_prompt(self) -> None:
        """Remember the layers if they hold the prompt, and nothing else; called before each step, and at the end."""
        if self.at_prompt is None and self.cache.get_seq_length() == self._length:
            self.at_prompt = undo_of(self.cache.layers)

    def hand_back(self, step: dict[str, Any], ids: Tensor, mask: Tensor | None) -> None:
        """Put the cache back into a step that the model has prepared without it, if the whole text is read again.

        Parameters
        ----------
        step : dict
            The arguments of the step, which are changed.
        ids : Tensor
            All tokens of the text so far, or those of a chunk.
        mask : Tensor, optional
            The attention mask, of all tokens up to the last of these.
        """
        held = self.cache.get_seq_length()
        embeds = step.get("inputs_embeds")
        read = (step["input_ids"] if embeds is None else embeds).shape[1]
        text = held and (ids.shape[1] if mask is None else mask.shape[-1])
        if read < text:
            self._dropped = read, text
            return
        if "past_key_values" not in inspect.signature(self._model.forward).parameters:
            return
        assisted = any(isinstance(layer, PrunedKeyLayer) and layer.prompt.assisted for layer in self.cache.layers)
        self.cache.reset()
        # The newest token is not cached yet; what follows it are candidates, which may be dropped again.
        if sure := max(self._length or 0, held and held + 1):
            self.cache.declare_prompt(sure)
        if assisted:
            record_past(self.cache)
        step["past_key_values"] = self.cache

    def check(self, output: Any, whole: bool) -> str | None:
        """Say why the cache holds less than the text that ``generate`` has returned; None if it holds it.

        It should hold all tokens but the last, and more after beam search, whose best text may be shorter than others.

        Parameters
        ----------
        output : Tensor or ModelOutput
            What ``generate`` has returned.
        whole : bool
            Whether that is the whole text, as of transformers' own ``generate``, and not sound, for instance.
        """
        held, text = self.cache.get_seq_length(), getattr(output, "sequences", output)
        known = whole and isinstance(text, Tensor) and text.dim() > 1
        expected = text.shape[1] + self._unsaid - 1 if known else 1
        self.cache.left_out = None if held >= expected else self._left_out(held, f" of {expected}" if known else "")
        return self.cache.left_out

    def _left_out(self, held: int, of: str) -> str:
        model, name = self._model, type(self._model).__name__
        if self._dropped is not None:
            limit = getattr(model.config.get_text_config(decoder=True), _LIMIT, None)
            read, text = self._dropped
            why = (
                f"{name} leaves its cache out where the text outgrows {_LIMIT}={limit}, and this transformers then "
                f"reads the last {read} of {text} tokens alone, whatever the cache; use_cache=False reads all"
            )
        elif model.training and model.is_gradient_checkpointing:
            why = "transformers does so where a model trains with gradient checkpointing; model.eval() ends that"
        else:
            why = f"{name} leaves out the cache that it is given"
        what = f"only {held}{of} tokens" if held else "nothing"
        return f"generate() has put {what} into its cache, so {'no other' if held else 'nothing'} is compressed: {why}"


def record_past(cache: CompressedCache) -> None:
    """Prepare a cache for assisted decoding; later versions of transformers do so themselves, except after a reset."""
    for layer in cache.layers:
        if isinstance(layer, PrunedKeyLayer):
            layer.activate_past_recording()


class PrepareHook(MethodHook):
    """Replaces ``model.prepare_inputs_for_generation`` while ``generate`` runs with caches of ours."""

    name = "prepare_inputs_for_generation"

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.given: list[GivenCache] = []

    def __call__(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        mine = next((each for each in tuple(self.given) if each.cache is cache), None)
        if mine is not None and mine.keeps_prompt:
            mine.note_prompt()
        step = self._plain(input_ids, *args, **kwargs)
        if mine is not None and step.get("past_key_values") is None:
            mine.hand_back(step, input_ids, kwargs.get("attention_mask"))
        return step

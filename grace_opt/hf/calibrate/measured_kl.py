"""`calibrate.kl`: measure what bits leave on a model, for ``max_kl=`` with a basis of your own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..._util.parameters import integer
from ..bases.at_hand import basis_for
from ..bases.calibrate import TOKENS
from ..bases.calibrated import CalibratedBasis
from ..bases.texts import all_token_ids
from ..engine.cache import CompressedCache
from ..engine.kl_by_bits import kl_curve
from ..models.arguments import require_model


def kl(
    model: PreTrainedModel,
    basis: CalibratedBasis | str | os.PathLike[str],
    tokenizer: Any = None,
    texts: Sequence[str | Tensor] | None = None,
    *,
    tokens: int = TOKENS,
    advance: Callable[[float], None] = lambda done: None,
) -> CalibratedBasis:
    r"""Measure the KL divergence that each number of bits leaves, and return the basis with it.

    .. math:: \frac1n \sum_t \sum_w p_t(w) \ln \frac{p_t(w)}{\hat p_t(w)}

    with the next-token distributions p of a dense cache and :math:`\hat p` of one with 1, 1.5, 2.25, 3 or 4 bits, means
    over the 128 tokens after up to 896 of each text, and over texts. ``max_kl=`` looks up there how many bits it needs.

    Parameters
    ----------
    model : PreTrainedModel
    basis : CalibratedBasis, str or path
        The model's, or the file of it.
    tokenizer : callable, optional
        The model's; needed if texts are strings.
    texts : sequence of str or Tensor, optional
        Those that the basis was made of, or others; by default those that ship with grace_opt.
    tokens : int
        Number of first tokens of each that are left out, as the basis is made of them; 0 for other texts.
    advance : callable
        Called with the number of texts done so far, and parts of one, for a progress bar.

    Returns
    -------
    CalibratedBasis
        With `kl`; else the same.

    Raises
    ------
    CalibrationError
        If no text is long enough, the basis is another model's, or the model's numbers are not finite.

    Notes
    -----
    Each text is read once, and coded and continued once for each number of bits.

    Examples
    --------
    >>> from grace_opt.hf import calibrate
    >>> from grace_opt.hf.models import load_pocket
    >>> model, tokenizer = load_pocket()
    >>> texts = ["the quiet river runs past a late singer " * 40]
    >>> made = calibrate.kl(model, calibrate.basis(model, tokenizer, texts), tokenizer, texts, tokens=0)
    >>> made.kl[:, 0].tolist(), bool((made.kl[1:, 1] <= made.kl[:-1, 1]).all())
    ([1.0, 1.5, 2.25, 3.0, 4.0], True)
    """
    model = require_model(model, "calibrate.kl")
    known = basis_for(model, basis)
    every = all_token_ids(texts, tokenizer, "calibrate.kl", model)
    skipped = integer("tokens", tokens, at_least=0)
    return replace(known, kl=kl_curve(model, known, every, skipped, CompressedCache, advance))

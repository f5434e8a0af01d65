"""`TopTokens`: how few of the stored tokens each step reads; ``read=`` of a cache, also by name.

When: every token is to be kept, because nobody knows yet which one a later question needs, and a step is to read few
of them. Unlike an eviction, nothing is lost: what a step leaves out, a later step can read.

Source: pages are Quest's (arXiv 2406.10774), scores from some of the channels Loki's (arXiv 2406.02542) and SparQ's
(arXiv 2312.04985), `top_p` Twilight's (arXiv 2502.02770), sampling MagicPIG's (arXiv 2410.16179). The bounds are ours
(docs/theory/reading.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..._util.names import did_you_mean
from ..._util.parameters import check_fields, choice, integer, number
from ...errors import OptionError
from ...kernels.cache.reading.hashes import COLLISIONS, MAX_BITS
from ..models.arguments import explains_arguments

PAGES, CHANNELS, SAMPLING = "pages", "channels", "sampling"
#: The ways to find the tokens to read.
WAYS = (PAGES, CHANNELS, SAMPLING)
#: What is read unless given: of the tokens alone, at least if something else says when to stop, and of the attention.
USUAL_SHARE, LEAST_SHARE, USUAL_TOP_P = 0.25, 0.05, 0.95
#: Tokens of a page unless given.
USUAL_PAGE = 16
#: Their codes would take many times the bytes of the keys.
MAX_TABLES = 4096
#: Settings of sampling alone, and what None stands for: the tables and bits are MagicPIG's.
OF_SAMPLING: Mapping[str, float] = {"tables": 150, "hash_bits": 10, "seed": 0, "confidence": 0.95}

#: Systems whose way to find tokens one of ours follows.
SYSTEMS: Mapping[str, str] = {"quest": PAGES, "loki": CHANNELS, "sparq": CHANNELS, "magicpig": SAMPLING}

_SHARE = "write share=, the share of the tokens to read, such as 0.25"
_OTHER_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("budget", "ratio", "topk", "top_k", "k", "token_budget", "read"), _SHARE),
    **dict.fromkeys(("page", "chunk_size", "block_size", "block"), "write page_size="),
    **dict.fromkeys(("eps", "tolerance", "tol", "bound"), "write epsilon="),
    **dict.fromkeys(("method", "mode", "kind"), 'write by="pages", by="channels" or by="sampling"'),
    **dict.fromkeys(("n_tables", "hash_tables"), "write tables="),
    **dict.fromkeys(("bits", "nbits"), "write hash_bits="),
    **dict.fromkeys(("sinks", "window", "n_sinks"), "sink_tokens= and recent_window= are settings of the cache"),
}


@explains_arguments(_OTHER_NAMES)
@dataclass(frozen=True)
class TopTokens:
    """Read the tokens that the new token may attend to most, or a sample, and bound the attention of all others.

    Attributes
    ----------
    share : float
        Share of the stored tokens to read, in (0, 1]. Sink tokens, the recent window and what comes after the prompt
        are always read, and count; so does at least one page (one token with ``by="channels"``). 1 reads all. If it is
        not given, 0.25; where `epsilon` or `top_p` says when to stop, 0.05. A sample has none: its size follows from
        `tables` and `hash_bits`.
    by : {"pages", "channels", "sampling"}
        "pages": runs of `page_size` tokens, chosen by the largest logit that a token between the page's per-channel
        minimum and maximum could have. "channels": single tokens, chosen by their logits from the channels that the
        cache's method keeps (``ratio=``, ``kept_channels=``); the other channels are read only of the chosen ones.
        "sampling": single tokens, drawn by random hyperplanes and weighed by how likely that was; attention's sums are
        right on average, and the bound holds at a `confidence`.
    page_size : int, optional
        With "pages": tokens of a page; None stands for 16.
    epsilon : float, optional
        Read on until at most this share of the attention, of every query head, can be on tokens that were not read;
        `share` is then the least. None stops at `share`.
    top_p : float, optional
        With "channels": read on until this share of the attention of every query head is expected, by the scores, on
        the tokens that are read; `share` is then the least. Heads that look at few tokens read few. Not certain, but
        far fewer tokens than an `epsilon` needs. If neither `share` nor `epsilon` is given, 0.95.
    tables : int, optional
        With "sampling": number of tables, 2 or more, each with a code for every token; None stands for 150. A token is
        read if its code is the query's in two or more of them. More tables read more.
    hash_bits : int, optional
        With "sampling": bits of a code, 1 to 24; None stands for 10. More bits read fewer tokens.
    seed : int, optional
        With "sampling": of the hyperplanes; None stands for 0. Each layer draws its own.
    confidence : float, optional
        With "sampling": the probability, over the draw of the hyperplanes, with which a bound holds, for each step and
        query head by itself; None stands for 0.95.

    Notes
    -----
    A KV head reads the same tokens for all query heads of its group: those with the largest score in any of them, each
    head's scores taken relative to its own sum. With "sampling", each query head has a sample of its own, and what any
    of them reads counts once. More than 32 new tokens at once, such as another turn of a conversation, read everything.

    Examples
    --------
    >>> TopTokens(by="channels")
    TopTokens(share=0.05, by='channels', top_p=0.95)
    >>> TopTokens(share=25)
    Traceback (most recent call last):
    grace_opt.errors.OptionError: share=25: give a number > 0 and <= 1; for 25 %, write share=0.25.
    >>> TopTokens(by="sampling", tables=75, hash_bits=8).confidence
    0.95
    """

    share: float = None  # type: ignore[assignment]  # known once it is known what else decides
    by: Literal["pages", "channels", "sampling"] = "pages"
    page_size: int | None = None
    epsilon: float | None = None
    top_p: float | None = None
    tables: int | None = None
    hash_bits: int | None = None
    seed: int | None = None
    confidence: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, choice, "by", allowed=WAYS)
        if self.by != PAGES and self.page_size is not None:
            raise OptionError(
                f'page_size={self.page_size} goes with by="pages", and by={self.by!r} reads single tokens'
            )
        if self.by == SAMPLING:
            self._check_sampling()
            return
        if self.share is None:
            alone = self.epsilon is None and self.top_p is None
            if alone and self.by == CHANNELS:
                object.__setattr__(self, "top_p", USUAL_TOP_P)
            usual = alone and self.by != CHANNELS
            object.__setattr__(self, "share", USUAL_SHARE if usual else LEAST_SHARE)
        check_fields(self, number, "share", above=0, at_most=1, hint=_percent("share", self.share))
        if self.by == PAGES and self.page_size is None:
            object.__setattr__(self, "page_size", USUAL_PAGE)
        check_fields(self, integer, "page_size", at_least=1, optional=True)
        for name in ("epsilon", "top_p"):
            hint = _percent(name, getattr(self, name))
            check_fields(self, number, name, above=0, below=1, optional=True, hint=hint)
        if self.top_p is not None and self.by != CHANNELS:
            raise OptionError(
                f'top_p={self.top_p} goes with by="channels", whose scores are what logits are expected to be; those '
                'of pages are bounds. Write by="channels", or epsilon= instead of top_p='
            )
        for name in OF_SAMPLING:
            if getattr(self, name) is not None:
                raise OptionError(
                    f'{name}={getattr(self, name)} goes with by="sampling", and by={self.by!r} draws nothing; leave it '
                    'out, or write by="sampling"'
                )

    @property
    def unit_size(self) -> int:
        """Tokens of what is read or left as a whole."""
        return self.page_size or 1

    def __repr__(self) -> str:
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return f"TopTokens({', '.join(f'{name}={value!r}' for name, value in given.items() if value is not None)})"

    def _check_sampling(self) -> None:
        """Check what a sample is drawn with, and refuse what it has no use for."""
        instead = {
            "share": "how many tokens a sample has follows from tables= (more read more) and hash_bits= (more read "
            "fewer); leave out share=",
            "epsilon": "a sample's bound holds at a confidence, and no reading on makes it certain; write "
            'by="channels" with epsilon=',
            "top_p": 'a sample expects nothing of single tokens; write by="channels" with top_p=',
        }
        for name, what in instead.items():
            if getattr(self, name) is not None:
                raise OptionError(f'{name}={getattr(self, name)} does not go with by="sampling": {what}')
        for name, usual in OF_SAMPLING.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, usual)
        hint = (
            f"a token is read if its code is the query's in {COLLISIONS} of them; the usual number is "
            f"{OF_SAMPLING['tables']}"
        )
        check_fields(self, integer, "tables", at_least=COLLISIONS, at_most=MAX_TABLES, hint=hint)
        check_fields(self, integer, "hash_bits", at_least=1, at_most=MAX_BITS)
        check_fields(self, integer, "seed", at_least=0)
        hint = _percent("confidence", self.confidence)
        check_fields(self, number, "confidence", above=0, below=1, hint=hint)


def _percent(name: str, value: Any) -> str:
    """Return what to write instead of a number that is meant in percent."""
    if isinstance(value, int | float) and 1 < value <= 100:
        return f"for {value:g} %, write {name}={value / 100:g}"
    return ""


def reading_named(name: str) -> TopTokens:
    """Return the way to read of this name with its defaults.

    Examples
    --------
    >>> reading_named("channels")
    TopTokens(share=0.05, by='channels', top_p=0.95)
    """
    meant = name.strip().lower()
    if meant not in WAYS:
        hint = f" Its way is {SYSTEMS[meant]!r}." if meant in SYSTEMS else did_you_mean(meant, WAYS)
        raise OptionError(f"read={name!r}: write one of {', '.join(map(repr, WAYS))}, or TopTokens(share=0.25).{hint}")
    return TopTokens(by=meant)  # type: ignore[arg-type]


def reading_from_dict(values: Any) -> TopTokens:
    """Return what ``dataclasses.asdict`` made a dict of.

    Raises
    ------
    OptionError
        If it is no such dict, or a value is out of range.

    Examples
    --------
    >>> reading_from_dict({"share": 0.5, "by": "pages"}).share
    0.5
    """
    if not isinstance(values, Mapping):
        raise OptionError(f'read={values!r}: give the settings as a dict, such as {{"share": 0.25, "by": "pages"}}')
    known = [field.name for field in dataclasses.fields(TopTokens)]
    unknown = [name for name in values if name not in known]
    if unknown:
        raise OptionError(f"TopTokens has no {', '.join(map(str, unknown))}; it has {', '.join(known)}")
    return TopTokens(**values)

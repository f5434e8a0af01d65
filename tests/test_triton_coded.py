"""The kernels for coded tokens compute attention over what the codes stand for; without a GPU they run in Triton's
interpreter.

The reference is plain attention in float64 over the same numbers, which `tests.coded` makes without the library. Each
output may be off by ``4 u max|V|`` with ``u`` half a unit in the last place of 1, plus ``1e-5 max|V|``; attention
received by 1e-5. The wrong versions at the end show that this notices.
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from grace_opt.errors import CacheError
from grace_opt.hf.bases.codebooks import WIDTHS, codebook, trellis_codebook
from grace_opt.hf.stores.coded.codes import Part, encode
from grace_opt.hf.stores.coded.in_place import NEVER
from grace_opt.kernels._shared import dispatch
from grace_opt.kernels.cache import coded as kernels
from grace_opt.kernels.cache.coded import gpu
from grace_opt.kernels.cache.coded.gpu import (
    attend,
    batch,
    coded,
    codes,
    joining,
    keys,
    launching,
    numbers,
    values,
    weights,
)
from grace_opt.kernels.cache.coded.table import CodedSequence, table_of, units_of
from tests import (
    children,
    interpreter,  # noqa: F401  (cheaper launches)
)
from tests.coded import Coded, Segments
from tests.mutants import mutant

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
LEAST = torch.finfo(torch.float32).min

pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cpu" and not gpu._INTERPRETED, reason="triton was imported before TRITON_INTERPRET=1 was set"
    ),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # numpy, at the smallest number
]
#: In half precision, numbers of four bits and more have eleven digits, and dense factors ten on a GPU.
CHIP = {torch.float32: 1.0, torch.float16: 8.0, torch.bfloat16: 8.0}


@dataclass
class Case:
    """One call of the kernels: a batch of sequences with the tail and queries that go with them."""

    query: Tensor
    stored: list[Coded]
    tail_keys: Tensor
    tail_values: Tensor
    attention_mask: Tensor | None = None
    scaling: float | None = None
    softcap: float | None = None
    causal: bool = True
    splits: int | None = None
    dropped: int = 0  # of the newest tokens, so many of the oldest are not requested
    added: Tensor | None = None

    @property
    def waiting(self) -> int:
        return max(each.waits for each in self.stored)

    @property
    def newest(self) -> int:
        return self.waiting + self.tail_keys.shape[2] - self.dropped

    def run(self, sequences: list[CodedSequence] | None = None) -> tuple[Tensor, Tensor]:
        return gpu.coded_attention(
            self.query,
            sequences or [each.sequence for each in self.stored],
            self.tail_keys,
            self.tail_values,
            self.stored[0].books,
            self.newest,
            [self.waiting - each.waits for each in self.stored],
            self.attention_mask,
            self.scaling,
            self.softcap,
            self.causal,
            trellis=self.stored[0].trellis,
            added=self.added,
            split_tokens=128,
            splits=self.splits,
        )

    def expected(self) -> tuple[Tensor, Tensor]:
        query_heads, length, d = self.query.shape[1:]
        heads, tail = self.tail_keys.shape[1:3]
        outputs, received = [], []
        for b, each in enumerate(self.stored):
            keys, values = (
                torch.cat([part, new[b].double().cpu()], dim=1)
                for part, new in zip(each.dense, (self.tail_keys, self.tail_values), strict=True)
            )
            repeated = keys.repeat_interleave(query_heads // heads, 0)
            logits = self.query[b].double().cpu() @ repeated.mT
            positions = each.sequence.positions
            if self.added is not None and positions is not None:
                at = positions.cpu().long()[:, None].expand(-1, logits.shape[0] // heads * length, -1)
                more = self.added[b].cpu().double().gather(-1, at)
                sinks = each.sequence.sink_keys.shape[1]
                logits[..., sinks : sinks + at.shape[-1]] += more.view(*logits.shape[:2], -1)
            logits *= d**-0.5 if self.scaling is None else self.scaling
            if self.softcap is not None:
                logits = self.softcap * (logits / self.softcap).tanh()
            of_tail, mask = logits[..., logits.shape[-1] - tail :], self.attention_mask
            if mask is not None:
                mask = mask[min(b, len(mask) - 1)].cpu()
                hidden = of_tail.masked_fill(~mask, LEAST) if mask.dtype == torch.bool else of_tail + mask.double()
                of_tail.copy_(hidden.clamp(min=LEAST))
            elif self.causal:
                of_tail.masked_fill_(~torch.ones(length, tail, dtype=torch.bool).tril(tail - length), LEAST)
            weights = logits.softmax(-1)
            outputs.append(weights @ values.repeat_interleave(query_heads // heads, 0))
            p = weights[..., max(weights.shape[-1] - self.newest, 0) :].view(heads, query_heads // heads, length, -1)
            p = torch.nn.functional.pad(p, (self.newest - p.shape[-1], 0))
            seen = (self.newest - torch.arange(self.newest)).clamp(max=length).double()
            received.append(torch.stack([p.sum(2).mean(1), p.square().sum(2).mean(1), seen.expand(heads, -1)], 1))
        return torch.stack(outputs).transpose(1, 2), torch.stack(received)

    def error(self, found: tuple[Tensor, Tensor]) -> float:
        """The largest deviation, as a multiple of what is allowed."""
        output, received = self.expected()
        largest = max(
            float(part.abs().max())
            for part in (*(each.dense[1] for each in self.stored), self.tail_values)
            if part.numel()
        )
        assert found[0].shape == output.shape
        assert found[1].shape == received.shape
        assert found[0].dtype == self.query.dtype
        chip = CHIP[self.query.dtype]
        allowed = chip * (4 * UNIT[self.query.dtype] + 1e-5) * largest
        differences = (found[0].double().cpu() - output).abs().max() / allowed, (found[1].cpu() - received).abs().max()
        error = max(float(differences[0]), float(differences[1]) / (1e-5 if chip == 1 else 5e-3))
        return float("inf") if any(bool(each.isnan()) for each in differences) else error


def draw(
    generator: torch.Generator,
    *sequences: dict[str, Any],
    heads: int = 1,
    group: int = 1,
    length: int = 1,
    d: int = 16,
    d_v: int = 16,
    tail: int = 5,
    dtype: torch.dtype = torch.float32,
    **rest: Any,
) -> Case:
    """A batch of sequences; tensors of new tokens are parts of larger buffers that are NaN elsewhere."""
    given = sequences or ({"segments": ((21,),)},)
    stored = [Coded(generator, heads, d, d_v, dtype=dtype, device=DEVICE, **each) for each in given]

    def view(tokens: int, heads: int, width: int) -> Tensor:
        buffer = torch.full((len(stored), tokens + 3, heads, width + 1), float("nan"), dtype=dtype, device=DEVICE)
        part = buffer.transpose(1, 2)[:, :, 1 : tokens + 1, :width]
        part.copy_(torch.randn(part.shape, generator=generator))
        return part

    return Case(view(length, heads * group, d), stored, view(tail, heads, d), view(tail, heads, d_v), **rest)


def masked(case: Case, generator: torch.Generator, kind: str) -> Case:
    """With a mask of the tail: ``"bool"`` or ``"additive"``, ``"... per head"`` of its own for each."""
    batch, query_heads, length, _ = case.query.shape
    shape = batch, query_heads if "per head" in kind else 1, length, case.tail_keys.shape[2]
    seen = torch.rand(shape, generator=generator) < 0.6
    if "bool" in kind:
        return replace(case, attention_mask=seen.to(DEVICE))
    mask = torch.randn(shape, generator=generator).masked_fill(~seen, LEAST)
    mask[..., -1][~seen[..., -1]] = -torch.inf
    return replace(
        case, attention_mask=mask.to(DEVICE, case.query.dtype if case.query.dtype != torch.float16 else None)
    )


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(5)


RAGGED: Segments = ((5, 0, 43), (1, 24))


@pytest.mark.slow
@pytest.mark.parametrize("trellis", [False, True])
@pytest.mark.parametrize(
    ("group", "length", "dtype"), [(1, 1, torch.float32), (3, 2, torch.float16), (4, 8, torch.bfloat16)]
)
def test_ragged_classes_of_every_width(group, length, dtype, trellis, generator):
    sequence = {"segments": RAGGED, "sinks": 3, "waiting": 2, "trellis": trellis}
    case = draw(generator, sequence, heads=2, group=group, length=length, d=13, d_v=21, tail=9, dtype=dtype, splits=3)
    assert case.error(case.run()) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("trellis", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_channels_of_one_width(width, trellis, generator):
    """In several pieces, with a trellis: the first bits of the second one follow the last ones of the first."""
    case = draw(
        generator, {"segments": ((300 if trellis else 19,),), "widths": [width], "trellis": trellis}, d=8, d_v=8
    )
    assert case.error(case.run()) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("d", "d_v"), [(33, 128), (256, 64)])
def test_wide_heads(d, d_v, generator):
    case = draw(generator, {"segments": ((17,),)}, d=d, d_v=d_v, dtype=torch.float16)
    assert case.error(case.run()) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_what_is_added_goes_by_position(dtype, generator):
    case = with_added(
        draw(generator, {"segments": ((130, 24), (40,)), "sinks": 2, "waiting": 1}, {"segments": (), "sinks": 3},
             heads=2, group=3, length=2, softcap=4.0),
        generator, dtype,
    )  # fmt: skip
    assert case.error(case.run()) <= 1


def with_added(case: Case, generator: torch.Generator, dtype: torch.dtype) -> Case:
    """With numbers that are added to logits by position."""
    (batch, query_heads, length, _), heads = case.query.shape, case.tail_keys.shape[1]
    for each in case.stored:
        count = each.sequence.table.numbers // heads
        if count:
            at = torch.randint(300, (heads, count), generator=generator).to(DEVICE, dtype)
            object.__setattr__(each.sequence, "positions", at)
    added = torch.randn(batch, heads, query_heads // heads * length, 300, generator=generator)
    added[..., :9] = NEVER  # the tokens there are hidden
    return replace(case, added=added.to(DEVICE))


def test_a_batch_of_different_lengths(generator):
    """The second sequence was too short to be coded: its sinks are all, and some of them newest tokens."""
    sequences = (
        {"segments": ((40, 9),), "waiting": 1},
        {"segments": (), "sinks": 11},
        {"segments": ((3,),), "waiting": 1},
    )
    case = draw(generator, *sequences, heads=2, group=2, length=2)
    assert case.error(case.run()) <= 1


def test_fewer_tokens_than_are_asked_for_receive_nothing(generator):
    case = draw(generator, {"segments": ((16,),), "waiting": 1}, {"segments": (), "sinks": 3}, length=2, tail=3)
    found = case.run()
    assert case.error(found) <= 1
    assert not found[1][1, :, :2, :5].any()


def test_only_the_last_of_the_newest_may_be_asked_for(generator):
    case = draw(generator, {"segments": ((16,),), "sinks": 2}, tail=20, dropped=13)
    assert case.error(case.run()) <= 1


def test_nothing_but_a_tail(generator):
    case = draw(generator, {"segments": ()}, group=2, length=3)
    assert case.error(case.run()) <= 1


@pytest.mark.slow
def test_no_bases(generator):
    case = draw(generator, {"segments": ((9,),), "bases": False, "sinks": 1}, {"segments": ((30,),)}, heads=2, d=40)
    assert case.error(case.run()) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bool", "additive", "bool per head", "additive per head"])
def test_masks_of_the_tail(kind, generator):
    sequences = {"segments": ((20,),)}, {"segments": ((7,),), "sinks": 2}
    case = draw(generator, *sequences, group=2, length=2, tail=18, scaling=0.4, dtype=torch.bfloat16)
    case = masked(case, generator, kind)
    assert case.error(case.run()) <= 1
    if kind == "bool per head":
        one = replace(case, attention_mask=case.attention_mask[:1, :1])
        assert one.error(one.run()) <= 1


def test_a_row_that_sees_nothing_gets_the_mean_of_the_values(generator):
    case = draw(generator, {"segments": ()}, tail=20)
    case = replace(case, attention_mask=torch.zeros(1, 1, 1, 20, dtype=torch.bool, device=DEVICE))
    torch.testing.assert_close(case.run()[0][0, 0, 0], case.tail_values[0, 0].mean(dim=0))


def test_not_causal(generator):
    case = draw(generator, length=3, causal=False)
    assert case.error(case.run()) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_softcap(softcap, generator):
    case = draw(generator, {"segments": ((21,),), "sinks": 2}, scaling=1.0, softcap=softcap)
    assert case.error(case.run()) <= 1
    steep = replace(case, scaling=1e4)  # its exponentials overflow
    assert steep.error(steep.run()) <= 1


@pytest.mark.slow
def test_many_query_rows(generator):
    case = draw(generator, {"segments": ((18,),), "sinks": 1}, group=6, length=7, d_v=8)
    assert case.error(case.run()) <= 1


def test_not_a_number_does_not_get_lost(generator):
    case = draw(generator)
    case.query[0, 0, 0, 3] = float("nan")
    assert all(part[..., :2, :].isnan().all() for part in case.run())


@pytest.mark.slow
@pytest.mark.parametrize("trellis", [False, True])
def test_codes_of_the_library(trellis, generator):
    """What `encode` makes, and what `decode` says that it stands for."""
    made = []
    for _ in range(2):
        coordinates = torch.randn(2, 70, 16, generator=generator)
        levels = torch.randint(8, (2, 2, 16), generator=generator)
        made.append(encode([Part(coordinates, levels, coordinates.abs().amax((1, 2)))], (30, 40), trellis))
    case = draw(generator, heads=2)
    stored, own = case.stored[0], [codes.map(lambda tensor: tensor.to(DEVICE)) for codes in made]
    stored.dense = made[0].decode().double(), made[1].decode().double()
    book, stored.trellis = (trellis_codebook if trellis else codebook), trellis
    stored.books, none = book(torch.device(DEVICE)), torch.zeros(2, 0, 16, device=DEVICE)
    stored.sequence = CodedSequence(table_of([units_of(own[0], own[1], 2)], 2), none, none, None, None)
    assert case.error(case.run()) <= 1


def beside_a_guard() -> None:
    """Bit planes of every width end where memory ends; in a fork, which reading one more word would kill."""
    from tests.test_coded import at_the_end

    generator = torch.Generator().manual_seed(7)
    for count, level in product((1, 9, 64, 129), range(1, len(WIDTHS))):
        trellis = count == 9
        coordinates = torch.randn(1, count, 16, generator=generator)
        part = Part(coordinates, torch.full((1, 1, 16), level), coordinates.abs().amax((1, 2)))
        made = encode([part], (count,), trellis), encode([part], (count,), trellis)
        case = draw(generator)
        stored, own = case.stored[0], [codes.map(at_the_end) for codes in made]
        stored.dense = made[0].decode().double(), made[1].decode().double()
        book, stored.trellis = (trellis_codebook if trellis else codebook), trellis
        stored.books, none = book(torch.device("cpu")), torch.zeros(1, 0, 16)
        stored.sequence = CodedSequence(table_of([units_of(own[0], own[1], 1)], 1), none, none, None, None)
        assert case.error(case.run()) <= 1, (count, level)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda" or sys.platform != "linux", reason="guards the CPU's pages by mprotect")
def test_nothing_behind_the_codes_is_read():
    children.run(beside_a_guard)


@pytest.mark.slow
def test_the_table_is_made_once(generator, monkeypatch):
    case = draw(generator, {"segments": ((5,),)}, {"segments": ((7,),)})
    made, right = [], batch._made
    monkeypatch.setattr(batch, "_made", lambda *given: (made.append(1), right(*given))[1])
    for _ in range(2):
        assert case.error(case.run()) <= 1
    assert len(made) == 1
    (kept,) = case.stored[0].sequence.table.on_device
    counted = {tensor.data_ptr() for tensor in kept.tensors().values()}
    tables = kept.pairs, kept.units, kept.slots, kept.chunks, *kept.copies, *kept.splits_by_size.values()
    assert counted == {tensor.data_ptr() for tensor in tables}
    for order in ([0, 0], [1, 0], [1, 1], [0, 1]):
        other = replace(case, stored=[case.stored[number] for number in order])
        assert other.error(other.run()) <= 1


def test_what_it_cannot_do_is_refused_with_a_reason(generator):
    case = draw(generator)
    sequences, zeros = [case.stored[0].sequence], functools.partial(torch.zeros, device=DEVICE)
    refused = {
        "float64": replace(case, query=case.query.double()),
        "float16, torch.float32": replace(case, tail_values=case.tail_values.half()),
        "257 wide": replace(case, query=zeros(1, 1, 1, 257), tail_keys=zeros(1, 1, 5, 257)),
        "264 query rows": replace(case, query=zeros(1, 33, 8, 16)),
        "do not fit": replace(case, tail_values=case.tail_values[:, :, :3]),
        r"17 wide|\(17, 16\)": replace(case, query=zeros(1, 1, 1, 17), tail_keys=zeros(1, 1, 5, 17)),
        "gradients": replace(case, query=case.query.clone().requires_grad_()),
        r"shape \(1, 1, 1, 4\)": replace(case, attention_mask=zeros(1, 1, 1, 4).bool()),
        "move them to one device": replace(case, query=case.query.to("meta")),
    }
    for message, wrong in refused.items():
        with pytest.raises(CacheError, match=message):
            wrong.run(sequences)
    case.stored[0].books = case.stored[0].books[:8]
    with pytest.raises(CacheError, match=r"\(8, 256\)"):
        case.run()
    empty = draw(generator, {"segments": ()}, tail=0)
    with pytest.raises(CacheError, match="no tokens at all"):
        empty.run()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ((2, 3, 1.25), "must be symmetric"),
        ((3, 0, float("nan")), "must be symmetric"),
        ((5, 7, 2000.0), "at most 1024"),
    ],
)
def test_books_that_are_no_sums_of_signs_are_refused(wrong, message, generator):
    case = draw(generator)
    bits, code, level = wrong
    case.stored[0].books[bits, code] = level
    with pytest.raises(CacheError, match=message):
        case.run()


def test_no_sequence_gives_no_output(generator):
    case = draw(generator)
    nothing = {name: getattr(case, name)[:0] for name in ("query", "tail_keys", "tail_values")}
    output, received = replace(case, **nothing).run()
    assert (output.shape, received.shape) == ((0, 1, 1, 16), (0, 1, 3, 5))


@pytest.mark.skipif(DEVICE == "cuda", reason="the CPU cannot play the GPU beside one")
def test_the_kernel_is_chosen_by_device(generator, monkeypatch):
    case = draw(generator)
    given = case.query, case.tail_keys, case.tail_values
    assert kernels.kernel_for(*given, 0) is None, "the CPU's loops are for more tokens"
    monkeypatch.setattr(dispatch, "DEVICE_TYPE", "cpu")
    for passed in (True, False):
        monkeypatch.setattr(dispatch, "_verdicts", {(kernels.IN_PLACE.name, torch.device("cpu")): passed})
        assert kernels.kernel_for(*given, 0) is (gpu.coded_attention if passed else None)
    monkeypatch.setattr(dispatch, "_verdicts", {(kernels.IN_PLACE.name, torch.device("cpu")): True})
    monkeypatch.setattr(dispatch, "_said", set())
    assert kernels.kernel_for(case.query.expand(-1, -1, 9, -1), *given[1:], 0) is None
    with pytest.warns(UserWarning, match="decoding on coded tokens is not used.*float64"):
        assert kernels.kernel_for(*(part.double() for part in given), 0) is None


# ------------------------------------------------------------ wrong versions

MODULES = attend, batch, coded, codes, joining, keys, launching, numbers, values, weights


@pytest.fixture(scope="module")
def whole():
    dense = ({"segments": (), "sinks": sinks} for sinks in (20, 3))
    sequences = {"segments": ((17, 9),), "sinks": 2, "waiting": 2}, *dense
    generator = torch.Generator().manual_seed(6)
    case = draw(generator, *sequences, group=2, length=2, d=20, d_v=18, tail=70, scaling=0.1, splits=2)
    assert case.error(case.run()) <= 1
    return case


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="compiled kernels remember what they call")
@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (numbers, "tl.where(level == EIGHT_BITS, 8, level)", "level"),
        (numbers, "tl.cumsum(bits, 0) - bits", "tl.cumsum(bits, 0)"),
        (numbers, "has_scale = (level > 0)", "has_scale = (level >= 0)"),
        (numbers, "(bit % 8).to", "(channels % 8).to"),
        (numbers, "first += number * size", "first += number"),
        (numbers, "(high << 1) << (shift ^ 31)", "high << 1"),
        (numbers, "place + offset + 4 * words", "place + 0 * offset + 4 * words"),
        (codes, "p5, p7 = swapped", "p7, p5 = swapped"),
        (codes, "tl.where(bits == 5, 0xFFFFFFFF, p5)", "p5"),
        (coded, "exists = token < count", "exists = token <= count"),
        (keys, "c, a ^ b ^ c, weights", "c, a ^ b, weights"),
        (keys, "weights += 4 * THREE_BITS * N", "weights += 2 * THREE_BITS * N"),
        (coded, "token // W\n", "token // 32\n"),
        (values, "        book = tl.where(few, 0, BOOK)", "        book = 0"),
        (values, "(3, 1, 4, 2, 0, 5)", "(3, 1, 4, 0, 2, 5)"),
        (coded, "* factor[None, :] + constant", "+ constant"),
        (values, "+ mean[:, None] * added[None, :]", ""),
        (coded, "place + token < newest)", "place + token < 0)"),
        (weights, "turned * mean[:, None]", "turned * 0"),
        (weights, "constant -= tl.sum(", "constant -= 0 * tl.sum("),
        (weights, "channels[None, :] * width + inside", "channels[None, :] + width * inside"),
        (weights, "weight - high.to(tl.float32)", "0 * weight"),
        (attend, "tail - LENGTH + position", "tail - 1 + position"),
        (attend, "newest - tail - sinks", "newest - sinks"),
        (attend, "stop - of_sinks", "stop"),
        (attend, "products * shrink[:, None] + ", "products + "),
        (joining, "of_coded = (split < coded_splits)", "of_coded = (split < splits)"),
        (joining, "second += p * p", "second += p"),
        (joining, "first / GROUP", "first"),
    ],
)  # fmt: skip
def test_a_wrong_version_would_be_noticed(module, old, new, whole, monkeypatch, tmp_path):
    check_noticed(whole, module, old, new, monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def whole_of_trellis():
    sequence = {"segments": ((7, 5, 300),), "trellis": True}
    case = draw(torch.Generator().manual_seed(6), sequence, d=20, d_v=18, scaling=0.1)
    case = with_added(case, torch.Generator().manual_seed(7), torch.int16)
    assert case.error(case.run()) <= 1
    return case


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="compiled kernels remember what they call")
@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (numbers, "bits = tl.where((bits > 0) & (bits < 8), bits + 1, bits)", "bits = bits + 0"),
        (numbers, "begins = (words == 0) & (first == 0)", "begins = words == 0"),
        (numbers, "before = tl.where(begins, 0, before)", "before = before + 0"),
        (numbers, "before >> 30", "before >> 31"),
        (numbers, "before >> 29", "before >> 31"),
        (numbers, "(own << 1) | (before >> 31)", "own << 1"),
        (codes, "offset -= tl.where(longer, stride, 0)", "offset -= 0"),
        (codes, "tl.where(bits == 7, 0xFFFFFFFF, p7)", "p7"),
        (keys, "(1 if TRELLIS else 2) * stride", "2 * stride"),
        (coded, "tl.load(of_sequence + 2) + token - first", "token"),
        (coded, "x += more * inner", "x += more"),
        (values, "(1 if TRELLIS else 2) * stride", "2 * stride"),
        (values, "planes, stride, first, words, few, TRELLIS)", "planes, stride, first, words, True, TRELLIS)"),
    ],
)  # fmt: skip
def test_a_wrong_trellis_would_be_noticed(module, old, new, whole_of_trellis, monkeypatch, tmp_path):
    check_noticed(whole_of_trellis, module, old, new, monkeypatch, tmp_path)


def check_noticed(whole, module, old, new, monkeypatch, tmp_path):
    wrong = mutant(module, old, new, tmp_path)
    for each in whole.stored:  # of the version before
        each.sequence.table.on_device.clear()
    right = {name: kernel for name, kernel in vars(module).items() if hasattr(kernel, "fn")}
    for place, (name, kernel) in product(MODULES, right.items()):  # modules have what they import of another
        if vars(place).get(name) is kernel:
            monkeypatch.setattr(place, name, getattr(wrong, name))
    assert whole.error(whole.run()) > 5

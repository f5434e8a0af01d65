"""Attention over coded tokens where they lie equals float64 attention over the numbers that the codes stand for.

Outputs may be off by ``2e-5 max|V|``: float32's rounding of logits of some tens, and of sums of some hundred terms. The
wrong versions at the end show that this notices.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench import wheel
from grace_opt.errors import CacheError
from grace_opt.hf.bases.codebooks import EVEN_WIDTH, WIDTHS, codebook, trellis_codebook
from grace_opt.hf.stores.coded.codes import Codes, Part, encode, stacked
from grace_opt.hf.stores.coded.in_place import NEVER
from grace_opt.kernels._shared.lanes import FEATURES
from grace_opt.kernels._shared.switches import OPENMP
from grace_opt.kernels.cache.coded import CodedSequence, forms, host
from grace_opt.kernels.cache.coded.table import COLUMNS, splits, table_of, units_of
from tests import children

BOOKS, TRELLIS_BOOKS = codebook(torch.device("cpu")), trellis_codebook(torch.device("cpu"))


@dataclass
class Sequence:
    """Codes of one sequence: those of segments, then of waiting blocks, with dense sinks and bases."""

    segments: list[tuple[Codes, Codes]]
    waiting: tuple[Codes, Codes] | None
    sinks: tuple[Tensor, Tensor]
    bases: tuple[Tensor | None, Tensor | None]
    positions: Tensor | None = None

    def stored(self) -> CodedSequence:
        heads = len(self.sinks[0])
        units = [units_of(keys, values, heads) for keys, values in self.segments]
        units += [] if self.waiting is None else [units_of(*self.waiting, heads, newest=True)]
        return CodedSequence(table_of(units, heads), *self.sinks, *self.bases, self.positions)

    @property
    def coded(self) -> int:
        """Number of coded tokens."""
        return sum(sum(keys.counts) for keys, _ in self.segments) + self.waits

    def dense(self) -> list[Tensor]:
        """Keys and values, float64: sinks, segments, waiting tokens."""
        found, heads = [], len(self.sinks[0])
        for number, (sinks, basis) in enumerate(zip(self.sinks, self.bases, strict=True)):
            parts = [pair[number].decode() for pair in self.segments]
            if self.waiting is not None:
                blocks = self.waiting[number].decode()
                parts.append(blocks.view(-1, heads, *blocks.shape[1:]).transpose(0, 1).flatten(1, 2))
            coded = torch.cat([sinks.new_zeros(heads, 0, sinks.shape[2]), *parts], dim=1).double()
            found.append(torch.cat([sinks.double(), coded if basis is None else coded @ basis.double()], dim=1))
        return found

    @property
    def waits(self) -> int:
        return 0 if self.waiting is None else len(self.waiting[0].means) // len(self.sinks[0]) * 8


@dataclass
class Case:
    """One call."""

    query: Tensor
    sequences: list[Sequence]
    tails: tuple[Tensor, Tensor]
    mask: Tensor | None = None
    softcap: float | None = None
    causal: bool = True
    before: Tensor | None = None
    trellis: bool = False
    added: Tensor | None = None

    def run(self) -> tuple[Tensor, Tensor]:
        waits = max(each.waits for each in self.sequences)
        stored = [each.stored() for each in self.sequences]
        dense_newest = [waits - each.waits for each in self.sequences]
        newest = waits + self.tails[0].shape[2]
        host.workspace_for(1).numpy().fill(np.nan)  # which shows where anything is read that an earlier call wrote
        return host.coded_attention(
            *(self.query, stored, *self.tails, TRELLIS_BOOKS if self.trellis else BOOKS, newest, dense_newest),
            *(self.mask, None, self.softcap, self.causal, self.before, self.trellis, self.added),
        )

    def expected(self) -> tuple[Tensor, Tensor]:
        (_, query_heads, length, width), (heads, tail) = self.query.shape, self.tails[0].shape[1:3]
        newest = max(each.waits for each in self.sequences) + tail
        outputs, received = [], []
        for b, sequence in enumerate(self.sequences):
            keys, values = (
                torch.cat([old, new[b].double()], 1) for old, new in zip(sequence.dense(), self.tails, strict=True)
            )
            queries = self.query[b].double().view(heads, -1, length, width)
            logits = queries @ keys.mT[:, None]
            if self.added is not None and sequence.coded:
                sinks = sequence.sinks[0].shape[1]
                at = sequence.positions.long()[:, None].expand(-1, logits[0].shape[:2].numel(), -1)
                more = self.added[b].double().gather(-1, at)
                logits[..., sinks : sinks + sequence.coded] += more.view(*logits.shape[:3], -1)
            logits *= width**-0.5
            if self.softcap is not None:
                logits = torch.tanh(logits / self.softcap) * self.softcap
            if self.mask is not None:
                mask = self.mask[b if len(self.mask) > 1 else 0].expand(query_heads, length, tail)
                mask = mask.reshape(heads, -1, length, tail)
                recent = logits[..., -tail:]
                low = float(torch.finfo(torch.float32).min)
                logits[..., -tail:] = recent.masked_fill(~mask, low) if mask.dtype == torch.bool else recent + mask
            elif self.causal:
                last = torch.arange(logits.shape[-1] - length, logits.shape[-1])[:, None]
                logits = logits.masked_fill(torch.arange(logits.shape[-1]) > last, -torch.inf)
            weights = logits.softmax(-1)
            outputs.append((weights @ values[:, None]).flatten(0, 1).transpose(0, 1))
            known = min(newest, weights.shape[-1])
            last = torch.nn.functional.pad(weights[..., weights.shape[-1] - known :], (newest - known, 0))
            received.append(torch.stack([part.sum(2).mean(1) for part in (last, last.square())], dim=1))
        numbers = (newest - torch.arange(newest)).clamp(max=length).expand(len(received), heads, 1, newest)
        every = torch.cat([torch.stack(received), numbers], dim=2)
        if self.before is not None:
            every[..., : self.before.shape[3]] += self.before
        return torch.stack(outputs), every

    def error(self) -> float:
        """The largest deviation, as a multiple of what is allowed."""
        (found, received), (output, attention) = self.run(), self.expected()
        assert found.shape == output.shape
        assert received.shape == attention.shape
        values = [self.tails[1], *(s.dense()[1] for s in self.sequences)]
        largest = max(float(each.abs().max()) for each in values if each.numel())
        errors = (found - output).abs().max() / (2e-5 * largest), (received - attention).abs().max() / 2e-5
        return max(float("inf") if each.isnan() else float(each) for each in errors)


def codes_of(
    counts: list[int], heads: int, width: int, levels: list[int], scale: float = 1.0, trellis: bool = False
) -> Codes:
    """Codes of random numbers with the given widths, repeated over classes, heads and channels."""
    x = torch.randn(heads, sum(counts), width) * scale
    choice = torch.tensor(levels).repeat(-(-len(counts) * heads * width // len(levels)))
    chosen = choice[: len(counts) * heads * width].view(len(counts), heads, width)
    return encode([Part(x, chosen, x.abs().amax((1, 2)))], counts, trellis)


LEVELS = st.lists(st.integers(0, len(WIDTHS) - 1), min_size=1, max_size=9)
COUNTS = st.lists(st.sampled_from([0, 1, 7, 8, 9, 16, 31, 32, 33, 70]), min_size=1, max_size=4).filter(any)


@st.composite
def cases(draw) -> Case:
    torch.manual_seed(draw(st.integers(0, 2**20)))
    batch, heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 5))
    width, value_width = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    length, tail = draw(st.integers(1, 4)), draw(st.integers(0, 20))
    tail += length
    scale = draw(st.sampled_from([1.0, 1e-6, 1e6]))
    sequences, blocks, trellis = [], draw(st.integers(0, 3)), draw(st.booleans())
    for _ in range(batch):
        segments, waiting = [], None
        for _ in range(draw(st.integers(0, 2))):
            counts = draw(COUNTS)
            keys = codes_of(counts, heads, width, draw(LEVELS), 1.0, trellis)
            segments.append((keys, codes_of(counts, heads, value_width, draw(LEVELS), scale, trellis)))
        if segments and blocks:  # those without codes keep tokens dense that wait in others
            made = [
                (
                    codes_of([8], heads, width, [draw(st.integers(1, 7))], 1.0, trellis),
                    codes_of([8], heads, value_width, [4], scale, trellis),
                )
                for _ in range(blocks)
            ]
            waiting = made[0]
            for more in made[1:]:
                waiting = stacked(waiting[0], more[0]), stacked(waiting[1], more[1])
        sinks = draw(st.integers(0, 5))
        stored = torch.randn(heads, sinks, width), scale * torch.randn(heads, sinks, value_width)
        bases: tuple[Tensor | None, Tensor | None] = (None, None)
        if draw(st.booleans()):
            bases = torch.randn(heads, width, width) / width**0.5, torch.randn(heads, value_width, value_width)
        sequences.append(Sequence(segments, waiting, stored, bases))
    tails = torch.randn(batch, heads, tail, width), scale * torch.randn(batch, heads, tail, value_width)
    kind = draw(st.sampled_from(["none", "causal", "bool", "additive"]))
    mask = None
    if kind in ("bool", "additive"):
        shape = draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads * group])), length, tail
        mask = torch.rand(shape) < 0.6
        mask[..., -1] = True
        mask = mask if kind == "bool" else torch.where(mask, 0.5, -1e9)
    query, before = torch.randn(batch, heads * group, length, width), None
    if draw(st.booleans()):
        newest = max(each.waits for each in sequences) + tail
        before = torch.rand(batch, heads, 3, draw(st.integers(0, newest)))
        before = before.mT.contiguous().mT if draw(st.booleans()) else before
    added = None
    if draw(st.booleans()):
        added = torch.randn(batch, heads, group * length, draw(st.integers(1, 300)))
        if draw(st.booleans()):
            added[..., 0] = NEVER  # the tokens there are hidden
        dtype = draw(st.sampled_from([torch.int16, torch.int32]))
        for each in sequences:
            each.positions = torch.randint(added.shape[3], (heads, each.coded)).to(dtype)
    softcap = draw(st.sampled_from([None, 3.0]))
    return Case(query, sequences, tails, mask, softcap, kind == "causal", before, trellis, added)


@pytest.mark.slow
@settings(max_examples=120)
@given(cases())
def test_is_attention_over_the_numbers(case):
    assert case.error() <= 1


def one_case(count: int = 2500, trellis: bool = False) -> Case:
    """A sequence with all widths, several items, and a tail."""
    torch.manual_seed(count)
    sizes = [count // 10, 0, count - count // 10]
    segment = [codes_of(sizes, 2, 24, list(range(8)), 1.0, trellis) for _ in range(2)]
    bases = torch.randn(2, 24, 24) / 5, torch.randn(2, 24, 24) / 5
    sinks, tails = torch.randn(2, 2, 4, 24), torch.randn(2, 1, 2, 33, 24)
    sequence = Sequence([(segment[0], segment[1])], None, (sinks[0], sinks[1]), bases)
    return Case(torch.randn(1, 6, 1, 24), [sequence], (tails[0], tails[1]), trellis=trellis)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_what_is_added_goes_by_position(dtype):
    """In several tasks, whose columns begin anywhere; rows of which the last four are not whole."""
    case = one_case(6000)
    case.added = 3 * torch.randn(1, 2, 3, 9000)
    (sequence,) = case.sequences
    sequence.positions = torch.stack([torch.randperm(9000)[:6000] for _ in range(2)]).to(dtype)
    assert case.error() <= 1
    right = sequence.positions
    for wrong in (right.flip(-1), right.roll(1, -1), right.flip(0)):
        sequence.positions = wrong.contiguous()
        found = case.run()
        sequence.positions = right
        assert (found[0] - case.expected()[0]).abs().max() > 1e-2


def test_what_is_added_must_fit():
    case = one_case(600)
    case.added = torch.randn(1, 2, 3, 700)
    with pytest.raises(CacheError, match="a sequence has no positions"):
        case.run()
    case.sequences[0].positions = torch.zeros(2, 600, dtype=torch.int16)
    case.added = torch.randn(1, 2, 2, 700)
    with pytest.raises(CacheError, match=r"is \(1, 2, 2, 700\), not \(1, 2, 3, positions\)"):
        case.run()


@pytest.mark.parametrize("trellis", [False, True])
@pytest.mark.parametrize("width", WIDTHS[1:])
def test_each_width_alone(width, trellis):
    level, counts = WIDTHS.index(width), [40, 533]
    keys, values = (codes_of(counts, 2, 16, [level], 1.0, trellis) for _ in range(2))
    sinks, tails = torch.randn(2, 2, 0, 16), torch.randn(2, 1, 2, 5, 16)
    sequence = Sequence([(keys, values)], None, (sinks[0], sinks[1]), (None, None))
    case = Case(torch.randn(1, 2, 1, 16), [sequence], (tails[0], tails[1]), trellis=trellis)
    assert case.error() <= 1


@pytest.mark.parametrize("trellis", [False, True])
@pytest.mark.parametrize("group", [3, 4])
@pytest.mark.parametrize("levels", [[1], [1, 2, 2], [3, 4, 3], [0, 1, 2, 3, 4, 5, 6, 7], [5, 6, 7]])
def test_wide_heads(group, levels, trellis):
    """More channels than are read together, in several units and runs; odd numbers of them of each width."""
    torch.manual_seed(group)
    segment = [codes_of([70, 300, 900], 1, width, levels, 1.0, trellis) for width in (201, 133)]
    sinks, tails = (torch.randn(1, 2, width) for width in (201, 133)), (torch.randn(1, 1, 5, w) for w in (201, 133))
    sequence = Sequence([(segment[0], segment[1])], None, tuple(sinks), (None, None))
    assert Case(torch.randn(1, group, 1, 201), [sequence], tuple(tails), trellis=trellis).error() <= 1


@pytest.mark.parametrize("width", [3, 4, 5, 6, 7, 8])
def test_processors_that_cannot_transpose_bits_read_the_same_numbers(width):
    """Other tests read these widths as this processor does best."""
    import numba

    from grace_opt.kernels.cache.coded.cpu import products

    add = products.adding(width, products.of_channel, transposing=False)

    @numba.njit
    def read(at, step, table, query, out, out_step):
        sums = add(at, step, table, query, out_step, products.no_sums_of_four())
        products.store_rows(out, out_step, sums)

    codes = torch.randint(2**width, (products.BLOCK,))
    planes = torch.stack([codes >> place & 1 for place in range(width)]).view(width, -1, 8)
    planes = (planes << torch.arange(8)).sum(-1).to(torch.uint8)
    queries, out = torch.zeros(4, products.BLOCK), torch.zeros(4, products.BLOCK)
    queries[:, 0] = torch.tensor([1.0, 2, 3, 4])
    row, book = 4 * products.BLOCK, (TRELLIS_BOOKS if width < EVEN_WIDTH else BOOKS)[width]
    read(planes.data_ptr(), planes.shape[1], book.data_ptr(), queries.data_ptr(), out.data_ptr(), row)
    torch.testing.assert_close(out, queries[:, :1] * book[codes])


@pytest.mark.parametrize("trellis", [False, True])
@pytest.mark.parametrize("team", [True, False])
def test_threads_change_no_bit(team, trellis, switch):
    if not team:
        switch(OPENMP, "0")
    case, before = one_case(12_000, trellis), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(case.run())
    finally:
        torch.set_num_threads(before)
    assert case.error() <= 1
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_of_other_types(dtype):
    """Computed in float32, returned in the type of the queries."""
    case = one_case(600)
    case.query, case.tails = case.query.to(dtype), (case.tails[0].to(dtype), case.tails[1].to(dtype))
    (sequence,) = case.sequences
    case.sequences = [replace(sequence, sinks=(sequence.sinks[0].to(dtype), sequence.sinks[1].to(dtype)))]
    output, _ = case.run()
    expected, _ = case.expected()
    assert output.dtype == dtype
    assert (output - expected).abs().max() <= torch.finfo(dtype).eps * expected.abs().max()


def test_views_are_read_as_they_lie():
    case = one_case(600)
    expected, _ = case.run()
    wide = torch.full((1, 6, 3, 26), torch.nan)
    wide[:, :, 1:2, 1:25] = case.query
    tails = [torch.full((1, 33, 2, 25), torch.nan) for _ in range(2)]
    for buffer, tail in zip(tails, case.tails, strict=True):
        buffer[..., :24] = tail.transpose(1, 2)
    case.query, case.tails = wide[:, :, 1:2, 1:25], tuple(buffer.transpose(1, 2)[..., :24] for buffer in tails)
    assert torch.equal(case.run()[0], expected)
    case.query, case.tails = case.query.mT.contiguous().mT, tuple(t.mT.contiguous().mT for t in case.tails)
    assert torch.equal(case.run()[0], expected)


@pytest.mark.parametrize("trellis", [False, True])
def test_codes_at_odd_addresses(trellis):
    case = one_case(601, trellis)
    expected, _ = case.run()

    def moved(tensor: Tensor) -> Tensor:
        buffer = torch.empty(tensor.nbytes + 8, dtype=torch.uint8)
        odd = tensor.element_size() if tensor.dtype != torch.uint8 else 1
        place = buffer[odd : odd + tensor.nbytes]
        place.copy_(tensor.contiguous().view(torch.uint8).flatten())
        return place.view(tensor.dtype).view(tensor.shape) if odd == 1 else tensor.clone()

    (sequence,) = case.sequences
    ((keys, values),) = sequence.segments
    case.sequences = [replace(sequence, segments=[(keys.map(moved), values.map(moved))])]
    assert torch.equal(case.run()[0], expected)


def test_nan_is_not_lost():
    case = one_case(600)
    case.query[0, 1, 0, 3] = torch.nan
    output, _ = case.run()
    assert output[0, 0, 1].isnan().all()
    assert not output[0, 0, [0, 2, 3, 4, 5]].isnan().any()


def test_large_numbers_keep_the_others_finite():
    case = one_case(600)
    case.query *= 1e8
    output, received = case.run()
    assert output.isfinite().all()
    assert received.isfinite().all()


def guarded(features: str | None, octets: bool, others: bool, folder: str) -> None:
    """Run attention beside a guard, in a fork, with loops for this processor, or one with some features."""
    if features is not None:  # as numba asks which one it is when it is imported
        for name in [
            name for name in sys.modules if name.partition(".")[0] in ("grace_opt", "numba", "llvmlite", "tests")
        ]:
            del sys.modules[name]
        os.environ |= {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": folder}
        from grace_opt.kernels._shared import memory

        memory.empty = memory._making(255)  # NaN, which shows where anything is read before it is written
    from grace_opt.kernels._shared.lanes import OCTETS
    from tests import test_coded

    assert features is None or octets == OCTETS
    for count in (1, 8, 9, 40, 64, 100, 530):
        assert test_coded.beside_a_guard(count) <= 1, count
    assert test_coded.one_case(900).error() <= 1
    assert test_coded.one_case(900, trellis=True).error() <= 1
    if others:  # other loops that read codes, or make arrays as these do
        from grace_opt.kernels.cache import heads, received

        assert heads.OPERATION.cpu.trial()
        assert received.OPERATION.cpu.trial()


def at_an_edge(tensor: Tensor, start: bool = False) -> Tensor:
    """Copy bytes to where memory ends, or starts: reading one more, or one before, kills the process."""
    if not tensor.numel() or tensor.dtype != torch.uint8:
        return tensor
    size = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    buffer = mmap.mmap(-1, size + 2 * mmap.PAGESIZE)
    begins = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    for page in (begins, begins + mmap.PAGESIZE + size):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, 0) == 0
    place = mmap.PAGESIZE + (0 if start else size - tensor.nbytes)
    found = torch.frombuffer(buffer, dtype=torch.uint8, count=tensor.nbytes, offset=place)
    return found.view(tensor.shape).copy_(tensor)


at_the_end, at_the_start = at_an_edge, functools.partial(at_an_edge, start=True)


def beside_a_guard(count: int) -> float:
    """Run a case whose bit planes end where memory ends, or start where it starts."""
    torch.manual_seed(count)
    counts, found = [count], []
    for levels in ([3, 0, 1], [7], [0, 0, 2]):
        for trellis, guard in itertools.product((False, True), (at_the_end, at_the_start)):
            made = tuple(codes_of(counts, 1, 5, levels, 1.0, trellis).map(guard) for _ in range(2))
            sequence = Sequence([made], None, (torch.randn(1, 0, 5), torch.randn(1, 0, 5)), (None, None))
            tails = tuple(torch.randn(2, 1, 1, 2, 5))
            found.append(Case(torch.randn(1, 3, 1, 5), [sequence], tails, trellis=trellis).error())
    return max(found)


@pytest.mark.skipif(sys.platform != "linux", reason="guards pages by mprotect")
@pytest.mark.parametrize(
    ("features", "octets", "others"),
    [
        pytest.param(None, True, True, id="here"),
        pytest.param("", False, False, id="x86-64", marks=pytest.mark.slow),
        pytest.param(wheel.KINDS["x86-64-v3"], True, True, id="x86-64-v3", marks=pytest.mark.slow),
        pytest.param(wheel.KINDS["x86-64-v4"], True, False, id="x86-64-v4", marks=pytest.mark.slow),
    ],
)
def test_nothing_around_the_codes_is_read(features, octets, others, request):
    """And all is right, also with loops as they are compiled for processors that have less than this one.

    Those are kept for the next time, as this processor's are, and apart from them: processes that write an index at the
    same time may exchange files, which would not be noticed.
    """
    if features is not None:
        features = ",".join(f"+{feature}" for feature in features.split())
        if not set(features.split(",")) <= {"", *FEATURES}:
            pytest.skip("this processor lacks some of these features")
    folder = Path(__file__).parent / "__pycache__" / f"loops-{request.node.callspec.id}"
    children.run(guarded, features, octets, others, str(folder))


class TestRefused:
    """What the loops cannot do is said before an address is read."""

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"query": torch.zeros(1, 6, 1, 24, dtype=torch.float64)}, "float64"),
            ({"query": torch.zeros(1, 6, 1, 24, requires_grad=True)}, "gradients"),
            ({"query": torch.zeros(1, 2 * 300, 1, 24)}, "300 query rows"),
            ({"query": torch.zeros(1, 6, 1, 24, device="meta")}, "meta"),
        ],
    )
    def test_with_a_reason(self, change, words):
        case = replace(one_case(600), **change)
        assert words in host.unsupported_reason(case.query, *case.tails)

    def test_without_llvm(self, switch):
        switch("GRACE_OPT_LLVM", "0")
        case = one_case(600)
        assert "GRACE_OPT_LLVM=0" in host.unsupported_reason(case.query, *case.tails)

    @pytest.mark.parametrize(
        "change",
        [
            {"query": torch.zeros(1, 6, 1, 23)},
            {"query": torch.zeros(1, 5, 1, 24)},
            {"query": torch.zeros(2, 6, 1, 24)},
            {"tails": (torch.zeros(1, 2, 33, 24), torch.zeros(1, 2, 32, 24))},
            {"tails": (torch.zeros(1, 3, 33, 24), torch.zeros(1, 3, 33, 24))},
        ],
    )
    def test_shapes_that_do_not_fit(self, change):
        with pytest.raises(CacheError, match="do not fit"):
            replace(one_case(600), **change).run()

    @pytest.mark.parametrize("shape", [(1, 2, 3, 34), (1, 1, 3, 4), (2, 2, 3, 4), (1, 2, 2, 4)])
    def test_attention_before_that_does_not_fit(self, shape):
        with pytest.raises(CacheError, match=r"received before .* \(1, 2, 3, 33 or fewer\)"):
            replace(one_case(600), before=torch.zeros(shape)).run()


class TestWhatStepsShare:
    """What is the same in every step is made once for a sequence, and anew for other shapes."""

    @staticmethod
    def case() -> tuple[Case, CodedSequence]:
        case = one_case(600)
        stored = case.sequences[0].stored()
        case.sequences[0].stored = lambda: stored
        return case, stored

    def test_steps_of_other_shapes_read_the_same_codes(self):
        case, stored = self.case()
        more = torch.randn(2, 1, 2, 70, 24)
        steps = [
            case,
            replace(case, query=torch.randn(1, 6, 3, 24)),
            replace(case, query=torch.randn(1, 4, 1, 24)),
            replace(case, tails=(case.tails[0][:, :, :5], case.tails[1][:, :, :5])),
            replace(case, tails=(more[0], more[1]), before=torch.rand(1, 2, 3, 69)),
            replace(case, softcap=3.0),
            replace(case, softcap=2.0),
            replace(case, mask=torch.rand(1, 1, 1, 33) < 0.5),
        ]
        for step in [each for each in steps for _ in range(2)] + steps:
            assert step.error() <= 1
            assert len(stored.on_host) <= host.PLANS
        assert stored.on_host

    def test_of_tails_of_two_lengths_none_is_read(self):
        case, _ = self.case()
        case.run()
        with pytest.raises(CacheError, match="do not fit"):
            replace(case, tails=(case.tails[0], case.tails[1][:, :, 1:])).run()

    def test_a_step_keeps_no_copies(self):
        case, stored = self.case()
        stored = replace(stored, sink_keys=stored.sink_keys.bfloat16())
        case.sequences[0].stored = lambda: stored
        case.run()
        assert not stored.on_host


@given(st.lists(st.integers(1, 9000), max_size=40), st.integers(1, COLUMNS))
def test_splits_are_about_as_long_as_requested_and_between_units_if_possible(counts, some):
    found, most = splits(counts, some), min(some * 5 // 4, COLUMNS)
    assert [0, *(stop for _, stop in found)] == [*(start for start, _ in found), sum(counts)]
    assert all(0 < stop - start <= most for start, stop in found)
    ends = {sum(counts[:number]) for number in range(len(counts) + 1)}
    for number, count in enumerate(counts):  # what fits into a split is in one
        first = sum(counts[:number])
        assert count > most or any(start <= first and first + count <= stop for start, stop in found)
    assert len([split for split in found if not ends & {*split}]) <= sum(
        -(-count // most) for count in counts if count > most
    )


def test_as_many_widths_as_a_cache_has():
    assert forms.WIDTHS == WIDTHS


WRONG = {
    "means of another head": (forms.MEANS, 0, 2 * 24),
    "scales one further": (forms.SCALES, 1, 2),
    "planes one further": (forms.PLANES, 1, 8),
    "widths one further": (forms.LEVEL, 0, 1),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("part", [forms.KEYS, forms.VALUES])
def test_a_wrong_table_is_noticed(name, part):
    field, unit, more = WRONG[name]
    case = one_case(600)
    (sequence,) = case.sequences
    stored = sequence.stored()
    stored.table.units[unit, part + field] += more
    sequence.stored = lambda: stored
    assert case.error() > 1

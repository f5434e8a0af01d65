"""The decoding kernels compute what the torch reference defines; without a GPU they run in Triton's interpreter.

The reference is ``pruned_attention`` in float64 on the same numbers, rounded ones included. With ``u`` half a unit
in the last place of 1 (2^-11 in float16, 2^-8 in bfloat16), each output may be off by ``4 u max|V|``: shares and output
are rounded once each, by at most ``u`` or, where the interpreter cuts digits off, ``2 u``; the rest is float32 and gets
``1e-5 max|V|``. The wrong versions at the end show that this notices.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from grace_opt.errors import CacheError
from grace_opt.hf.stores.channels.attention import pruned_attention
from grace_opt.hf.stores.channels.storage import Compressed
from grace_opt.kernels.cache.decode import gpu as decode
from grace_opt.kernels.cache.decode.gpu import attend
from tests import interpreter  # noqa: F401  (cheaper launches)
from tests.mutants import mutant
from tests.packed import packed_keys, packed_values

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}

pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cpu" and not decode._INTERPRETED, reason="triton was imported before TRITON_INTERPRET=1 was set"
    ),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # numpy, at the smallest number
]


@dataclass
class Case:
    """One call of the kernels."""

    query: Tensor
    pruned_keys: Tensor
    kept_indices: Tensor
    sink_keys: Tensor
    tail_keys: Tensor
    old_values: Tensor
    tail_values: Tensor
    attention_mask: Tensor | None = None
    scaling: float | None = None
    softcap: float | None = None
    causal: bool = True
    block: int | None = 16
    splits: int | None = None

    def run(self) -> Tensor:
        return decode.decode_attention(**vars(self))

    def expected(self) -> Tensor:
        """By the reference, in float64."""
        wide = {name: _wide(value) for name, value in vars(self).items()}
        old = Compressed(
            self.old_values.shape[2], wide["sink_keys"], wide["pruned_keys"], self.kept_indices, wide["old_values"]
        )
        output, _ = pruned_attention(
            torch.nn.Identity(),
            wide["query"],
            wide["tail_keys"],
            wide["tail_values"],
            wide["attention_mask"],
            old,
            scaling=self.scaling,
            softcap=self.softcap,
            is_causal=self.causal,
        )
        return output

    def error(self, found: Tensor) -> float:
        """The largest deviation, as a multiple of what is allowed."""
        largest = max(float(v.abs().max()) for v in (self.old_values, self.tail_values) if v.numel())
        allowed = (4 * UNIT[self.query.dtype] + 1e-5) * largest
        expected = self.expected()
        assert found.shape == expected.shape
        assert found.dtype == self.query.dtype
        difference = (found.double() - expected).abs().max()
        return float("inf") if difference.isnan() else float(difference) / allowed


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def draw(
    generator: torch.Generator,
    batch: int = 1,
    heads: int = 1,
    group: int = 1,
    length: int = 1,
    d: int = 16,
    kept: int = 8,
    d_v: int = 16,
    sinks: int = 0,
    pruned: int = 5,
    tail: int = 5,
    dtype: torch.dtype = torch.float32,
    views: bool = False,
    **rest: Any,
) -> Case:
    """Random tensors; as `views`, keys and values are parts of larger buffers that are NaN elsewhere."""

    def stored(tokens: int, width: int) -> Tensor:
        part = torch.randn(batch, heads, tokens, width, generator=generator).to(DEVICE, dtype)
        if not views:
            return part
        # Room behind the tokens, and the order (B, S, H, d) in memory.
        buffer = torch.full((batch, tokens + 3, heads, width + 1), float("nan"), dtype=dtype, device=DEVICE)
        view = buffer.transpose(1, 2)[:, :, 1 : tokens + 1, :width]
        view.copy_(part)
        return view

    index = torch.rand(batch, heads, d, generator=generator).argsort(-1)[..., :kept].sort(-1).values.to(DEVICE)
    query = torch.randn(batch, length, heads * group, d, generator=generator).to(DEVICE, dtype).transpose(1, 2)
    parts = stored(pruned, kept), index, stored(sinks, d), stored(tail, d), stored(sinks + pruned, d_v)
    return Case(query, *parts, stored(tail, d_v), **rest)


def masked(case: Case, generator: torch.Generator, kind: str, blind: bool = False) -> Case:
    """With a mask: ``"bool"`` or ``"additive"``, ``"... per head"`` of its own for each; `blind` hides all from a row.

    The first sequence is left-padded, the others see all that is causal.
    """
    batch, query_heads, length, _ = case.query.shape
    total = case.old_values.shape[2] + case.tail_values.shape[2]
    shape = (batch, query_heads if "per head" in kind else 1, length, total)
    seen = torch.ones(length, total, dtype=torch.bool).tril(total - length).expand(shape).clone()
    seen[0, :, :, : total // 3] = False
    if "per head" in kind:
        seen &= torch.rand(shape, generator=generator) < 0.7
    seen[..., -length] = True  # something is seen by every row
    if blind:
        seen[0, :, 0] = False
    seen = seen.to(DEVICE)
    if "bool" in kind:
        mask = seen
    else:
        mask = torch.randn(shape, generator=generator).to(case.query)
        mask = mask.masked_fill(~seen, torch.finfo(mask.dtype).min)
    return replace(case, attention_mask=mask)


@st.composite
def cases(draw_from: st.DrawFn) -> Case:
    def number(low: int, high: int) -> int:
        return draw_from(st.integers(low, high))

    generator = torch.Generator().manual_seed(number(0, 2**32 - 1))
    length, d, sinks, pruned, tail = number(1, 4), number(2, 40), number(0, 3), number(0, 40), number(0, 20)
    tail = max(tail, length - sinks - pruned)  # the new tokens are among the stored ones
    dtype = draw_from(st.sampled_from(list(UNIT)))
    case = draw(
        generator,
        *(number(1, 2), number(1, 2), number(1, 4), length, d, number(1, d), number(1, 20), sinks, pruned, tail),
        dtype=dtype,
        views=draw_from(st.booleans()),
        scaling=draw_from(st.sampled_from([None, 0.3])),
        softcap=draw_from(st.sampled_from([None, 2.0])),
        causal=draw_from(st.booleans()),
        splits=draw_from(st.sampled_from([None, 1, 2, 5])),
    )
    kind = draw_from(st.sampled_from(["none", "bool", "additive", "bool per head", "additive per head"]))
    if kind == "none":
        return case
    # The smallest float16 is not far below the logits: hiding everything with it is no hiding.
    blind = dtype != torch.float16 and draw_from(st.booleans())
    return masked(case, generator, kind, blind)


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases())
def test_equals_the_reference(case):
    assert case.error(case.run()) <= 1


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(5)


@pytest.mark.parametrize(
    ("sinks", "pruned", "tail"), [(4, 0, 0), (0, 17, 0), (0, 0, 17), (4, 17, 0), (4, 0, 17), (0, 16, 16), (1, 1, 1)]
)
def test_segments_may_be_empty(sinks, pruned, tail, generator):
    case = draw(generator, heads=2, sinks=sinks, pruned=pruned, tail=tail, splits=2)
    assert case.error(case.run()) <= 1


@pytest.mark.parametrize("dtype", list(UNIT))
@pytest.mark.parametrize(("d", "kept", "d_v"), [(64, 32, 64), (128, 51, 80), (256, 129, 256)])
def test_heads_of_models(d, kept, d_v, dtype, generator):
    case = draw(
        generator, group=2, d=d, kept=kept, d_v=d_v, sinks=2, pruned=50, tail=33, dtype=dtype, block=None, views=True
    )
    assert case.error(case.run()) <= 1


def test_many_blocks_in_several_runs_as_the_shapes_choose(generator):
    case = draw(generator, sinks=4, pruned=1100, tail=131, block=None)
    calls = []
    assert case.error(_recorded(case, calls)) <= 1
    assert calls == [(1, 3)], "1 + 9 + 2 blocks of 128 tokens"


def _recorded(case: Case, calls: list[Any]) -> Tensor:
    right = decode.attend_split

    class Recording:
        def __getitem__(self, grid: Any) -> Any:
            calls.append(grid)
            return right[grid]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "attend_split", Recording())
        return case.run()


@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_softcap(softcap, generator):
    case = draw(generator, heads=2, sinks=2, pruned=20, scaling=1.0, softcap=softcap, splits=2)
    assert case.error(case.run()) <= 1
    steep = replace(case, scaling=1e4)  # its exponentials overflow
    assert steep.error(steep.run()) <= 1


def test_no_channel_kept(generator):
    case = draw(generator, kept=0, pruned=20)
    assert case.error(case.run()) <= 1


@pytest.mark.parametrize("length", [1, 3, 8])
@pytest.mark.parametrize("causal", [True, False])
def test_without_a_mask_it_is_causal_if_asked(length, causal, generator):
    case = draw(generator, group=3, length=length, pruned=4, tail=9, causal=causal, splits=2)
    assert case.error(case.run()) <= 1


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_a_row_that_sees_nothing_gets_the_mean_of_the_values(kind, generator):
    case = masked(draw(generator, group=2, pruned=20, tail=7, splits=3), generator, kind, blind=True)
    values = torch.cat([case.old_values, case.tail_values], dim=2)
    torch.testing.assert_close(case.run()[0, 0], values[0].mean(dim=1).expand(2, -1))


def test_minus_infinity_in_a_mask_hides_and_stays_finite(generator):
    case = masked(draw(generator, batch=2, group=2, length=2, pruned=20, splits=3), generator, "additive")
    least = torch.finfo(torch.float32).min
    infinite = case.attention_mask.masked_fill(case.attention_mask == least, float("-inf"))
    assert case.error(replace(case, attention_mask=infinite).run()) <= 1
    assert replace(case, attention_mask=torch.full_like(infinite, float("-inf"))).run().isfinite().all()


def test_one_mask_for_all_sequences(generator):
    case = masked(draw(generator, batch=2, group=2, length=2, pruned=20), generator, "additive per head")
    case = replace(case, attention_mask=case.attention_mask[:1])
    assert case.error(case.run()) <= 1


def test_not_a_number_does_not_get_lost(generator):
    case = masked(draw(generator, group=2, pruned=20, splits=2), generator, "additive")
    case.tail_keys[0, 0, 3, 2] = float("nan")
    assert case.run().isnan().all()


def test_no_sequence_gives_no_output(generator):
    case = draw(generator)
    nothing = {name: value[:0] for name, value in vars(case).items() if isinstance(value, Tensor)}
    assert replace(case, **nothing).run().shape == (0, 1, 1, 16)


def test_what_it_can_not_do_is_refused_with_a_reason(generator):
    case = draw(generator, group=3)

    def changed(**parts):
        return replace(case, **parts)

    wide = draw(generator, d=257)
    refused = {
        "float64": changed(**{name: _wide(value) for name, value in vars(case).items()}),
        "float16, torch.float32": changed(tail_values=case.tail_values.half()),
        "257 wide": wide,
        "72 query rows": draw(generator, group=9, length=8),
        "65536 bytes": draw(generator, group=8, length=8, d=256),
        "gradients": changed(query=case.query.clone().requires_grad_()),
        "6 pruned and 5 tail": draw(generator, pruned=6),
        "there must be": draw(generator, pruned=0, tail=0),
        r"shape \(1, 1, 1, 5\)": changed(attention_mask=torch.ones(1, 1, 1, 5, dtype=torch.bool)),
        r"shape \(1, 2, 1, 10\)": changed(attention_mask=torch.ones(1, 2, 1, 10, dtype=torch.bool)),
    }
    refused["6 pruned and 5 tail"].old_values = case.old_values
    for message, wrong in refused.items():
        with pytest.raises(CacheError, match=message):
            wrong.run()
    with torch.no_grad():
        assert refused["gradients"].error(refused["gradients"].run()) <= 1


# ---------------------------------------------- keys and values in a few bits


def in_few_bits(case: Case, generator: torch.Generator, **packings: Any) -> tuple[Case, Case]:
    """The same with `pruned_keys` or `old_values` in a few bits, and with the numbers that these stand for."""
    packed, dense, dtype = case, case, case.query.dtype
    for name, packing in packings.items():
        pack = packed_keys if name == "pruned_keys" else packed_values
        stored, numbers = pack(generator, getattr(case, name).shape, *packing, dtype=dtype, blocks=2, device=DEVICE)
        packed, dense = replace(packed, **{name: stored}), replace(dense, **{name: numbers.to(DEVICE, dtype)})
    return packed, dense


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(UNIT))
@pytest.mark.parametrize(
    ("bits", "backend", "key_size", "value_size", "groups", "block"),
    [
        (4, "quanto", 32, None, 3, None),
        (2, "quanto", 8, 5, 4, 16),
        (8, "hqq", 40, 20, 2, 16),
        (4, "hqq", 1, 4, 20, None),
        (4, "hqq", None, 10, 20, 16),
        (3, "hqq", 24, 10, 2, 16),
        (1, "hqq", 128, 1, 1, None),
    ],
)
def test_few_bits(bits, backend, key_size, value_size, groups, block, dtype, generator):
    pruned = groups * (key_size or 1)
    case = draw(generator, 2, 3, 2, 2, 40, 13, 20, 2, pruned, 19, dtype=dtype, block=block, splits=2, softcap=9.0)
    sizes = {"pruned_keys": key_size, "old_values": value_size}
    packings = {name: (bits, backend, size) for name, size in sizes.items() if size is not None}
    packed, dense = in_few_bits(masked(case, generator, "bool"), generator, **packings)
    assert dense.error(packed.run()) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if ZERO_IN_LEVELS", "if not ZERO_IN_LEVELS"),
        ("if HIGH_FIRST", "if not HIGH_FIRST"),
        ("tl.int32 if BITS == 3", "tl.uint8 if BITS == 3"),
        ("10 if BITS == 3", "9 if BITS == 3"),
        ("row = tl.load(entry + STEP) * head + ", "row = "),
        ("first = tl.load(entry + STEP) * head + ", "first = "),
        ("(row - number * plane)", "(row % 8)"),
        ("places < KEY_SIZE", "places < KEY_SIZE - 1"),
        ("group * KEY_SIZE + places", "places"),
        ("(channels % SIZE)", "(channels % 5)"),
        ("(channels // SIZE)", "(channels // 99)"),
        ("columns = sinks + tokens", "columns = tokens"),
    ],
)
def test_wrong_reading_of_few_bits_would_be_noticed(old, new, generator, monkeypatch, tmp_path):
    case = draw(generator, heads=2, group=2, sinks=2, pruned=60, scaling=1.0, d_v=20)
    packed, dense = in_few_bits(
        masked(case, generator, "bool"), generator, pruned_keys=(4, "hqq", 20), old_values=(3, "hqq", 10)
    )
    assert dense.error(packed.run()) <= 1
    monkeypatch.setattr(decode, "attend_split", mutant(attend, old, new, tmp_path).attend_split)
    assert dense.error(packed.run()) > 5


# ------------------------------------------------------------ wrong versions


def forget_kept_indices(case):
    kept = case.kept_indices.shape[-1]
    return replace(case, kept_indices=torch.arange(kept, device=DEVICE).expand(case.kept_indices.shape)).run()


def forget_scaling(case):
    return replace(case, scaling=1.0).run()


def forget_the_mask(case):
    return replace(case, attention_mask=None).run()


def forget_softcap(case):
    return replace(case, softcap=None).run()


def forget_which_head_the_mask_is_for(case):
    return replace(case, attention_mask=case.attention_mask[:, :1]).run()


def mix_up_the_groups(case):
    heads = case.pruned_keys.shape[1]
    order = torch.arange(case.query.shape[1], device=DEVICE).view(-1, heads).T.flatten()
    return replace(case, query=case.query[:, order]).run()


def forget_that_the_tail_comes_after_the_old_tokens(case):
    mask, tail = case.attention_mask, case.tail_keys.shape[2]
    return replace(case, attention_mask=torch.cat([mask[..., -tail:], mask[..., :-tail]], dim=-1)).run()


def forget_to_weigh_the_splits(case):
    right = decode.join_splits

    class Wrong:
        def __getitem__(self, grid):
            return lambda largest, *rest, **options: right[grid](torch.zeros_like(largest), *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "join_splits", Wrong())
        return case.run()


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        forget_kept_indices,
        forget_scaling,
        forget_the_mask,
        forget_softcap,
        forget_which_head_the_mask_is_for,
        mix_up_the_groups,
        forget_that_the_tail_comes_after_the_old_tokens,
        forget_to_weigh_the_splits,
    ],
)
def test_a_wrong_version_would_be_noticed(wrong, generator):
    case = draw(
        generator,
        heads=2,
        group=2,
        length=2,
        sinks=2,
        pruned=20,
        scaling=0.4,
        softcap=3.0,
        splits=3,
        dtype=torch.float16,
    )
    case = masked(case, generator, "bool per head")
    assert case.error(case.run()) <= 1
    assert case.error(wrong(case)) > 5

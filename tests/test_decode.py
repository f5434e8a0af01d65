"""The compiled decoding kernel computes what the short reference in `oracle` does, whatever shapes, views and masks.

Every output may be off by ``1e-5 max|V|``, float32's rounding of some hundred terms. The wrong versions at the end show
that this notices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from grace_opt.errors import CacheError
from grace_opt.hf.stores.channels.attention import pruned_attention
from grace_opt.hf.stores.channels.storage import Compressed
from grace_opt.kernels.cache.decode import host as decode
from grace_opt.kernels.cache.decode.packed import PLANE, SCALE, STEP, ZERO, PackedKeys, PackedValues
from tests import oracle
from tests.packed import packed_keys, packed_values


@dataclass
class Case:
    """One call of the kernel."""

    query: Tensor
    pruned_keys: Tensor | PackedKeys
    kept_indices: Tensor
    sink_keys: Tensor
    tail_keys: Tensor
    old_values: Tensor | PackedValues
    tail_values: Tensor
    attention_mask: Tensor | None = None
    scaling: float | None = None
    softcap: float | None = None
    causal: bool = True
    splits: int | None = None

    def run(self) -> Tensor:
        return decode.decode_attention(**vars(self))

    def expected(self) -> np.ndarray:
        batch, query_heads, length, _ = self.query.shape
        values = torch.cat([self.old_values, self.tail_values], dim=2)
        mask, total = self.attention_mask, values.shape[2]
        if mask is None and self.causal:
            mask = torch.ones(length, total, dtype=torch.bool).tril(total - length)[None, None]
        if mask is not None:
            mask = mask.expand(batch, query_heads, length, total).numpy()
        parts = self.query, self.pruned_keys, self.kept_indices, self.sink_keys, self.tail_keys, values
        return oracle.pruned_attention(*(t.numpy() for t in parts), mask, self.scaling, self.softcap)

    def error(self, found: Tensor) -> float:
        """The largest deviation, as a multiple of what is allowed."""
        largest = max(float(v.abs().max()) for v in (self.old_values, self.tail_values) if v.numel())
        expected = self.expected()
        assert found.shape == expected.shape
        assert found.dtype == torch.float32
        difference = np.abs(found.numpy() - expected).max()
        return float("inf") if np.isnan(difference) else float(difference) / (1e-5 * largest)


LAYOUTS = ["token-major", "channel-major", "parts of larger tensors", "channel-major parts", "every second number"]


def laid_out(part: Tensor, layout: str) -> Tensor:
    """The same numbers elsewhere in memory; what lies around them is NaN."""
    batch, heads, tokens, width = part.shape
    if layout == "token-major":
        return part
    if layout == "channel-major":
        return part.mT.contiguous().mT
    if layout == "parts of larger tensors":  # room behind the tokens, and the order (B, S, H, d) in memory
        buffer = part.new_full((batch, tokens + 3, heads, width + 1), torch.nan)
        view = buffer.transpose(1, 2)[:, :, 1 : tokens + 1, :width]
    elif layout == "channel-major parts":
        view = part.new_full((batch, heads, width + 1, tokens + 5), torch.nan)[:, :, 1:, 2 : tokens + 2].mT
    else:
        view = part.new_full((batch, heads, tokens, 2 * width), torch.nan)[..., ::2]
    view.copy_(part)
    return view


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
    layout: str = "token-major",
    **rest: Any,
) -> Case:
    def stored(tokens: int, width: int) -> Tensor:
        return laid_out(torch.randn(batch, heads, tokens, width, generator=generator), layout)

    index = torch.rand(batch, heads, d, generator=generator).argsort(-1)[..., :kept].sort(-1).values
    query = torch.randn(batch, length, heads * group, d, generator=generator).transpose(1, 2)
    parts = stored(pruned, kept), index, stored(sinks, d), stored(tail, d), stored(sinks + pruned, d_v)
    return Case(query, *parts, stored(tail, d_v), **rest)


def masked(case: Case, generator: torch.Generator, kind: str, shared: bool = False, blind: bool = False) -> Case:
    """With a mask, ``"bool"`` or ``"additive"``, `shared` by sequences and heads or not; `blind`: a row sees none."""
    batch, query_heads, length, _ = case.query.shape
    total = case.old_values.shape[2] + case.tail_values.shape[2]
    shape = (1, 1, length, total) if shared else (batch, query_heads, length, total)
    seen = torch.rand(shape, generator=generator) < 0.7
    seen[..., -length] = True  # something is seen by every row
    if blind:
        seen[0, 0, 0] = False
    if kind == "bool":
        return replace(case, attention_mask=seen)
    mask = torch.randn(shape, generator=generator).masked_fill(~seen, torch.finfo(torch.float32).min)
    return replace(case, attention_mask=mask)


@st.composite
def cases(draw_from: st.DrawFn) -> Case:
    def number(low: int, high: int) -> int:
        return draw_from(st.integers(low, high))

    generator = torch.Generator().manual_seed(number(0, 2**32 - 1))
    length = draw_from(st.sampled_from([1, 1, 2, 5, 32]))
    d, sinks, pruned, tail = number(1, 40), number(0, 5), number(0, 150), number(0, 70)
    tail = max(tail, length - sinks - pruned)  # the new tokens are among the stored ones
    case = draw(
        generator,
        *(number(1, 2), number(1, 3), number(1, 6), length, d, number(0, d), number(1, 40), sinks, pruned, tail),
        layout=draw_from(st.sampled_from(LAYOUTS)),
        scaling=draw_from(st.sampled_from([None, 0.3])),
        softcap=draw_from(st.sampled_from([None, 2.0])),
        causal=draw_from(st.booleans()),
        splits=draw_from(st.sampled_from([None, 1, 2, 5])),
    )
    kind = draw_from(st.sampled_from(["none", "bool", "additive"]))
    if kind == "none":
        return case
    return masked(case, generator, kind, draw_from(st.booleans()), draw_from(st.booleans()))


@pytest.mark.slow
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases())
def test_equals_the_reference(case):
    assert case.error(case.run()) <= 1


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(5)


@pytest.mark.parametrize("kind", ["none", "bool", "additive"])
def test_equals_the_definition_in_torch(kind, generator):
    case = draw(generator, batch=2, heads=2, group=3, length=4, sinks=3, pruned=90, tail=20, softcap=3.0)
    case = case if kind == "none" else masked(case, generator, kind)
    old = Compressed(case.old_values.shape[2], case.sink_keys, case.pruned_keys, case.kept_indices, case.old_values)
    expected, _ = pruned_attention(
        torch.nn.Identity(),
        case.query,
        case.tail_keys,
        case.tail_values,
        case.attention_mask,
        old,
        softcap=3.0,
        is_causal=True,
    )
    torch.testing.assert_close(case.run(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("sinks", "pruned", "tail"), [(4, 0, 0), (0, 17, 0), (0, 0, 17), (4, 17, 0), (4, 0, 17), (0, 64, 64), (1, 1, 1)]
)
def test_segments_may_be_empty(sinks, pruned, tail, generator):
    case = draw(generator, heads=2, sinks=sinks, pruned=pruned, tail=tail, splits=2)
    assert case.error(case.run()) <= 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("d", "kept", "d_v"), [(64, 25, 64), (128, 51, 80), (256, 129, 256), (7, 0, 3), (9, 1, 17)])
def test_heads_of_models_and_odd_ones_in_every_layout(d, kept, d_v, layout, generator):
    case = draw(
        generator, batch=2, heads=2, group=2, d=d, kept=kept, d_v=d_v, sinks=2, pruned=301, tail=33, layout=layout
    )
    assert case.error(case.run()) <= 1


@pytest.mark.parametrize("group", [1, 3, 4, 8, 71])
def test_groups(group, generator):
    case = draw(generator, heads=2, group=group, length=2, pruned=130)
    assert case.error(case.run()) <= 1


@pytest.mark.parametrize("kind", ["none", "bool", "additive"])
def test_threads_do_not_change_a_bit(kind, generator, monkeypatch):
    monkeypatch.setattr(decode, "ALONE_BELOW", 0)
    case = draw(generator, heads=3, group=3, length=2, d=64, kept=25, d_v=64, sinks=4, pruned=2000, tail=50)
    case = case if kind == "none" else masked(case, generator, kind)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(case.run())
    finally:
        torch.set_num_threads(before)
    assert case.error(found[0]) <= 1
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_softcap(softcap, generator):
    case = draw(generator, heads=2, sinks=2, pruned=20, scaling=1.0, softcap=softcap, splits=2)
    assert case.error(case.run()) <= 1
    steep = replace(case, scaling=1e4)  # its exponentials overflow
    assert steep.error(steep.run()) <= 1


def test_logits_may_lie_far_apart(generator):
    case = draw(generator, pruned=200, scaling=30.0)
    case.query *= 10
    assert case.error(case.run()) <= 5  # logits of a thousand have an error of their own


@pytest.mark.parametrize("length", [1, 3, 8, 32])
@pytest.mark.parametrize("causal", [True, False])
def test_without_a_mask_it_is_causal_if_asked(length, causal, generator):
    case = draw(generator, group=3, length=length, pruned=70, tail=40, causal=causal, splits=3)
    assert case.error(case.run()) <= 1


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_a_row_that_sees_nothing_gets_the_mean_of_the_values(kind, generator):
    case = masked(draw(generator, group=2, pruned=20, tail=7, splits=3), generator, kind, shared=True, blind=True)
    values = torch.cat([case.old_values, case.tail_values], dim=2)
    torch.testing.assert_close(case.run()[0, 0], values[0].mean(dim=1).expand(2, -1))


def test_minus_infinity_in_a_mask_hides_and_stays_finite(generator):
    case = masked(draw(generator, batch=2, group=2, length=2, pruned=20, splits=3), generator, "additive")
    least = torch.finfo(torch.float32).min
    infinite = case.attention_mask.masked_fill(case.attention_mask == least, float("-inf"))
    torch.testing.assert_close(replace(case, attention_mask=infinite).run(), case.run(), atol=0, rtol=0)
    assert replace(case, attention_mask=torch.full_like(infinite, float("-inf"))).run().isfinite().all()


def test_masks_of_any_type_and_layout(generator):
    case = masked(draw(generator, batch=2, group=2, length=2, pruned=90), generator, "additive")
    mask = case.attention_mask.clamp_min(-1e4).half()
    case = replace(case, attention_mask=mask.float())
    apart = mask.new_empty(*mask.shape[:3], 2 * mask.shape[3])[..., ::2].copy_(mask)
    for other in (mask, mask.double(), apart, mask.mT.contiguous().mT):
        assert torch.equal(replace(case, attention_mask=other).run(), case.run())
    seen = mask > 0
    case = replace(case, attention_mask=seen)
    assert torch.equal(replace(case, attention_mask=seen.mT.contiguous().mT).run(), case.run())


def test_not_a_number_does_not_get_lost(generator):
    case = draw(generator, group=2, pruned=20, splits=2)
    case.tail_keys[0, 0, 3, 2] = float("nan")
    assert case.run().isnan().all()
    case = draw(generator, group=2, pruned=20, splits=2)
    case.old_values[0, 0, 3, 2] = float("nan")
    assert case.run().isnan().sum() == 2


def test_a_channel_that_does_not_exist_is_not_read(generator):
    case = draw(generator, group=2, pruned=20)
    for wrong in (-1, 16, 2**40):
        case.kept_indices[0, 0, 2] = wrong
        assert case.run().isnan().all()


def test_tensors_of_inference_mode(generator):
    with torch.inference_mode():
        case = draw(generator, group=2, pruned=20)
        found = case.run()
    assert case.error(found) <= 1


def test_no_sequence_gives_no_output(generator):
    case = draw(generator)
    nothing = {name: value[:0] for name, value in vars(case).items() if isinstance(value, Tensor)}
    assert replace(case, **nothing).run().shape == (0, 1, 1, 16)


def test_what_it_can_not_do_is_refused_with_a_reason(generator):
    case = draw(generator, group=3)

    def changed(**parts):
        return replace(case, **parts)

    refused = {
        "torch.float32, torch.float64": changed(query=case.query.double()),
        "float16": changed(tail_values=case.tail_values.half()),
        "on cpu, meta": changed(query=case.query.to("meta")),
        "520 query rows": draw(generator, group=65, length=8),
        "gradients": changed(query=case.query.clone().requires_grad_()),
        "6 pruned and 5 tail": replace(draw(generator, pruned=6), old_values=case.old_values),
        "there must be": draw(generator, pruned=0, tail=0),
        "tail_keys has shape": changed(tail_keys=case.tail_keys[..., :15]),
        "kept_indices has shape": changed(kept_indices=case.kept_indices[..., :7]),
        "old_values has shape": changed(old_values=case.old_values[..., :7]),
        "3 query heads": replace(draw(generator, heads=2), query=case.query),
        r"shape \(1, 1, 1, 5\)": changed(attention_mask=torch.ones(1, 1, 1, 5, dtype=torch.bool)),
        r"shape \(1, 2, 1, 10\)": changed(attention_mask=torch.ones(1, 2, 1, 10, dtype=torch.bool)),
    }
    for message, wrong in refused.items():
        with pytest.raises(CacheError, match=message):
            wrong.run()
    with torch.no_grad():
        assert case.error(refused["gradients"].run()) <= 1


# ---------------------------------------------- keys and values in a few bits

PACKINGS = [(4, "quanto"), (2, "quanto"), (8, "hqq"), (4, "hqq"), (3, "hqq"), (2, "hqq"), (1, "hqq")]


def in_few_bits(case: Case, generator: torch.Generator, blocks: int = 2, **packings: Any) -> tuple[Case, Case]:
    """The same with `pruned_keys` or `old_values` in a few bits, and with the numbers that these stand for."""
    packed, dense = case, case
    for name, packing in packings.items():
        pack = packed_keys if name == "pruned_keys" else packed_values
        stored, numbers = pack(generator, getattr(case, name).shape, *packing, blocks=blocks)
        packed, dense = replace(packed, **{name: stored}), replace(dense, **{name: numbers.float()})
    return packed, dense


@st.composite
def packed_cases(draw_from: st.DrawFn) -> tuple[Case, Case]:
    def number(low: int, high: int) -> int:
        return draw_from(st.integers(low, high))

    generator = torch.Generator().manual_seed(number(0, 2**32 - 1))
    key_size, value_size = (draw_from(st.sampled_from([1, 5, 8, 16, 24, 32, 64, 100])) for _ in range(2))
    d, groups, sinks = number(1, 40), number(1, 5), number(0, 5)
    case = draw(
        generator,
        *(number(1, 2), number(1, 3), number(1, 6), number(1, 2), d, number(1, d), value_size * number(1, 3)),
        *(sinks, groups * key_size, number(2, 9)),
        softcap=draw_from(st.sampled_from([None, 2.0])),
        splits=draw_from(st.sampled_from([None, 1, 2, 5])),
    )
    if draw_from(st.booleans()):
        case = masked(case, generator, draw_from(st.sampled_from(["bool", "additive"])))
    parts = draw_from(st.sampled_from([("pruned_keys",), ("old_values",), ("pruned_keys", "old_values")]))
    sizes = {"pruned_keys": key_size, "old_values": value_size}
    packings = {name: (*draw_from(st.sampled_from(PACKINGS)), sizes[name]) for name in parts}
    return in_few_bits(case, generator, number(1, 3), **packings)


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(packed_cases())
def test_few_bits_are_read_as_the_numbers_that_they_stand_for(both):
    packed, dense = both
    assert dense.error(packed.run()) <= 1


@pytest.mark.parametrize("packing", PACKINGS)
def test_heads_of_models_in_few_bits(packing, generator):
    case = draw(generator, batch=2, heads=3, group=4, d=128, kept=51, d_v=128, sinks=4, pruned=640, tail=33)
    packed, dense = in_few_bits(case, generator, 4, pruned_keys=(*packing, 32), old_values=(*packing, 32))
    assert dense.error(packed.run()) <= 1


def test_a_group_of_values_that_is_not_finite_spoils_no_other(generator):
    packed, _ = in_few_bits(draw(generator, d_v=24, pruned=64), generator, old_values=(4, "quanto", 8))
    scale = packed.old_values.tensors[1]
    scale[1] = float("nan")
    found = packed.run()[0, 0, 0]
    assert found[8:16].isnan().all()
    assert found[:8].isfinite().all()
    assert found[16:].isfinite().all()


def test_what_packed_keys_have_to_be(generator):
    packing = 4, "quanto", 32
    case = draw(generator, d_v=32, pruned=64)
    packed, _ = in_few_bits(case, generator, pruned_keys=packing, old_values=packing)
    keys, values = packed.pruned_keys, packed.old_values
    for message, wrong in {
        "scales and zero points are torch.float16": replace(keys, parameters=torch.float16),
        "pruned_keys.table has shape": replace(keys, table=keys.table.repeat(2, 1, 1)),
        "pruned_keys.owners has shape": replace(keys, owners=keys.owners[1:]),
    }.items():
        with pytest.raises(CacheError, match=message):
            replace(packed, pruned_keys=wrong).run()
    for message, wrong in {
        "scales and zero points are torch.float16": replace(values, parameters=torch.float16),
        "old_values.owners has shape": replace(values, owners=values.owners[1:]),
        "old_values.table has shape": replace(values, table=values.table.repeat(2, 1, 1)),
    }.items():
        with pytest.raises(CacheError, match=message):
            replace(packed, old_values=wrong).run()


def columns(packed: Any, changes: dict[int, Any]) -> Any:
    """With other columns of the table, made from it."""
    table = packed.table.clone()
    for column, change in changes.items():
        table[..., column] = change(packed.table)
    return replace(packed, table=table)


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize("part", ["pruned_keys", "old_values"])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda packed: replace(packed, high_first=not packed.high_first),
        lambda packed: replace(packed, zero_in_levels=not packed.zero_in_levels),
        lambda packed: replace(packed, bits=2),
        lambda packed: columns(packed, {SCALE: lambda of: of[..., ZERO], ZERO: lambda of: of[..., SCALE]}),
        lambda packed: columns(packed, {PLANE: lambda of: of[..., PLANE] - 1}),
        lambda packed: columns(packed, {STEP: lambda of: 0 * of[..., STEP]}),
    ],
)
def test_wrong_packing_would_be_noticed(wrong, part, bits, generator):
    case = draw(generator, heads=2, group=2, sinks=2, pruned=64, scaling=1.0)
    packed, dense = in_few_bits(case, generator, **{part: (bits, "hqq", 16)})
    assert dense.error(packed.run()) <= 1
    assert dense.error(replace(packed, **{part: wrong(getattr(packed, part))}).run()) > 5


# ------------------------------------------------------------ wrong versions


def forget_kept_indices(case):
    kept = case.kept_indices.shape[-1]
    return replace(case, kept_indices=torch.arange(kept).expand(case.kept_indices.shape)).run()


def forget_scaling(case):
    return replace(case, scaling=1.0).run()


def forget_the_mask(case):
    return replace(case, attention_mask=None).run()


def forget_softcap(case):
    return replace(case, softcap=None).run()


def forget_which_head_the_mask_is_for(case):
    return replace(case, attention_mask=case.attention_mask[:, :1]).run()


def mix_up_the_groups(case):
    order = torch.arange(case.query.shape[1]).view(-1, case.pruned_keys.shape[1]).T.flatten()
    return replace(case, query=case.query[:, order]).run()


def forget_that_the_tail_comes_after_the_old_tokens(case):
    mask, tail = case.attention_mask, case.tail_keys.shape[2]
    return replace(case, attention_mask=torch.cat([mask[..., -tail:], mask[..., :-tail]], dim=-1)).run()


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
    ],
)
def test_a_wrong_version_would_be_noticed(wrong, generator):
    case = draw(generator, heads=2, group=2, length=2, sinks=2, pruned=20, scaling=0.4, softcap=3.0, splits=3)
    case = masked(case, generator, "bool")
    assert case.error(case.run()) <= 1
    assert case.error(wrong(case)) > 5

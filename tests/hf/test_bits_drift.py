"""Blocks of newer tokens: their means and scales follow the keys, for no more bits than the prompt's tokens had."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from grace_opt.hf.bits import drift
from grace_opt.hf.bits.bitplanes import unpack_codes
from grace_opt.hf.bits.block_budget import Spent, affordable_sizes, grown_sizes
from grace_opt.hf.bits.classes import class_sizes
from grace_opt.hf.bits.codebooks import codebook
from grace_opt.hf.bits.codes import Part, encode
from grace_opt.hf.bits.row import CodedRow, class_of_tokens, packed_classes

HEADS, WIDTH, BLOCK = 2, 32, 64


def rotated(tokens, seed=0, speed=2e-3, loud=3.0):
    """Keys with means that a rotary embedding turns: in the first channels slowly, in the others fast."""
    generator = torch.Generator().manual_seed(seed)
    plain = torch.randn(HEADS, tokens, WIDTH, generator=generator)
    plain += loud * torch.randn(HEADS, 1, WIDTH, generator=generator)
    angle = torch.arange(tokens)[:, None] * speed * torch.logspace(0, 2.5, WIDTH // 2)
    first, second = plain.chunk(2, dim=-1)
    return torch.cat([first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], -1)


def coded(coordinates, counts, levels):
    return encode([Part(coordinates, levels, coordinates.abs().amax((1, 2)))], counts)


def coded_row(keys, values, bits=3):
    """A row in the channels as they are, all of `bits` in the first class and fewer in the others."""
    count = keys.shape[1]
    sizes = class_sizes(count)
    scores = torch.rand(HEADS, count, generator=torch.Generator().manual_seed(5))
    classes = class_of_tokens(scores, sizes)
    order = classes.argsort(dim=-1, stable=True)[..., None].expand(-1, -1, WIDTH)
    levels = torch.arange(bits, bits - len(sizes), -1).clamp(min=0)[:, None, None].repeat(1, HEADS, WIDTH)
    levels[:, :, ::3] += 1
    levels[:, :, 5] = 7  # eight bits
    made = (coded(each.gather(1, order), sizes, levels) for each in (keys, values))
    return CodedRow(*made, packed_classes(classes), keys[:, :0], values[:, :0], count)


def grown_row(keys, values, prompt, scores=None, **options):
    row = coded_row(keys[:, :prompt], values[:, :prompt], **options)
    if scores is None:
        scores = torch.rand(HEADS, keys.shape[1], generator=torch.Generator().manual_seed(6))
    for start in range(prompt, keys.shape[1] - BLOCK + 1, BLOCK):
        at = slice(start, start + BLOCK)
        row = row.appended(keys[:, at], values[:, at], scores[:, at], None)
    return row


def decoded_by_hand(row, kind):
    """One token after the other, in the order of the sequence, with means and scales that are corrected on the way."""
    codes = getattr(row, kind)
    widths, table, moved = codes.widths(), codebook(codes.means.device), codes.drift
    numbers = [
        unpack_codes(plane, widths[c].reshape(-1), n)
        for c, (plane, n) in enumerate(zip(codes.planes, codes.counts, strict=True))
    ]
    planes = row.classes.numpy()
    stored = iter(codes.scales.tolist())
    scale = {(c, h, j): next(stored) for c, h, j in np.ndindex(*widths.shape) if widths[c, h, j]}
    found = np.zeros((HEADS, row.tokens, WIDTH))
    for h in range(HEADS):
        mean, factor, used = codes.means[h].tolist(), {}, [0] * len(codes.counts)
        for t in range(row.tokens):
            block, first = divmod(t - sum(row.prompt), row.block)
            if block >= 0 and first == 0 and moved is not None:
                for place, value in zip(moved.channels[block, h].tolist(), moved.means[block, h].tolist(), strict=True):
                    mean[place] = value
                for place, code in zip(moved.scales[block, h].tolist(), moved.factors[block, h].tolist(), strict=True):
                    factor[divmod(place, WIDTH)] = 2 ** ((code - 128) / 4)
            c = sum((int(planes[bit, h, t // 8]) >> t % 8 & 1) << bit for bit in (0, 1))
            for j in range(WIDTH):
                code = int(numbers[c][h * WIDTH + j, used[c]])
                level = float(table[int(widths[c, h, j]), code]) * scale.get((c, h, j), 0) * factor.get((c, j), 1)
                found[h, t, j] = (mean[j] + level) * float(codes.unit[h])
            used[c] += 1
    return found


@pytest.mark.parametrize("blocks", [1, 4])
def test_a_grown_row_decodes_as_the_definition_says(blocks):
    keys, values = rotated(104 + 64 * blocks), rotated(104 + 64 * blocks, 1)
    row = grown_row(keys, values * 1e6, 104)  # values have a unit of their own
    assert len(row.keys.drift.channels) == len(row.values.drift.channels) == blocks
    assert float(row.values.unit[0]) != 1
    for kind, found in zip(("keys", "values"), row.dense(None), strict=True):
        expected = decoded_by_hand(row, kind)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_errors_of_rotating_keys_do_not_grow_with_the_position():
    keys = rotated(400 + 64 * 30, speed=5e-4)
    row = grown_row(keys, keys, 400)
    square = (row.dense(None)[0] - keys[:, : row.length]).square().mean((0, 2))
    prompt, last = float(square[:400].mean()), float(square[-1024:].mean())
    assert last < 2.5 * prompt
    # With the prompt's means and scales, they do.
    plain = coded_row(keys[:, :400], keys[:, :400]).keys
    part = keys[:, -1024:]
    fixed = plain.appended(part, (0, 0, 0, 1024), torch.ones(HEADS, WIDTH), 0).decode(
        [torch.ones(n, dtype=torch.long) for n in (0, 0, 0, 1024)]
    )
    assert float((fixed[:, -1024:] - part).square().mean()) > 4 * last


def test_a_jump_of_the_scale_is_followed():
    keys = torch.randn(HEADS, 400 + 64 * 8, WIDTH, generator=torch.Generator().manual_seed(1))
    keys[:, 400:, [2, 5]] = keys[:, 400:, [2, 5]] * 12 + 30  # channel 5 has eight bits, cut at the largest entry
    row = grown_row(keys, keys, 400)
    off = (row.dense(None)[0] - keys)[:, -64:].square().mean((0, 1)) / keys[:, -64:].var((0, 1))
    assert float(off[5]) < 0.02
    assert float(off[2]) < 0.9  # three of four tokens have no bits for it


@pytest.mark.parametrize("prompt", [104, 400, 3000])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_newer_tokens_take_no_more_bits_than_those_of_the_prompt(prompt, bits):
    keys, values = rotated(prompt + 64 * 12), rotated(prompt + 64 * 12, 1)
    row = coded_row(keys[:, :prompt], values[:, :prompt], bits)
    limits = row.keys.nbytes / prompt, row.values.nbytes / prompt
    for start in range(prompt, prompt + 64 * 12, 64):
        at = slice(start, start + 64)
        row = row.appended(keys[:, at], values[:, at], keys[:, at, 0], None)
        assert row.keys.nbytes / row.tokens <= limits[0]
        assert row.values.nbytes / row.tokens <= limits[1]


def test_tokens_get_the_classes_that_the_budget_leaves():
    rich = Spent(planes=(60, 40, 30, 20), counts=(64, 320, 960, 1856), others=0, heads=1, width=8, per_token=26.0)
    poor = Spent(planes=(60, 40, 30, 20), counts=(64, 320, 960, 1856), others=0, heads=1, width=8, per_token=25.72)
    wanted = grown_sizes(rich.counts, 64)
    assert affordable_sizes(rich.counts, 64, [(rich, 0)]) == wanted
    sizes = affordable_sizes(poor.counts, 64, [(rich, 0), (poor, 0)])
    assert sum(sizes) == 64
    assert sizes != wanted
    assert poor.allows(sizes, 0)
    assert not poor.allows((*sizes[:-2], sizes[-2] + 8, sizes[-1] - 8), 0)


def test_few_bits_correct_nothing():
    assert drift.corrections("keys", 64, 4, 100.0) == 0
    keys = rotated(400 + 128)
    codes = coded(keys[:, :400], (400,), torch.ones(1, HEADS, WIDTH, dtype=torch.long))
    grown = codes.appended(keys[:, 400:], (128,), torch.ones(HEADS, WIDTH), 0)
    assert grown.drift is None


def test_corrections_go_where_errors_cost():
    keys = rotated(400 + 64, speed=1e-2)
    codes = coded(keys[:, :400], (400,), torch.full((1, HEADS, WIDTH), 3))
    energy = torch.ones(HEADS, WIDTH)
    energy[:, 1] = 1e6
    assert (codes.appended(keys[:, 400:], (64,), energy, 1).drift.channels == 1).all()


def test_more_than_256_places_fit():
    assert drift.Drift.none(1, 256, 1, 1, torch.device("cpu")).channels.dtype == torch.uint8
    wide = drift.Drift.none(1, 257, 4, 1, torch.device("cpu"))
    assert wide.channels.dtype == wide.scales.dtype == torch.int16

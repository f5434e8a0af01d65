"""The arena's peers: each against a case by hand, and its stated bits against a plain count."""

from __future__ import annotations

import itertools
import math

import pytest

pytest.importorskip("transformers")

import torch
from torch import Tensor

from bench.arena.peers import aatc, block_gtq, hadamard, kivi, methods, oscar, rdkv, turboquant
from bench.arena.stored import Layer, Stored, between, in_16_bits
from grace_opt.errors import OptionError
from grace_opt.hf import CalibratedBasis
from grace_opt.hf.bases.basis import joint_basis

HEADS, GROUP, WIDTH, DEPTH, OUT = 2, 2, 64, 32, 24
#: 67 of the tokens are coded: two groups of 32, and one of 3.
TOKENS = 103
CODED = TOKENS - 36


def random_layer(index: int = 0, tokens: int = TOKENS, width: int = WIDTH, depth: int = DEPTH) -> Layer:
    """Return a layer whose channels differ in size and are not centred."""
    generator = torch.Generator().manual_seed(index)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    size = torch.linspace(0.2, 2, width)
    keys, values = normal(HEADS, tokens, width) * size + 1, normal(HEADS, tokens, depth)
    return Layer(index, keys, values, normal(HEADS, GROUP, tokens, width), 0.125, normal(HEADS, GROUP, depth, OUT))


def random_basis(layers: int = 2, width: int = WIDTH, depth: int = DEPTH) -> CalibratedBasis:
    """Return a basis whose shares differ between layers and heads."""
    generator = torch.Generator().manual_seed(5)

    def square(size: int) -> Tensor:
        part = torch.randn(HEADS, size, size, generator=generator, dtype=torch.float64)
        return part @ part.mT + 0.1 * torch.eye(size)

    rates = {
        index: torch.tensor([[6.0, 3.0, 1.0, 0.0], [7.0, 4.0, 2.0, 0.0]]) * (1 + index / 10) for index in range(layers)
    }
    return CalibratedBasis(
        keys={index: joint_basis(square(width), square(width)) for index in range(layers)},
        values={index: joint_basis(square(depth), square(depth)) for index in range(layers)},
        multipliers=torch.tensor([0.1, 1.0, 10.0, 100.0], dtype=torch.float64),
        key_rates=rates,
        value_rates=rates,
    )


@pytest.fixture(scope="module")
def layers() -> list[Layer]:
    return [random_layer(0), random_layer(1)]


@pytest.fixture(scope="module")
def basis() -> CalibratedBasis:
    return random_basis()


@pytest.fixture(scope="module")
def every(layers: list[Layer], basis: CalibratedBasis) -> dict[str, list[Stored]]:
    return {method.name: method.store(layers, basis) for method in methods()}


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).square().mean() / exact.square().mean())


# All of them


def test_names_are_unique_and_say_what_they_are() -> None:
    found = methods()
    assert len({method.name for method in found}) == len({method.title for method in found}) == len(found)
    assert all(method.family and "arXiv" in method.source for method in found)
    assert all("our implementation" in method.title for method in found)


@pytest.mark.slow
def test_every_method_stores_what_it_says_and_keeps_windows(every, layers: list[Layer]) -> None:
    for name, found in every.items():
        assert len(found) == len(layers)
        for layer, one in zip(layers, found, strict=True):
            places = [between(TOKENS)] * 2
            if "r128" in name:
                places = list(kivi.residual(TOKENS))
            elif name.endswith("own"):
                places = [between(TOKENS, *oscar.OWN_WINDOWS)] * 2
            assert one.compressed == tuple(inner.stop - inner.start for inner in places), name
            pairs = ((one.keys, layer.keys), (one.values, layer.values))
            spent = (one.key_bits, one.value_bits)
            for (read, exact), inner, bits in zip(pairs, places, spent, strict=True):
                assert read.shape == exact.shape, name
                assert read.dtype == torch.float32, name
                assert read.isfinite().all(), name
                assert torch.equal(read[:, : inner.start], exact[:, : inner.start]), name
                assert torch.equal(read[:, inner.stop :], exact[:, inner.stop :]), name
                assert bool(bits) == (inner.stop > inner.start), name
                if bits:
                    assert not torch.equal(read[:, inner], exact[:, inner]), name


def test_more_bits_store_better(every, layers: list[Layer]) -> None:
    for family in (
        "kivi-{}-g32",
        "kivi-{}-g128",
        "hadamard-{}",
        "turboquant-{}",
        "oscar-{}",
        "block-gtq-{}",
        "aatc-{}",
    ):
        errors, bits = [], []
        for width in (2, 3, 4):
            found = every[family.format(width)]
            errors.append(sum(relative(one.keys, layer.keys) for one, layer in zip(found, layers, strict=True)))
            bits.append(sum(one.key_bits + one.value_bits for one in found))
        assert errors[0] > 1.5 * errors[1] > 2.25 * errors[2], family
        assert bits[0] < bits[1] < bits[2], family


@pytest.mark.slow
def test_equal_input_gives_equal_bits(layers: list[Layer], basis: CalibratedBasis, every) -> None:
    for method in methods():
        again = method.store(layers, basis)
        assert all(torch.equal(a.keys, b.keys) for a, b in zip(again, every[method.name], strict=True)), method.name
        assert all(torch.equal(a.values, b.values) for a, b in zip(again, every[method.name], strict=True)), method.name


@pytest.mark.slow
def test_nothing_that_is_given_is_written_to(layers: list[Layer], basis: CalibratedBasis) -> None:
    before = [(layer.keys.clone(), layer.values.clone(), layer.queries.clone()) for layer in layers]
    for method in methods():
        method.store(layers, basis)
    for layer, copies in zip(layers, before, strict=True):
        found = layer.keys, layer.values, layer.queries
        assert all(torch.equal(one, copy) for one, copy in zip(found, copies, strict=True))


@pytest.mark.parametrize("tokens", [3, 36])
def test_a_prompt_of_windows_alone_stays_dense(tokens: int, basis: CalibratedBasis) -> None:
    layer = random_layer(tokens=tokens)
    for method in methods():
        (one,) = method.store([layer], basis)
        assert torch.equal(one.keys, layer.keys), method.name
        assert (one.key_bits, one.value_bits, one.compressed) == (0, 0, (0, 0)), method.name


def test_a_prompt_of_one_coded_token_is_stored(basis: CalibratedBasis) -> None:
    layer = random_layer(tokens=37)
    for method in methods():
        (one,) = method.store([layer], basis)
        assert one.keys.isfinite().all(), method.name
        assert one.values.isfinite().all(), method.name


def test_zeros_stay_zeros(basis: CalibratedBasis) -> None:
    layer = random_layer()
    layer = Layer(0, layer.keys * 0, layer.values * 0, layer.queries, layer.scaling, layer.output)
    for method in methods():
        (one,) = method.store([layer], basis)
        assert not one.keys.any(), method.name
        assert not one.values.any(), method.name


# KIVI


def test_affine_by_hand() -> None:
    found = kivi.affine(torch.tensor([[0.0, 1.0, 2.0, 9.0]]), 2)
    assert found.tolist() == [[0, 0, 3, 9]]  # steps of 3: 1 / 3 is nearest to 0, 2 / 3 to 1
    assert kivi.affine(torch.tensor([[-1.0, 6.0]]), 3).tolist() == [[-1, 6]]
    assert kivi.affine(torch.tensor([[2.5, 2.5]]), 2).tolist() == [[2.5, 2.5]]


def test_steps_and_lowest_levels_are_kept_in_16_bits() -> None:
    exact = torch.tensor([[0.1, 0.7]])
    lowest, step = (float(torch.tensor(number).half()) for number in (0.1, 0.2))
    assert kivi.affine(exact, 2).tolist()[0] == pytest.approx([lowest, lowest + 3 * step], abs=1e-7)
    assert float(in_16_bits(torch.tensor(1e9))) == 65504


def test_keys_are_grouped_along_tokens_and_values_along_channels() -> None:
    channels = torch.randn(1, 1, 8).expand(1, 40, 8)  # every token is the same
    assert relative(kivi.per_channel(channels, 2, 32)[0], channels) < 1e-6
    assert relative(kivi.per_token(channels, 2, 32)[0], channels) > 1e-3
    tokens = channels.mT.contiguous()  # every channel is the same
    assert relative(kivi.per_token(tokens, 2, 32)[0], tokens) < 1e-6
    assert relative(kivi.per_channel(tokens, 2, 32)[0], tokens) > 1e-3


def test_groups_do_not_see_each_other() -> None:
    tokens = torch.zeros(1, 5, 1)
    tokens[0, :, 0] = torch.tensor([0.0, 1.0, 0.0, 1.0, 100.0])
    assert kivi.per_channel(tokens, 1, 2)[0][0, :, 0].tolist() == [0, 1, 0, 1, 100]
    assert kivi.per_channel(tokens, 1, 5)[0][0, :, 0].tolist() == [0, 0, 0, 0, 100]


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_bits_of_kivi(every, bits: int) -> None:
    for tokens, channels in kivi.GROUPS:
        one = every[f"kivi-{bits}-g{tokens}"][0]
        groups = math.ceil(CODED / tokens) * WIDTH * HEADS
        assert one.key_bits == bits * CODED * WIDTH * HEADS + groups * (16 + 16)
        groups = math.ceil(DEPTH / channels) * CODED * HEADS
        assert one.value_bits == bits * CODED * DEPTH * HEADS + groups * (16 + 16)


def test_kivi_has_windows_of_its_own() -> None:
    layer = random_layer(tokens=300)
    (one,) = kivi.store([layer], None, bits=2, groups=(32, 32), own_windows=True)
    assert one.compressed == (256, 172)
    assert one.key_bits == (2 + 1) * 256 * WIDTH * HEADS
    assert not torch.equal(one.keys[:, :4], layer.keys[:, :4])  # no sinks


# Hadamard


def test_blocks_of_llama_cpp_by_hand() -> None:
    block = torch.tensor([[8.0, -4.0, 1.4, -8.0, 0.0]])  # the first largest entry is code 0, a step is -1
    assert hadamard.symmetric(block, 4).tolist() == [[8, -4, 1, -7, 0]]
    assert hadamard.symmetric(torch.tensor([[-4.0, 3.2, -0.4]]), 3).tolist() == [[-4, 3, 0]]
    assert hadamard.symmetric(torch.tensor([[2.0, -0.6, -2.0]]), 2).tolist() == [[2, -1, -1]]
    assert hadamard.symmetric(torch.zeros(1, 4), 4).tolist() == [[0, 0, 0, 0]]


def test_hadamard_matrices() -> None:
    for width, largest, size in ((64, None, 64), (128, 64, 64), (96, None, 32), (128, None, 128)):
        turn = hadamard.rotation(width, largest)
        assert torch.allclose(turn @ turn, torch.eye(width), atol=1e-5)
        assert torch.equal(turn, turn.T)
        assert torch.allclose(turn[0].abs(), (torch.arange(width) < size).float() / size**0.5)
    with pytest.raises(OptionError, match="blocks of 32 channels, and the heads have 80"):
        hadamard.store([random_layer(width=80)], None, bits=4)


def test_an_outlier_channel_is_spread() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(1, 200, 64, generator=generator)
    tokens[..., 7] *= 30
    exact = tokens[..., :7]
    turned, _ = hadamard.rotated(tokens, 4)
    plain = hadamard.symmetric(tokens.unflatten(-1, (2, 32)), 4).flatten(-2)
    assert relative(turned[..., :7], exact) < 0.5 * relative(plain[..., :7], exact)


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_bits_of_hadamard(every, bits: int) -> None:
    one = every[f"hadamard-{bits}"][0]
    assert one.key_bits == CODED * HEADS * (bits * WIDTH + 2 * 16)
    assert one.value_bits == CODED * HEADS * (bits * DEPTH + 16)


# TurboQuant


@pytest.mark.slow
def test_levels_of_a_coordinate_on_the_sphere() -> None:
    # In three dimensions it is uniform between -1 and 1 (Archimedes).
    assert turboquant.levels(3, 2).tolist() == pytest.approx([-0.75, -0.25, 0.25, 0.75], abs=1e-5)
    for width in (8, 64, 128):
        mean = math.gamma(width / 2) / math.sqrt(math.pi) / math.gamma((width + 1) / 2)  # of the magnitude
        assert turboquant.levels(width, 1).tolist() == pytest.approx([-mean, mean], rel=1e-5)
    wide = turboquant.levels(2000, 2) * 2000**0.5
    assert wide.tolist() == pytest.approx([-1.510, -0.4528, 0.4528, 1.510], rel=2e-3)  # Max (1960)
    for bits in (3, 4, 7):
        assert len(turboquant.levels(64, bits).unique()) == 2**bits


def test_turboquant_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turboquant, "rotation", lambda width, seed: torch.eye(width))
    tokens = torch.tensor([[[4.0, 0.0, 3.0], [0.0, 0.0, 0.0]]]) + torch.tensor([[[0.0, 1e-6, 0.0], [0.0, 0.0, 0.0]]])
    found, bits = turboquant.quantised(tokens, 2)
    assert found[0, 0].tolist() == pytest.approx([5 * 0.75, 5 * 0.25, 5 * 0.75], rel=1e-5)  # .8, 0 and .6 of 5
    assert found[0, 1].tolist() == [0, 0, 0]
    assert bits == 2 * 3 * 2 + 2 * 16


def test_turboquant_does_not_mind_directions() -> None:
    assert torch.allclose(turboquant.rotation(64) @ turboquant.rotation(64).T, torch.eye(64), atol=1e-5)
    axis = torch.zeros(1, 1, 64)
    axis[..., 0] = 3.0
    even = torch.full((1, 1, 64), 3 / 8)
    for tokens in (axis, even):  # the error of two bits is .117 of a Gaussian's square
        assert 0.05 < relative(turboquant.quantised(tokens, 2)[0], tokens) < 0.2


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_bits_of_turboquant(every, bits: int) -> None:
    one = every[f"turboquant-{bits}"][0]
    assert one.key_bits == CODED * HEADS * (bits * WIDTH + 16)
    assert one.key_bits / (CODED * HEADS * WIDTH) == bits + 0.25
    assert one.value_bits == CODED * HEADS * (bits * DEPTH + 16)


# OSCAR


def test_oscar_clips_each_token() -> None:
    tokens = torch.tensor([[[1.0, -2.0, 3.0, -4.0]]])
    assert oscar.clipped(tokens, 0.5).tolist() == [[[1, -2, 3, -3]]]
    assert oscar.clipped(tokens, 0.25).tolist() == [[[1, -2, 2, -2]]]
    assert oscar.clipped(tokens, 1.0).tolist() == tokens.tolist()


def test_rotation_of_oscar_by_hand() -> None:
    # Eigenvectors are the axes, of eigenvalues 2, 4, 1 and 3. In ascending order: axes 2, 0, 3, 1.
    turn = oscar.rotation(torch.diag(torch.tensor([2.0, 4.0, 1.0, 3.0])))
    one = torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    columns = torch.zeros(4, 4)
    columns[[2, 0, 3, 1]] = one
    # The largest (column 3) goes to place 0, the second (2) to place 2, the third (1) to place 1, the last to 3.
    expected = columns[:, [3, 1, 2, 0]]
    signs = (turn / expected)[:, :1]  # each eigenvector, and with it its row, has either sign
    assert torch.allclose(turn, expected * signs)
    assert torch.allclose(turn.abs(), torch.full((4, 4), 0.5))
    with pytest.raises(OptionError, match="a power of two, and these have 96"):
        oscar.rotation(torch.eye(96))


def test_oscar_reads_the_queries_moments_in_a_calibrated_basis() -> None:
    layer = random_layer()
    asked = layer.queries.flatten(1, 2).double()
    moments = asked.mT @ asked / asked.shape[1]
    made = random_basis(1)
    made = CalibratedBasis(
        {0: joint_basis(moments, torch.eye(WIDTH).expand(HEADS, -1, -1) + 0.0)},
        made.values,
        made.multipliers,
        made.key_rates,
        made.value_rates,
    )
    assert torch.allclose(oscar.key_moment(layer, made), moments.mean(0), atol=1e-4)
    assert torch.allclose(oscar.key_moment(layer, None), moments.mean(0))


def test_values_count_by_their_keys_energy() -> None:
    keys = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    values = torch.tensor([[[1.0, 2.0], [3.0, 0.0]]])
    layer = Layer(0, keys, values, torch.zeros(1, 1, 2, 2), 1.0, torch.zeros(1, 1, 2, 2))
    found = oscar.value_moment(layer, torch.diag(torch.tensor([3.0, 1.0])))  # weights 3 and 1
    assert found.tolist() == [[(3 * 1 + 9) / 4, 3 * 2 / 4], [3 * 2 / 4, 3 * 4 / 4]]


def test_bits_of_oscar(every, layers: list[Layer]) -> None:
    for bits in (4, 3, 2):
        one = every[f"oscar-{bits}"][0]
        assert one.key_bits == CODED * HEADS * (bits * WIDTH + 32)
        assert one.value_bits == CODED * HEADS * (bits * DEPTH + 32)
    (own,) = oscar.store([random_layer(tokens=400)], None, bits=2, own_windows=True)
    assert own.compressed == (80, 80)


# Block-GTQ


def test_pairs_are_what_rope_turns_together() -> None:
    queries, keys = torch.zeros(1, 2, 4), torch.zeros(1, 1, 4)
    queries[0, 0] = torch.tensor([1.0, 0.0, 2.0, 0.0])  # channels 0 and 2 are a pair
    keys[0, 0] = torch.tensor([0.0, 3.0, 0.0, 0.0])
    assert block_gtq.pair_scores(queries, keys).tolist() == [[(1 + 4) / 2 / 2, 9 / 2]]
    with pytest.raises(OptionError, match="pairs of channels, and the heads have 5"):
        block_gtq.pair_scores(torch.zeros(1, 1, 5), torch.zeros(1, 1, 5))


def test_greed_is_optimal() -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(3, 4, generator=generator).pow(4).double()
    found = block_gtq.greedy(scores, 3)
    assert found.sum(-1).tolist() == [12, 12, 12]
    every = torch.tensor([each for each in itertools.product(range(1, 9), repeat=4) if sum(each) == 12])
    loss = (scores[:, None] * 4.0**-every).sum(-1)
    assert torch.allclose((scores * 4.0**-found).sum(-1), loss.amin(-1))
    assert block_gtq.greedy(torch.tensor([[1e9, 1.0]]), 5).tolist() == [[8, 2]]


def test_block_gtq_keeps_norms_and_counts_one_per_width() -> None:
    tokens = random_layer().keys[:, :10]
    widths = torch.full((HEADS, WIDTH // 2), 2)
    widths[0, :8] = 5
    found, bits = block_gtq.coded(tokens, widths)
    channels = [*range(8), *range(32, 40)]
    for some in (channels, [place for place in range(64) if place not in channels]):
        exact, read = tokens[0][:, some], found[0][:, some]
        assert torch.allclose(read.norm(dim=-1), exact.norm(dim=-1), rtol=1e-3)
    assert relative(found[0][:, channels], tokens[0][:, channels]) < 0.01 < relative(found[1], tokens[1])
    assert bits == 10 * (16 * 5 + 48 * 2 + 2 * 16) + 10 * (64 * 2 + 16)


# RDKV


def test_water_filling_over_widths_is_optimal_where_it_stops() -> None:
    generator = torch.Generator().manual_seed(2)
    worth = torch.rand(2, 4, generator=generator).pow(6)
    errors = rdkv.KEY_ERRORS
    for mean in (1.0, 2.5, 4.0):
        found = rdkv.filled(worth, mean, errors)
        for head in range(2):
            taken = int(found[head].sum())
            assert taken <= 4 * mean
            best = min(
                sum(float(w) * errors[b] for w, b in zip(worth[head], each, strict=True))
                for each in itertools.product(errors, repeat=4)
                if sum(each) <= taken
            )
            mine = sum(float(w) * errors[int(b)] for w, b in zip(worth[head], found[head], strict=True))
            assert mine == pytest.approx(best, rel=1e-5)


def test_zero_points_are_whole_and_far_channels_survive() -> None:
    assert rdkv.affine(torch.tensor([[-1.0, 0.0, 2.0]]), 2).tolist() == [[-1, 0, 2]]
    assert rdkv.affine(torch.tensor([[-0.4, 2.6]]), 2).tolist() == [[0, 3]]  # the zero point .4 is rounded to 0
    far = torch.tensor([[10.0, 11.0, 13.0]])
    assert rdkv.affine(far, 2).tolist() == far.tolist()
    assert rdkv.affine(torch.tensor([[7.0, 7.0]]), 2)[0].tolist() == pytest.approx([7, 7], rel=1e-3)


def test_bits_of_rows_with_widths() -> None:
    rows, widths = torch.randn(1, 4, 10), torch.tensor([[0, 2, 8, 16]])
    found, bits = rdkv.mixed(rows, widths)
    assert bits == 10 * (2 + 8 + 16) + 2 * 32 + 4 * 2
    assert not found[0, 0].any()
    assert torch.allclose(found[0, 2:], rows[0, 2:], atol=0.02)
    assert torch.equal(found[0, 3], rows[0, 3].half().float())


def test_worth_of_tokens_and_channels() -> None:
    layer = random_layer(tokens=40)
    received = torch.zeros(HEADS, 40)
    for head, group, place in itertools.product(range(HEADS), range(GROUP), range(8, 40)):
        logits = 0.125 * layer.keys[head, : place + 1] @ layer.queries[head, group, place]
        received[head, : place + 1] += logits.softmax(-1)
    found = rdkv.token_worth(layer)
    assert torch.allclose(found[:, 10], received[:, 8:13].mean(-1), rtol=1e-4)
    first = received[:, [2, 1, 0, 1, 2]].mean(-1)  # neighbours are mirrored at the ends
    assert torch.allclose(found[:, 0], first, rtol=1e-4)
    channel = layer.queries[1, :, 8:, 3].square().mean() * layer.keys[1, :, 3].square().mean()
    assert rdkv.channel_worth(layer)[1, 3] == pytest.approx(float(channel), rel=1e-4)


# AATC


def test_rates_are_rounded_logarithms() -> None:
    losses = torch.tensor([64.0, 16.0, 4.0, 1.0, 1e-9], dtype=torch.float64)
    assert aatc.filled(losses, 6 / 5).tolist() == [3, 2, 1, 0, 0]
    assert aatc.filled(losses, 100.0).tolist() == [8] * 5
    generator = torch.Generator().manual_seed(3)
    many = torch.rand(500, generator=generator, dtype=torch.float64).pow(8)
    assert 1.98 < aatc.filled(many, 2.0).double().mean() <= 2.0


def test_steps_are_of_the_largest_entry() -> None:
    tokens = torch.tensor([[[4.0, -6.0, 9.0]]])
    eye, power = torch.eye(3, dtype=torch.float64)[None], torch.tensor([[1.0, 4.0, 1.0]], dtype=torch.float64)
    found, bits = aatc.coded(tokens, aatc.Channels(eye, power, power), torch.tensor([[1, 2, 0]]))
    # Divided by 1 and 2: 4 and -3; the channel without bits is no matter. Middles of the steps of ±4: 2; -3.
    assert found.tolist() == [[[2, -6, 0]]]
    assert bits == 1 + 2 + 16


def test_what_errors_cost_in_the_attention_output() -> None:
    layer = random_layer(tokens=70, width=4, depth=3)
    keys, values = aatc.channels_of(layer)
    asked = [69, 37, 5]
    cost_of_key, cost_of_value, power = torch.zeros(4), torch.zeros(3), []
    head = 1
    for place in asked:
        whole = torch.zeros(OUT)
        for every, group in itertools.product(range(HEADS), range(GROUP)):
            query = layer.queries[every, group, place]
            share = (0.125 * layer.keys[every, : place + 1] @ query).softmax(-1)
            out = layer.values[every, : place + 1] @ layer.output[every, group]
            whole += share @ out
            if every == head:
                felt = (share.square() * (out - share @ out).square().sum(-1)).sum()
                cost_of_key += felt * (0.125 * query @ keys.turn[head].float()).square() / 3
                rows = (values.turn[head].float().T @ layer.output[every, group]).square().sum(-1)
                cost_of_value += share.square().sum() * rows / 3
        power.append(float(whole.square().sum()))
    mean = sum(power) / 3
    assert torch.allclose(keys.weight[head].float(), cost_of_key / mean, rtol=1e-3)
    assert torch.allclose(values.weight[head].float(), cost_of_value / mean, rtol=1e-3)


def test_bits_of_aatc_are_of_all_layers_together(every) -> None:
    found = every["aatc-3"]
    codes = sum(one.key_bits + one.value_bits for one in found) - 2 * 2 * HEADS * CODED * 16
    assert 2.95 < codes / (2 * CODED * HEADS * (WIDTH + DEPTH)) <= 3


def test_peers_need_no_basis(layers: list[Layer]) -> None:
    for method in methods():
        assert len(method.store(layers[:1], None)) == 1

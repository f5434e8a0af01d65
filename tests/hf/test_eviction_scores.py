"""Which tokens each head keeps, against loops over plain numbers that know nothing of tensors."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grace_opt.errors import OptionError, ProblemError
from grace_opt.hf import CacheConfig
from grace_opt.hf.evict import received as received
from grace_opt.hf.evict.eviction import H2O, PyramidKV, SnapKV, StreamingLLM
from grace_opt.hf.evict.kept_tokens import kept_tokens, tokens_kept
from grace_opt.hf.evict.names import eviction_from_dict, eviction_named, eviction_to_dict

SCALING, LAYER, LAYERS = 0.7, 1, 3
ALL = [
    SnapKV(budget=9, window=4, kernel=3),
    SnapKV(budget=9, window=4, kernel=5, pooling="avg"),
    SnapKV(budget=4, window=4, kernel=1),
    PyramidKV(budget=9, window=3, kernel=3, beta=2),
    H2O(budget=9, window=4, observed=6),
    H2O(budget=9, window=None, observed=None),
    H2O(budget=9, window=0, observed=1),
    StreamingLLM(budget=9, sinks=3),
    StreamingLLM(budget=9, sinks=0),
]


def draw(length, padding=(0, 0), heads=2, group=2, seed=0, ties=False, dtype=torch.float64):
    """Queries of the whole prompt, keys, and which tokens are real; padding is loud."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(len(padding), heads * group, length, 4, generator=generator, dtype=dtype)
    keys = torch.randn(len(padding), heads, length, 4, generator=generator, dtype=dtype)
    if ties:  # few different keys, and queries that see no difference between most of them
        queries, keys = queries.round() * 0, keys.round()
    valid = torch.ones(len(padding), length, dtype=torch.bool)
    for row, count in enumerate(padding):
        valid[row, :count] = False
        queries[row, :, :count] = 30.0
        keys[row, :, :count] = 30.0
    return queries, keys, valid


def last(queries, method):
    """The queries that a method asks for."""
    needed = method.queries_needed
    return queries if needed is None else queries[:, :, max(queries.shape[2] - needed, 0) :]


# ------------------------------------------------------------------ the oracle: one row without padding, one KV head


def probabilities(query, keys, position, softcap):
    logits = [SCALING * sum(a * b for a, b in zip(query, key, strict=True)) for key in keys[: position + 1]]
    if softcap is not None:
        logits = [softcap * math.tanh(x / softcap) for x in logits]
    high = max(logits)
    powers = [math.exp(x - high) for x in logits]
    return [p / sum(powers) for p in powers] + [0.0] * (len(keys) - position - 1)


def attention_received(query_heads, keys, observed, softcap):
    """Per query head: what every key receives from the last queries."""
    length = len(keys)
    totals = []
    for queries in query_heads:
        total = [0.0] * length
        for position in range(max(length - observed, 0), length):
            total = [
                t + p for t, p in zip(total, probabilities(queries[position], keys, position, softcap), strict=True)
            ]
        totals.append(total)
    return totals


def pooled(values, kernel, pooling):
    side, found = kernel // 2, []
    for place in range(len(values)):
        near = values[max(place - side, 0) : place + side + 1]
        found.append(max(near) if pooling == "max" else sum(near) / kernel)
    return found


def expected_scores(method, query_heads, keys, softcap=None):
    length = len(keys)
    if isinstance(method, StreamingLLM):
        return [math.inf if place < method.sinks else float(place) for place in range(length)]
    if isinstance(method, SnapKV):
        always = method.window
        rows = attention_received(query_heads, keys, method.window, softcap)
        rows = [pooled(row[: max(length - always, 0)], method.kernel, method.pooling) for row in rows]
    else:
        always = method.budget // 2 if method.window is None else method.window
        rows = attention_received(query_heads, keys, length if method.observed is None else method.observed, softcap)
        rows = [row[: max(length - always, 0)] for row in rows]
    means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    return means + [math.inf] * min(always, length)


def check_scores(method, queries, keys, valid, softcap=None):
    found = method.scores(last(queries, method), keys, valid, SCALING, softcap)
    assert found.dtype == torch.float32
    assert found.shape == keys.shape[:3]
    group = queries.shape[1] // keys.shape[1]
    for row in range(keys.shape[0]):
        real = slice(0, None) if valid is None else slice(int((~valid[row]).sum()), None)
        assert torch.isneginf(found[row, :, : real.start]).all()
        for head in range(keys.shape[1]):
            heads = queries[row, head * group : (head + 1) * group, real].tolist()
            expected = expected_scores(method, heads, keys[row, head, real].tolist(), softcap)
            torch.testing.assert_close(found[row, head, real], torch.tensor(expected, dtype=torch.float32))


# --------------------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize("method", ALL, ids=str)
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_scores_are_those_of_the_loops(method, group, softcap):
    queries, keys, valid = draw(17, (0, 6), group=group)
    check_scores(method, queries, keys, valid, softcap)
    check_scores(method, queries, keys, None, softcap)


@settings(max_examples=40, deadline=None)
@given(
    method=st.one_of(
        st.builds(
            SnapKV,
            budget=st.integers(5, 9),
            window=st.integers(1, 5),
            kernel=st.sampled_from([1, 3, 5, 7]),
            pooling=st.sampled_from(["max", "avg"]),
        ),
        st.builds(
            H2O,
            budget=st.integers(5, 9),
            window=st.none() | st.integers(0, 5),
            observed=st.none() | st.integers(1, 20),
        ),
        st.builds(StreamingLLM, budget=st.integers(5, 9), sinks=st.integers(0, 5)),
    ),
    length=st.integers(1, 14),
    data=st.data(),
    seed=st.integers(0, 99),
)
def test_scores_of_any_length_and_padding(method, length, data, seed):
    padding = data.draw(st.tuples(st.integers(0, length - 1), st.integers(0, length - 1)))
    check_scores(method, *draw(length, padding, heads=1, seed=seed))


@pytest.mark.parametrize("method", ALL, ids=str)
def test_chunks_of_queries_change_nothing(method, monkeypatch):
    queries, keys, valid = draw(17, (0, 6))
    whole = method.scores(last(queries, method), keys, valid, SCALING)
    monkeypatch.setattr(received, "CACHED_LOGITS", 3 * keys.shape[2] * queries.shape[0] * queries.shape[1])
    torch.testing.assert_close(method.scores(last(queries, method), keys, valid, SCALING), whole)
    monkeypatch.setattr(received, "CACHED_LOGITS", 1)
    torch.testing.assert_close(method.scores(last(queries, method), keys, valid, SCALING), whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    queries, keys, valid = (t.to(dtype) if t.is_floating_point() else t for t in draw(17, (0, 6)))
    queries, keys = queries.clamp(-8, 8), keys.clamp(-8, 8)
    for method in ALL:
        found = method.scores(last(queries, method), keys, valid, SCALING)
        assert torch.equal(found, method.scores(last(queries.float(), method), keys.float(), valid, SCALING))


def test_more_queries_than_needed_are_not_read():
    queries, keys, valid = draw(17, (0, 6))
    for method in ALL:
        assert torch.equal(
            method.scores(queries, keys, valid, SCALING), method.scores(last(queries, method), keys, valid, SCALING)
        )


# ---------------------------------------------------------------------------------------------------- kept tokens


def expected_kept(method, scores, padded, length):
    """Of one head: by score, equal ones by position; then padding from its end."""
    count = method.tokens(LAYER, LAYERS, length)
    ranked = sorted(range(len(scores)), key=lambda place: (-scores[place], place))
    kept = [padded + place for place in ranked[:count]]
    return sorted(kept + list(range(padded))[padded - (count - len(kept)) :] if len(kept) < count else kept)


@pytest.mark.parametrize("method", ALL, ids=str)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("padding", [(0, 0), (0, 6), (9, 14)])
def test_kept_tokens_are_those_of_the_scores(method, ties, padding):
    queries, keys, valid = draw(17, padding, ties=ties)
    found = kept_tokens(method, last(queries, method), keys, valid, SCALING, LAYER, LAYERS)
    scores = method.scores(last(queries, method), keys, valid, SCALING)
    assert found.dtype == torch.int64
    for row, padded in enumerate(padding):
        for head in range(keys.shape[1]):
            assert found[row, head].tolist() == expected_kept(method, scores[row, head, padded:].tolist(), padded, 17)


@pytest.mark.parametrize("method", ALL, ids=str)
@pytest.mark.parametrize("padded", [1, 5, 7])
def test_a_padded_row_keeps_what_it_keeps_alone(method, padded):
    if isinstance(method, PyramidKV):
        method = SnapKV(budget=8, window=3, kernel=3)  # the same scores; its number of tokens depends on the length
    queries, keys, valid = draw(20, (0, padded), seed=padded)
    together = kept_tokens(method, last(queries, method), keys, valid, SCALING, LAYER, LAYERS)
    alone = queries[1:, :, padded:], keys[1:, :, padded:]
    expected = kept_tokens(method, last(alone[0], method), alone[1], None, SCALING, LAYER, LAYERS)
    assert torch.equal(together[1:] - padded, expected)


@pytest.mark.parametrize("method", ALL, ids=str)
def test_too_few_real_tokens_keep_the_last_padding_in_every_head(method):
    queries, keys, valid = draw(20, (0, 18))
    found = kept_tokens(method, last(queries, method), keys, valid, SCALING, LAYER, LAYERS)
    count = method.tokens(LAYER, LAYERS, 20)
    assert found[1].tolist() == [list(range(20 - count, 20))] * 2


def test_padding_that_a_scorer_forgot_still_goes_first():
    class Careless:
        queries_needed = 0

        def tokens(self, layer, layers, length):
            return 3

        def scores(self, queries, keys, valid, scaling, softcap=None):
            return torch.tensor([[[9.0, 9.0, -math.inf, -5.0, -math.inf, -4.0]]])

    valid = torch.tensor([[False, False, True, True, True, True]])
    found = kept_tokens(Careless(), torch.zeros(1, 1, 0, 4), torch.zeros(1, 1, 6, 4), valid, 1.0, 0, 1)
    assert found.tolist() == [[[2, 3, 5]]]


@pytest.mark.parametrize("method", ALL, ids=str)
def test_nothing_is_evicted_from_a_short_prompt(method):
    count = method.tokens(LAYER, LAYERS, 10_000)
    for length, kept in ((1, True), (min(count, method.budget), True), (max(count, method.budget) + 1, False)):
        queries, keys, valid = draw(length)
        found = kept_tokens(method, last(queries, method), keys, valid, SCALING, LAYER, LAYERS)
        assert (found is None) == kept


def test_of_equal_scores_the_lowest_position_stays():
    queries, keys, _ = draw(12, ties=True)
    found = kept_tokens(H2O(5, window=2, observed=2), queries[:, :, -2:], keys, None, SCALING, 0, 1)
    assert found[0, 0].tolist() == [0, 1, 2, 10, 11]


# -------------------------------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize(("budget", "window", "beta"), [(512, 32, 20), (128, 8, 1), (64, 64, 20), (96, 8, 3)])
@pytest.mark.parametrize("layers", [1, 2, 32, 33])
@pytest.mark.parametrize("length", [100, 600, 1000, 32_000])
def test_pyramid_budgets_fall_and_have_the_right_mean(budget, window, beta, layers, length):
    method = PyramidKV(budget, window, beta=beta)
    counts = [method.tokens(layer, layers, length) for layer in range(layers)]
    assert counts == sorted(counts, reverse=True)
    assert min(length, window) <= counts[-1] <= counts[0] <= length
    assert abs(sum(counts) / layers - min(budget, length)) <= 0.5
    if length > budget and beta == 1:
        assert len(set(counts)) == 1


def test_pyramid_budgets_by_hand():
    method = PyramidKV(budget=512, window=32, beta=20)  # 480 beside the window: from 960 - 24 to 24
    assert [method.tokens(layer, 3, 4000) for layer in range(3)] == [968, 512, 56]
    assert [method.tokens(layer, 3, 800) for layer in range(3)] == [800, 512, 224]


def test_other_budgets_do_not_depend_on_the_layer():
    for method in (SnapKV(), H2O(), StreamingLLM()):
        assert {method.tokens(layer, 8, 4000) for layer in range(8)} == {512}
        assert method.tokens(0, 8, 100) == 100


SHARES = st.fractions(min_value=Fraction(1, 1000), max_value=Fraction(999, 1000), max_denominator=1000)


@given(SHARES, st.integers(1, 5000))
def test_a_share_is_that_many_tokens_rounded_up_but_never_fewer_than_are_always_kept(share, length):
    exact = math.ceil(share * length)
    for method, always in (
        (SnapKV(budget=float(share), window=7), 7),
        (H2O(budget=float(share), window=5), 5),
        (H2O(budget=float(share), window=None), 1),
        (StreamingLLM(budget=float(share), sinks=3), 3),
    ):
        assert method.tokens(1, 3, length) == min(length, max(exact, always))
    assert H2O(budget=float(share), window=None).recent(length) == exact // 2
    pyramid = PyramidKV(budget=float(share), window=7)
    counted = PyramidKV(budget=min(max(exact, 7), length) if length > 7 else 7, window=7)
    assert [pyramid.tokens(layer, 3, length) for layer in range(3)] == [
        counted.tokens(layer, 3, length) for layer in range(3)
    ]


@pytest.mark.parametrize(("share", "of", "tokens"), [(0.07, 100, 7), (0.55, 100, 55), (0.1, 101, 11)])
def test_a_share_is_not_rounded_up_because_of_its_last_digit(share, of, tokens):
    assert StreamingLLM(budget=share).tokens(0, 1, of) == tokens


def test_a_share_leaves_what_stays_dense_and_one_group_more():
    keys = torch.randn(1, 1, 60, 4, generator=torch.Generator().manual_seed(0))

    def kept(length, budget, **dense):
        here = keys[:, :, :length]
        return kept_tokens(StreamingLLM(budget, sinks=1), here[:, :, :0], here, None, 1.0, 0, 1, first=2, **dense)

    assert kept(60, 0.5, last=8).shape[-1] == 30
    assert kept(60, 0.1, last=8).shape[-1] == 11  # 6 would be fewer than the 10 that stay dense
    assert tokens_kept(StreamingLLM(0.1, sinks=1), 0, 1, 60, 18) == kept(60, 0.1, last=8, count=18).shape[-1] == 18
    assert tokens_kept(StreamingLLM(0.1, sinks=1), 0, 1, 12, 18) == 12
    with pytest.raises(OptionError, match="nothing would be left to prune"):
        kept(60, 6, last=8)


@pytest.mark.parametrize(
    ("name", "means"),
    [("snapkv", SnapKV()), ("SnapKV", SnapKV()), ("pyramid-kv", PyramidKV()), ("h2o", H2O()), ("h2_o", H2O())]
    + [(name, StreamingLLM()) for name in ("streaming_llm", "streaming-llm", "StreamingLLM")],
)
def test_names_stand_for_the_defaults(name, means):
    assert eviction_named(name) == means
    assert CacheConfig(evict=name).evict == means
    assert CacheConfig.from_dict(json.loads(json.dumps(CacheConfig(evict=name).to_dict()))).evict == means


@pytest.mark.parametrize(("name", "near"), [("snapvk", "snapkv"), ("streaming", "streaming_llm"), ("xyz", None)])
def test_unknown_names_suggest_the_nearest(name, near):
    with pytest.raises(OptionError, match=f"^evict='{name}': write one of 'snapkv', 'pyramidkv', 'h2o'") as raised:
        CacheConfig(evict=name)
    assert ("Did you mean" in str(raised.value)) == (near is not None)
    assert str(raised.value).endswith("SnapKV(budget=0.25)" if near is None else f"Did you mean '{near}'?")


# ---------------------------------------------------------------------------------------------- files, bad input


@pytest.mark.parametrize(
    "method",
    [*ALL, SnapKV(budget=0.25), H2O(budget=np.float32(0.5)), SnapKV(), PyramidKV(), H2O(), StreamingLLM()],
    ids=str,
)
def test_through_json_and_back(method):
    back = eviction_from_dict(json.loads(json.dumps(eviction_to_dict(method))))
    assert back == method
    assert type(back) is type(method)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SnapKV(budget=0), ">= 1"),
        (lambda: SnapKV(budget=12.5), "integer >= 1; or a share of the prompt, more than 0 and less than 1"),
        (lambda: SnapKV(budget=1.0), "write budget=1 for one token, or leave the eviction out to keep all"),
        (lambda: SnapKV(budget=0.0), "or a share of the prompt, more than 0"),
        (lambda: SnapKV(budget=math.nan), "or a share of the prompt"),
        (lambda: SnapKV(keep=0.25), "For keep, write budget=, a number of tokens, or the share"),
        (lambda: SnapKV(budget=True), "integer"),
        (lambda: SnapKV(window=0), ">= 1"),
        (lambda: SnapKV(budget=16), "a budget of at least 32"),
        (lambda: SnapKV(kernel=4), "odd width, for instance 5"),
        (lambda: SnapKV(pooling="mean"), "'max' or 'avg'"),
        (lambda: PyramidKV(beta=0), ">= 1"),
        (lambda: PyramidKV(budget=16), "a budget of at least 32"),
        (lambda: PyramidKV().tokens(3, 3, 100), "0 <= layer < layers"),
        (lambda: H2O(window=600), "a budget of at least 600"),
        (lambda: H2O(window=-1), ">= 0"),
        (lambda: H2O(observed=0), ">= 1"),
        (lambda: StreamingLLM(sinks=-1), ">= 0"),
        (lambda: StreamingLLM(budget=2), "a smaller sinks"),
        (lambda: eviction_to_dict("snapkv"), "give one of SnapKV"),
        (lambda: eviction_from_dict({"budget": 4}), "with a name from 'snapkv'"),
        (lambda: eviction_from_dict("snapkv"), '"budget"'),
        (lambda: eviction_from_dict({"name": "h2o", "sinks": 4}), "its fields are"),
        (lambda: eviction_from_dict({"name": ["h2o"]}), "with a name from"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(OptionError, match=message):
        make()


@pytest.mark.parametrize("read", [eviction_from_dict, lambda values: CacheConfig(evict=values)])
def test_a_message_has_no_thousand_losses(read):
    with pytest.raises(OptionError) as caught:
        read({"name": "layer_budget", "evict": {"name": "h2o"}, "losses": {"losses": [[0.25] * 9] * 30}})
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("queries", "keys", "valid", "message"),
    [
        ((1, 4, 4, 8), (1, 2, 20, 8), (1, 19), r"expected bool \(1, 20\)"),
        ((1, 4, 4, 8), (2, 20, 8), None, "expected .B, H, S, d."),
        ((1, 4, 4, 8), (1, 2, 0, 8), None, "at least one token"),
        ((1, 3, 4, 8), (1, 2, 20, 8), None, "multiple of H"),
        ((1, 4, 4, 6), (1, 2, 20, 8), None, "expected .B, H_q, L, d."),
        ((2, 4, 4, 8), (1, 2, 20, 8), None, "expected .B, H_q, L, d."),
        ((1, 4, 3, 8), (1, 2, 20, 8), None, "the last 4"),
        ((1, 4, 21, 8), (1, 2, 20, 8), None, "at most 20"),
    ],
)
def test_tensors_that_do_not_fit(queries, keys, valid, message):
    valid = None if valid is None else torch.ones(valid, dtype=torch.bool)
    with pytest.raises(ProblemError, match=message):
        SnapKV(8, window=4).scores(torch.zeros(queries), torch.zeros(keys), valid, 1.0)


def test_a_mask_of_numbers_is_refused():
    queries, keys, valid = draw(20)
    with pytest.raises(ProblemError, match="expected bool"):
        kept_tokens(StreamingLLM(9), queries, keys, valid.long(), 1.0, 0, 1)


def test_all_queries_are_asked_for():
    queries, keys, _ = draw(20)
    with pytest.raises(ProblemError, match="the last 20"):
        H2O(9, window=None, observed=None).scores(queries[:, :, -8:], keys, None, 1.0)

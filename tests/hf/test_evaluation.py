"""What a smaller cache costs: metrics by hand and by torch, bits by plain counts, and what is refused."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from transformers import DynamicCache

from grace_opt.errors import EvaluationError, GraceError
from grace_opt.hf import H2O, CompressedCache, Quantize, SnapKV
from grace_opt.hf.tools.evaluation import (
    ask,
    compare_predictions,
    next_token_log_probs,
    score_answer,
    stated_bits,
    stored_bits,
)

from .conftest import build

TOKENS, WINDOW, SINKS = 150, 32, 4


def prompt(length: int = TOKENS) -> torch.Tensor:
    return torch.randint(2, 97, (1, length), generator=torch.Generator().manual_seed(0))


def filled(model, length: int = TOKENS, **settings) -> CompressedCache:
    """A cache after a prompt."""
    model.set_attn_implementation("grace_sdpa")
    cache = CompressedCache(model, recent_window=WINDOW, **settings)
    with torch.no_grad():
        model(prompt(length), past_key_values=cache)
    return cache


# Distributions


def test_differences_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    dense, other = (torch.randn(40, 7, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    following = torch.randint(0, 7, (39,), generator=generator)
    found = compare_predictions(other, dense, following)
    kl = torch.nn.functional.kl_div(other, dense, reduction="batchmean", log_target=True)
    assert found.kl == pytest.approx(float(kl))
    change = [torch.nn.functional.nll_loss(part[:-1], following) for part in (other, dense)]
    assert found.nll == pytest.approx(float(change[0] - change[1]))
    assert found.top1 == float((dense.argmax(-1) == other.argmax(-1)).double().mean())
    same = compare_predictions(dense, dense, following)
    assert (same.kl, same.top1, same.nll) == (0, 1, 0)


def test_differences_by_hand() -> None:
    dense = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.75, 0.0]], dtype=torch.float64).log()
    found = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]], dtype=torch.float64).log()
    expected = (0.5 * math.log(2) + 0.25 * math.log(0.5) + 0.75 * math.log(3)) / 2
    one = compare_predictions(found, dense, torch.tensor([0]))
    assert one.kl == pytest.approx(expected)  # what the dense cache makes impossible adds nothing
    assert one.top1 == 0  # the first of equal ones counts
    assert one.nll == pytest.approx(math.log(2))


def test_answers_by_hand() -> None:
    predicted = torch.tensor([[0.2, 0.8], [0.6, 0.4]]).double().log()
    likely, unlikely = (score_answer(predicted, torch.tensor(answer)) for answer in ([1, 0], [1, 1]))
    assert likely.nll == pytest.approx(-math.log(0.8 * 0.6))
    assert likely.exact
    assert unlikely.nll == pytest.approx(-math.log(0.8 * 0.4))
    assert not unlikely.exact


def test_an_answer_is_scored_at_its_own_places() -> None:
    model, ids = build("Llama"), prompt()
    text, question, answer = ids[:, :100], ids[:, 100:110], ids[:, 110:113]
    with torch.no_grad():
        whole = model(ids[:, :113]).logits[0].double().log_softmax(-1)
        cache = DynamicCache(config=model.config)
        model(text, past_key_values=cache)
    found = ask(model, cache, question, answer)
    expected = -float(sum(whole[place - 1, ids[0, place]] for place in range(110, 113)))
    assert found.nll == pytest.approx(expected, abs=1e-4)
    likeliest = whole[109].argmax().view(1, 1)
    again = DynamicCache(config=model.config)
    with torch.no_grad():
        model(text, past_key_values=again)
    assert ask(model, again, question, likeliest).exact


def test_what_cannot_be_compared_is_named() -> None:
    two = torch.full((2, 4), 0.25).log()
    for found, dense, following, message in (
        (two[:1], two[:1], [], "at least 2"),
        (two, two[:, :3], [0], "of shapes"),
        (two, two, [0, 1], "n - 1 following"),
        (two + 1, two, [0], "a row of found add up to 2.7"),
        (two, torch.zeros(2, 4), [0], "a row of dense add up to 4"),
        (two * torch.nan, two, [0], "add up to nan"),
    ):
        with pytest.raises(EvaluationError, match=message):
            compare_predictions(found, dense, torch.tensor(following, dtype=torch.int64))
    for predicted, answer in ((two, [1]), (two[:0], [])):
        with pytest.raises(EvaluationError, match="the same n, at least 1"):
            score_answer(predicted, torch.tensor(answer, dtype=torch.int64))
    model = build("Llama")
    for ids, message in (
        (prompt(1), "give at least two tokens"),
        (torch.ones(2, 8, dtype=torch.int64), r"of shape \(2, 8\): give int64 tokens, \(1, n\)"),
        ("text", "input_ids is str: give a tensor of tokens"),
    ):
        with pytest.raises(EvaluationError, match=message):
            next_token_log_probs(model, DynamicCache(config=model.config), ids)
    with pytest.raises(EvaluationError, match="the question or the answer has no tokens"):
        ask(model, DynamicCache(config=model.config), prompt(3), prompt(3)[:, :0])
    assert issubclass(EvaluationError, GraceError)


# Bits


def test_bits_of_pruned_keys_by_plain_count() -> None:
    found = stored_bits(filled(build("Llama"), ratio=0.5, sink_tokens=SINKS))
    old = TOKENS - WINDOW
    # Per head: 8 of 16 channels in 16 bits, and their indices in 64.
    assert found.key_bits == pytest.approx(8 + 8 * 64 / (16 * (old - SINKS)))
    assert found.value_bits == 16
    keys = 16 * 8 * (old - SINKS) + 8 * 64 + 16 * 16 * (WINDOW + SINKS)
    assert found.mean_bits == pytest.approx((keys + 16 * 16 * TOKENS) / (2 * 16 * TOKENS))
    assert found.share == found.mean_bits / 16


@pytest.mark.parametrize("eviction", [SnapKV(budget=60, window=WINDOW), H2O(budget=60, window=None, observed=None)])
def test_evicted_tokens_have_no_bits(eviction: SnapKV | H2O) -> None:
    found = stored_bits(filled(build("Llama"), method="think", ratio=0.0, evict=eviction))
    old, kept = TOKENS - WINDOW, 60 - WINDOW
    assert found.value_bits == pytest.approx(16 * kept / old)
    assert found.key_bits == pytest.approx((16 * 16 * kept + 32 * kept + 16 * 64) / (16 * old))


@pytest.mark.parametrize(
    "settings",
    [
        {"ratio": 0.5},
        {"method": "think", "ratio": 0.0, "quantize": Quantize(keys=4, values=4)},
        {"bits": 2.25, "basis": "none"},
        {"method": "think", "ratio": 0.0, "evict": SnapKV(budget=60, window=WINDOW)},
    ],
    ids=str,
)
def test_bits_of_all_tokens_are_those_of_the_report_of_a_model_in_16_bits(settings: dict) -> None:
    pytest.importorskip("optimum.quanto")
    bits = stored_bits(filled(build("Llama"), 300, **settings))
    half = filled(copy.deepcopy(build("Llama")).to(torch.bfloat16), 300, **settings)
    assert half.memory_report().mean_bits == pytest.approx(stored_bits(half).mean_bits)
    assert bits.mean_bits == pytest.approx(stored_bits(half).mean_bits, rel=0.02)  # roundings choose other codes
    report = half.memory_report()
    if report.bits is not None:
        assert (report.bits, report.key_bits) == pytest.approx((stored_bits(half).bits, stored_bits(half).key_bits))


@pytest.mark.parametrize("padding", [0, 150])
@pytest.mark.parametrize(
    "settings",
    [
        {"bits": 2.25, "evict": SnapKV(budget=200, window=WINDOW)},
        {"bits": 2.25, "dense_layers": 1},
        {"bits": 2.25},
        {"ratio": 0.5, "dense_layers": 1},
        {"ratio": 0.5, "evict": SnapKV(budget=100, window=WINDOW)},
    ],
    ids=str,
)
def test_share_is_that_of_a_dense_cache_of_a_model_in_16_bits(settings: dict, padding: int) -> None:
    model = copy.deepcopy(build("Llama")).to(torch.bfloat16)
    model.set_attn_implementation("grace_sdpa")
    cache = CompressedCache(
        model, recent_window=WINDOW, **({"basis": "none"} if "bits" in settings else {}), **settings
    )
    ids, mask = torch.cat([prompt(400)] * 2), torch.ones(2, 400, dtype=torch.long)
    mask[1, :padding] = 0
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    found, report = stored_bits(cache), cache.memory_report()
    assert found.share == pytest.approx(report.total_ratio)
    if "evict" in settings:  # evicted tokens are compressed ones; where the kept ones were is counted
        if "bits" in settings:
            coded = report.coded_key_bytes + report.coded_value_bytes + report.index_bytes - _class_bytes(cache)
            heads = report.all_elements // (2 * 400 * 2 * 16)  # of both layers
            assert found.bits == pytest.approx(8 * coded / (2 * heads * (400 - WINDOW - SINKS) * 2 * 16))
    elif "bits" in settings:
        assert found.bits == pytest.approx(report.bits)


def _class_bytes(cache: CompressedCache) -> int:
    """Bytes of classes, which the report has among the coded bytes and among the indices."""
    return sum(layer.compressed.sizes()["classes"] for layer in cache.layers)


def test_questions_leave_the_cache_as_it_is() -> None:
    model = build("Llama")
    for cache in (filled(model, bits=2.25, basis="none"), filled(model, ratio=0.5)):
        first = ask(model, cache, prompt(6), prompt(3))
        assert ask(model, cache, prompt(6), prompt(3)) == first
        assert cache.get_seq_length() == TOKENS
    with_history = DynamicCache(config=model.config)
    model(prompt(), past_key_values=with_history)
    with pytest.raises(EvaluationError, match=r"read the prompt within torch.no_grad\(\)"):
        ask(model, with_history, prompt(6), prompt(3))


def test_what_are_no_tokens_no_log_probabilities_or_no_cache_is_named() -> None:
    model = build("Llama")
    cache, logs = filled(model, ratio=0.5), torch.zeros(3, 5).log_softmax(-1)
    given = prompt(6)
    for wrong in (
        [1, 2],
        given[0].numpy(),
        given[0],
        given.float(),
        given.bool(),
        given - 90,
        given + 97,
        given.repeat(2, 1),
        None,
    ):
        for call in (
            lambda x: next_token_log_probs(model, cache, x),
            lambda x: ask(model, cache, x, given),
            lambda x: ask(model, cache, given, x),
        ):
            with pytest.raises(EvaluationError, match="give"):
                call(wrong)
    for empty in (None, DynamicCache, DynamicCache(config=model.config), CompressedCache(model, ratio=0.5), ()):
        with pytest.raises(EvaluationError, match="holds no tokens"):
            ask(model, empty, given, given)
    for following in ([0, 1], torch.tensor([0, -100]), torch.tensor([0, 5]), torch.tensor([0.0, 1.0]), None):
        with pytest.raises(EvaluationError, match="following"):
            compare_predictions(logs, logs, following)
        with pytest.raises(EvaluationError, match="answer"):
            score_answer(logs[:2], following)
    for wrong in (logs.numpy(), None, logs.half(), logs[0], logs.int()):
        with pytest.raises(EvaluationError, match="give"):
            compare_predictions(wrong, logs, torch.tensor([0, 1]))
        with pytest.raises(EvaluationError, match="give"):
            score_answer(wrong, torch.tensor([0, 1, 1]))
    with pytest.raises(EvaluationError, match="add up to"):
        score_answer(torch.randn(3, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1]))
    never = torch.tensor([[1.0, 0.0], [0.5, 0.5]]).log()
    with pytest.raises(EvaluationError, match="has probability 0"):
        compare_predictions(never, never, torch.tensor([1]))


def test_a_stated_count_by_hand() -> None:
    found = stated_bits(250, 150, (100, 100), 400)
    assert (found.bits, found.key_bits, found.value_bits, found.mean_bits) == (2.0, 2.5, 1.5, 9.0)
    assert stated_bits(0, 10, (100, 100), 200).key_bits == 0  # everything evicted


def test_what_is_not_compressed_is_refused() -> None:
    model = build("Llama")
    for cache in (
        filled(model, 20, ratio=0.5),  # all of it recent
        filled(model, 20, bits=2, basis="none"),
        CompressedCache(model, ratio=0.5),
    ):
        with pytest.raises(EvaluationError, match="this cache is dense"):
            stored_bits(cache)
    with pytest.raises(EvaluationError, match=r"16\.\d+ bits per element: this cache was not compressed"):
        stored_bits(filled(model, method="think", ratio=0.0))
    with pytest.raises(EvaluationError, match="DynamicCache is no CompressedCache"):
        stored_bits(DynamicCache(config=model.config))
    for given, message in (
        ((3200, 3200, (100, 100), 200), "32 bits per element"),
        ((1600, 1600, (100, 100), 200), "16 bits per element"),
        ((10, 10, (0, 100), 200), "0 elements of keys"),
        ((10, 10, (100, 101), 200), "compressed elements of 200"),
        ((math.nan, 10, (100, 100), 200), "key_bits=nan"),
        ((10, -1, (100, 100), 200), "value_bits=-1"),
        ((True, 1, (100, 100), 200), "key_bits=True"),
        ((10, 1, (100.5, 100), 200), r"elements\[0\]=100.5"),
        ((10, 1, (-100, 300), 400), r"elements\[0\]=-100"),
        ((10, 1, (100, 100), math.nan), "all_elements=nan"),
        ((10, 1, 100, 200), "elements=100: give two numbers"),
        ((10, 1, (1, 2, 3), 200), "give two numbers"),
    ):
        with pytest.raises(EvaluationError, match=message):
            stated_bits(*given)

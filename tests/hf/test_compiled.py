"""torch.compile of a model's forward pass: as many graphs as with transformers' own cache, and the same tokens."""

from __future__ import annotations

import pytest
import torch

from grace_opt.hf import CompressedCache, SnapKV, attach
from grace_opt.kernels._shared import threads
from tests.hf.conftest import OBSERVED, RECENT

WINDOWS = {"recent_window": RECENT, "observation_window": OBSERVED}
DENSE_GRAPHS = 3
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": 1000}


@pytest.fixture
def compiled(tiny, monkeypatch):
    """`compiled()`: a model whose forward pass is compiled, and a list that grows by one with every graph."""
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    def make(layers=2, **options):
        model = tiny(attention="sdpa", num_hidden_layers=layers)
        torch.compiler.reset()
        graphs.clear()
        monkeypatch.setattr(model, "forward", torch.compile(model.forward, backend=backend, **options))
        return model, graphs

    yield make
    torch.compiler.reset()


@pytest.mark.slow
def test_a_dense_cache_needs_three_graphs(compiled, prompt):
    """A prompt, a step, a step of any length."""
    model, graphs = compiled()
    for _ in range(2):
        model.generate(prompt, **GREEDY)
    assert len(graphs) == DENSE_GRAPHS


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"fused": False, "evict": SnapKV(budget=20, window=4)}])
def test_needs_as_few_graphs_with_two_layers(settings, compiled, tiny, prompt):
    plain = tiny(attention="sdpa")
    with attach(plain, ratio=0.75, **WINDOWS, **settings) as attached:
        expected = plain.generate(prompt, **GREEDY)
        mask = attached.cache.channel_mask().pruned
    model, graphs = compiled()
    with attach(model, ratio=0.75, **WINDOWS, **settings) as attached:
        for _ in range(2):
            assert torch.equal(model.generate(prompt, **GREEDY), expected)
            assert torch.equal(attached.cache.channel_mask().pruned, mask)
    assert 0 < len(graphs) <= DENSE_GRAPHS


@pytest.mark.slow
def test_of_candidates_beside_the_prompt_writes_the_greedy_text(compiled, tiny, prompt):
    ids = torch.cat([prompt[:1, :30], prompt[:1, 10:22]], dim=1)
    plain = tiny(attention="sdpa", num_hidden_layers=1)
    with attach(plain, ratio=0.75, **WINDOWS):
        expected = plain.generate(ids, **GREEDY)
    model, _ = compiled(layers=1)  # every number of candidates is a graph of its own
    with attach(model, ratio=0.75, **WINDOWS):
        assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=4, **GREEDY), expected)


@pytest.mark.parametrize("look", ["report", "crop", "select"])
@pytest.mark.slow
def test_of_the_prompt_alone_leaves_a_cache_that_prunes_whatever_comes_next(
    look, in_one_graph, tiny, prompt, continuation, close
):
    """Compression waits while the prompt is traced, and nobody sees that it did."""
    caches, logits = [], []
    model = tiny()
    for run in (model, in_one_graph(model)):
        cache = CompressedCache(model, ratio=0.5, **WINDOWS)
        with torch.no_grad():
            run(input_ids=prompt, past_key_values=cache)
            if look == "report":
                assert cache.memory_report().pruned_tokens == 32
            elif look == "crop":
                cache.crop(-3)
            elif look == "select":
                cache.batch_select_indices(torch.tensor([1, 0]))
            logits.append(model(continuation[:, 1:2], past_key_values=cache).logits)
        caches.append(cache)
    assert close(*logits)
    assert torch.equal(*[cache.channel_mask().pruned for cache in caches])


@pytest.mark.slow
def test_of_steps_codes_the_tokens_that_leave_the_window(tiny, close, monkeypatch):
    """Coding a block cannot be traced: the step with which one leaves the window ended in an error of torch."""
    monkeypatch.setattr(threads, "COMPILE_FROM", 0)
    model = tiny(num_hidden_layers=1)
    ids = torch.randint(3, 97, (1, 137), generator=torch.Generator().manual_seed(3))
    caches, logits = [], []
    torch.compiler.reset()
    for run in (model, torch.compile(model.forward, backend="eager")):
        cache, found = CompressedCache(model, bits=4, basis="none", recent_window=RECENT, tail_block=16), []
        with torch.no_grad():
            model(ids[:, :-17], past_key_values=cache)
            for token in ids[:, -17:].split(1, dim=1):
                found.append(run(input_ids=token, past_key_values=cache).logits)
        caches.append(cache)
        logits.append(torch.cat(found, dim=1))
    torch.compiler.reset()
    assert close(*logits)
    assert [cache.memory_report().waiting_tokens for cache in caches] == [16, 16]

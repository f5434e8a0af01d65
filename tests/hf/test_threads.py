"""Many threads generate on one model: each gets its own tokens and its own cache, also at first use."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from grace_opt.errors import CacheError
from grace_opt.hf import SnapKV, attach
from tests.hf.conftest import OBSERVED, RECENT

WINDOWS = {"recent_window": RECENT, "observation_window": OBSERVED}
OPTIONS = {"max_new_tokens": 6, "do_sample": False}
THREADS = 8


@pytest.fixture(autouse=True)
def switch_often():
    """Threads take turns after a few instructions rather than after 5 ms, so that what they share is found out."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def prompts():
    """Of lengths that tell them apart."""
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(3, 97, (1, 24 + 2 * i), generator=draw) for i in range(THREADS)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"evict": SnapKV(budget=20, window=4), "tail_block": 2}], ids=["plain", "evict"]
)
@pytest.mark.parametrize("extra", [{}, {"prompt_lookup_num_tokens": 3, "eos_token_id": 1000}], ids=["greedy", "lookup"])
def test_every_thread_has_its_own_tokens_and_cache(settings, extra, tiny):
    model, options = tiny(attention="sdpa"), {**OPTIONS, **extra}
    with attach(model, "grace", **WINDOWS, **settings) as attached:
        expected = [model.generate(ids, **options) for ids in prompts()]
        start = threading.Barrier(THREADS)

        def answer(number):
            ids, found = prompts()[number], []
            start.wait(60)
            for _ in range(3):
                found.append(model.generate(ids, **options))
                assert attached.cache.layers[0].prompt.declared == ids.shape[1], "another thread's cache"
            return found

        with ThreadPoolExecutor(THREADS) as pool:
            for number, found in enumerate(pool.map(answer, range(THREADS))):
                assert all(torch.equal(tokens, expected[number]) for tokens in found), number


def test_the_cache_of_a_thread_that_calls_nothing_is_the_latest_of_all(tiny):
    """As with a streamer: `generate` runs in a thread, and whoever reads the text asks for the cache."""
    model, ids = tiny(attention="sdpa"), prompts()
    with attach(model, "grace", **WINDOWS) as attached:
        for number in (2, 5):
            thread = threading.Thread(target=model.generate, args=(ids[number],), kwargs=OPTIONS, daemon=True)
            thread.start()
            thread.join(60)
            assert attached.cache.get_seq_length() == ids[number].shape[1] + 5
        model.generate(ids[0], **OPTIONS)
        assert attached.cache.get_seq_length() == ids[0].shape[1] + 5
    with attach(model, "grace", **WINDOWS) as attached, pytest.raises(CacheError, match="no cache yet"):
        _ = attached.cache


FIRST_USE = """
import sys, threading
import torch
torch.set_num_threads(1)
sys.setswitchinterval(1e-6)
from concurrent.futures import ThreadPoolExecutor
from tests.hf.conftest import build
from tests.hf.test_threads import OPTIONS, WINDOWS, prompts
model, ids = build("Llama"), prompts()
start = threading.Barrier(16)
def first(number):
    start.wait(60)
    from grace_opt.hf import attach
    method = ("grace", "mies", "local_search", "think")[number % 4]
    with attach(model, method, 0.5, **WINDOWS) as attached:
        return method, model.generate(ids[number % 8], **OPTIONS), attached.cache.channel_mask().pruned
with ThreadPoolExecutor(16) as pool:
    found = list(pool.map(first, range(16)))
assert "generate" not in vars(model) and model.config._attn_implementation == "sdpa"
from grace_opt.hf import attach
for number in range(8):  # those 8 later had the same method and prompt
    method = found[number][0]
    with attach(model, method, 0.5, **WINDOWS) as attached:
        expected = model.generate(ids[number], **OPTIONS)
    for same in (number, number + 8):
        assert found[same][0] == method
        assert torch.equal(found[same][1], expected), (same, method)
        assert torch.equal(found[same][2], attached.cache.channel_mask().pruned), (same, method)
print("done")
"""


@pytest.mark.slow
def test_first_use_from_sixteen_threads_with_a_block_each():
    """In a process of its own, where nothing has been imported, tried or compiled by an earlier test."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", FIRST_USE], cwd=root, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.endswith("done\n"), done.stderr

"""`start` and `stop` of what attach returns: for all threads, from any thread, each once, and the model is as found."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from grace_opt.errors import OptionError
from grace_opt.hf import Attached, attach
from grace_opt.hf.models import implementation
from tests.hf.test_blocks import OPTIONS, WINDOWS, Held, as_found, kept


@pytest.fixture
def model(tiny):
    return tiny(attention="sdpa")


@pytest.fixture(autouse=True)
def nothing_stays_open():
    yield
    assert not implementation._ACTIVE


def in_thread(call, *args, **options):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *args, **options).result(60)


def test_gives_the_tokens_of_a_block_in_every_thread(model, prompt):
    dense = model.generate(prompt, **OPTIONS)
    with attach(model, ratio=0.75, **WINDOWS):
        expected = model.generate(prompt, **OPTIONS)
    assert not torch.equal(expected, dense)
    attached = attach(model, ratio=0.75, **WINDOWS)
    assert attached.start() is attached
    assert torch.equal(model.generate(prompt, **OPTIONS), expected)
    assert torch.equal(in_thread(model.generate, prompt, **OPTIONS), expected)
    attached.stop()
    assert as_found(model)
    assert torch.equal(model.generate(prompt, **OPTIONS), dense)
    assert kept(attached) == 4, "the cache stays readable"


def test_once_more_is_refused_until_stopped(model, prompt):
    attached = attach(model, "grace", **WINDOWS).start()
    for again in (attached.start, attached.__enter__):
        with pytest.raises(OptionError, match=r"open already, or calls in it are still running; .* stop\(\) this one"):
            again()
    in_thread(attached.stop)
    assert as_found(model)
    attached.stop()
    attached.start().stop()
    with attached:  # and as a block
        model.generate(prompt, **OPTIONS)
    assert as_found(model)


def test_stopping_what_was_never_started_does_nothing(model):
    attached = attach(model, "grace", **WINDOWS)
    attached.stop()
    assert as_found(model)
    with attached:
        attached.stop()  # early, from inside the block
        assert as_found(model)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
def test_of_several_in_any_order_the_last_started_serves(order, model, prompt):
    every = {number: attach(model, kept_channels=4 + number, **WINDOWS).start() for number in range(3)}
    for number in order:
        in_thread(model.generate, prompt[:1], **OPTIONS)
        last = max(every)
        assert kept(every[last]) == 4 + last
        every.pop(number).stop()
    assert as_found(model)


def test_a_block_of_the_calling_thread_comes_first_and_leaves_the_others_alone(model, prompt):
    """The server's settings, for one call replaced by a thread's own; a later start does not reach into that block."""
    server = attach(model, kept_channels=4, **WINDOWS).start()
    with attach(model, kept_channels=6, **WINDOWS) as own:
        other = attach(model, kept_channels=8, **WINDOWS).start()
        model.generate(prompt[:1], **OPTIONS)
        in_thread(model.generate, prompt[:1], **OPTIONS)
        assert (kept(own), kept(other)) == (6, 8)
        other.stop()
    in_thread(model.generate, prompt[:1], **OPTIONS)
    assert kept(server) == 4
    server.stop()
    assert as_found(model)


def test_stopped_by_another_thread_a_running_call_goes_on_as_it_began(model, prompt):
    attached, streamer = attach(model, ratio=0.75, **WINDOWS).start(), Held()
    expected = model.generate(prompt[:1], **OPTIONS)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(model.generate, prompt[:1], streamer=streamer, **OPTIONS)
        assert streamer.begun.wait(60)
        attached.stop()
        assert "generate" not in vars(model), "new calls are dense"
        assert not as_found(model), "the running one still needs our attention"
        with pytest.raises(OptionError, match="calls in it are still running"):
            attached.start()
        streamer.go.set()
        assert torch.equal(running.result(60), expected)
    assert as_found(model)


@pytest.mark.slow
def test_of_threads_that_start_the_same_at_once_one_succeeds(model, monkeypatch):
    """Also if they meet where it is decided: between the question whether it is open and the change."""
    meet = threading.Barrier(8)

    class Slow(implementation.ImplementationOverride):
        def apply(self):
            with contextlib.suppress(threading.BrokenBarrierError):
                meet.wait(0.1)  # for the others, if they get here
            super().apply()

    monkeypatch.setattr(sys.modules[Attached.__module__], "ImplementationOverride", Slow)
    attached, ready = attach(model, "grace", **WINDOWS), threading.Barrier(8)

    def start(_):
        ready.wait(60)
        try:
            attached.start()
        except OptionError:
            return 0
        return 1

    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            meet.reset()
            assert sum(pool.map(start, range(8))) == 1
            list(pool.map(lambda _: attached.stop(), range(8)))
            assert as_found(model)

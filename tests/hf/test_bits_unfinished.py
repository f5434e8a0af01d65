"""A calibration that is stopped goes on where it was, to the same basis, bit for bit."""

from __future__ import annotations

import copy
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from grace_opt.hf import CompressedCache, attach, calibrate
from grace_opt.hf.bases import unfinished
from grace_opt.kernels._shared.switches import is_off
from tests import children
from tests.hf.matrix import model_of

TEXTS = 4


def texts(seed=0):
    """Of two lengths, so that they have different classes; one is too short to be read."""
    draw = torch.Generator().manual_seed(int(seed))
    return [torch.randint(3, 97, (length,), generator=draw) for length in (150, 30, 150, 230, 150)]


@pytest.fixture(autouse=True)
def keep_every_text(monkeypatch, switch):
    """In torch alone: for texts of a few hundred tokens, loops are compiled at some later call, and round otherwise."""
    switch("GRACE_OPT_LLVM", "0")
    monkeypatch.setattr(unfinished, "REST", 0)


class Whole(list):
    """Of the numbers that `advance` is called with, those of whole texts."""

    def append(self, done):
        if done == int(done):
            super().append(done)


def stopping(after, error=KeyboardInterrupt):
    """Return an `advance` that stops once so many texts are done."""

    def advance(done):
        if done == after:
            raise error

    return advance


@pytest.fixture
def whole():
    return calibrate.basis(model_of("Llama"), None, texts())


@pytest.mark.parametrize("kwargs", [{}, {"end_to_end": False}])
@pytest.mark.parametrize("after", [2, 3, 4])
def test_what_is_made_from_a_part_is_what_is_made_at_once(after, kwargs, tmp_path):
    model, path, read = copy.deepcopy(model_of("Llama")).train(), tmp_path / "part.safetensors", Whole()
    expected = calibrate.basis(model, None, texts(), **kwargs)
    with pytest.raises(KeyboardInterrupt) as caught:
        calibrate.basis(model, None, texts(), advance=stopping(after), checkpoint=path, **kwargs)
    assert f"{after - 1} of its {TEXTS} texts are kept" in caught.value.__notes__[0]
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation == "sdpa"
    assert list(tmp_path.iterdir()) == [path]
    made = calibrate.basis(model, None, texts(), advance=read.append, checkpoint=path, **kwargs)
    assert read == list(range(after, TEXTS + 2))  # the short one counts as done
    assert made.digest() == expected.digest()
    assert not list(tmp_path.iterdir())


def test_writing_takes_at_most_a_tenth_of_the_time(tmp_path, monkeypatch):
    """The sums of a large model take a second or two."""
    monkeypatch.setattr(unfinished, "REST", 10)
    now, write = [0.0], unfinished.FORMAT.write

    def slowly(*given):
        write(*given)
        now[0] += 1.0

    monkeypatch.setattr(unfinished, "seconds", lambda: now[0])
    monkeypatch.setattr(unfinished, "FORMAT", SimpleNamespace(write=slowly))
    part, kept = unfinished.Unfinished(tmp_path / "part.safetensors", {}), []
    for text in range(1, 10):
        now[0] += 4.0
        part.keep(text, {})
        kept.append(part.texts)
    assert kept == [1, 1, 1, 4, 4, 4, 7, 7, 7]


def test_nothing_is_kept_of_a_text_that_is_not_done(tmp_path):
    def stop(done):
        if done != int(done):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        calibrate.basis(model_of("Llama"), None, texts(), advance=stop, checkpoint=tmp_path / "part.safetensors")
    assert "nothing of it is kept" in caught.value.__notes__[0]


@pytest.mark.parametrize("what", ["damaged", "cut short", "another text", "another type", "another model", "no folder"])
def test_a_file_that_does_not_fit_is_not_read(what, whole, tmp_path):
    path = tmp_path / "part.safetensors"
    model = copy.deepcopy(model_of("Llama")).to(torch.float64 if what == "another type" else torch.float32)
    if what == "another model":
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
    with pytest.raises(KeyboardInterrupt):
        calibrate.basis(model, None, texts(what == "another text"), advance=stopping(4), checkpoint=path)
    content = bytearray(path.read_bytes())
    if what == "damaged":
        content[-100] ^= 1
    path.write_bytes(content[:-8] if what == "cut short" else content)
    if what == "no folder":
        path = tmp_path / "none" / "part.safetensors"
    read = Whole()
    made = calibrate.basis(model_of("Llama"), None, texts(), advance=read.append, checkpoint=path)
    assert read == list(range(1, TEXTS + 2))
    assert made.digest() == whole.digest()


def _killed(path):
    os.environ["GRACE_OPT_LLVM"] = "0"
    is_off.cache_clear()
    torch.set_num_threads(1)
    unfinished.REST = 0

    def advance(done):
        if done == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    calibrate.basis(model_of("Llama"), None, texts(), advance=advance, checkpoint=path)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")
def test_after_the_process_was_killed(whole, tmp_path):
    path, read = tmp_path / "part.safetensors", Whole()
    child = children.context().Process(target=_killed, args=(path,))
    child.start()
    child.join(300)
    assert child.exitcode == -signal.SIGKILL
    made = calibrate.basis(model_of("Llama"), None, texts(), advance=read.append, checkpoint=path)
    assert read == [3, 4, 5]
    assert made.digest() == whole.digest()


def test_other_threads_generate_meanwhile(monkeypatch):
    """Also while gradients are computed: then the attention was one that our caches cannot be read with."""
    model, gradients, answers = model_of("Llama"), torch.autograd.grad, []
    prompt = texts()[0][None, :120]
    with attach(model, bits=8, basis="none") as attached:
        expected = model.generate(prompt, max_new_tokens=4, do_sample=False)

    def answer():
        return model.generate(prompt, past_key_values=CompressedCache(model, bits=8, basis="none"), max_new_tokens=4)

    def meanwhile(*arguments):
        with ThreadPoolExecutor(1) as pool:
            answers.append(pool.submit(answer).result(timeout=300))
        return gradients(*arguments)

    monkeypatch.setattr(torch.autograd, "grad", meanwhile)
    calibrate.basis(model, None, texts()[:1])
    assert attached.cache.memory_report().pruned_tokens
    assert len(answers) == 1
    assert all(torch.equal(each, expected) for each in answers)

"""Every warning of the library points at the line of the user's that led to it, however deep it arose.

A list of calls, each of which lets one place warn; a place without a call here is named by the last test.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from transformers import DynamicCache, pipeline

import grace_opt
from grace_opt import registry
from grace_opt._util import warning
from grace_opt._util.warning import users_line, warn
from grace_opt.errors import CalibrationError
from grace_opt.hf import PromptStore, attach, calibrate, learn_masks, read_prompt
from grace_opt.hf.bases import at_hand
from grace_opt.hf.bases.calibrated import CalibratedBasis
from grace_opt.hf.models import POCKET_BASIS, POCKET_FOLDER, load_model, load_pocket
from grace_opt.kernels._shared import disk_cache, dispatch

ROOT = Path(grace_opt.__file__).parent
#: By the place that warns, as a file and a function: what lets it.
CALLS: dict[str, list[Callable[..., None]]] = {}


def of(place: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Note a call that lets a place warn; its line ends in "# here"."""

    def note(call: Callable[..., None]) -> Callable[..., None]:
        CALLS.setdefault(place, []).append(call)
        return call

    return note


@functools.cache
def pocket() -> Any:
    return load_pocket()


def few(count: int) -> Any:
    """That many tokens, as generate() takes them."""
    ids = torch.arange(3, 3 + count)[None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 1, "pad_token_id": 0}


@of("registry/methods.py:_load")
def a_plug_in_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("other", "a_module_that_is_not_there", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry.methods, "entry_points", lambda group: [point])
    monkeypatch.setattr(registry.methods, "_broken_entry_points", {})
    monkeypatch.setattr(registry.methods, "_loaded", False)
    grace_opt.solve(np.eye(3), 1, "mies")  # here


@of("kernels/_shared/disk_cache.py:_say")
def no_folder_for_compiled_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(disk_cache, "_said", False)
    monkeypatch.setattr(disk_cache, "_Cache", refuse)
    loop = numba.njit(lambda n: n + 1)
    loop._cache = disk_cache.cache_of(few)
    loop(1)  # here


@of("kernels/_shared/dispatch.py:_refused")
def a_kernel_that_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_machines", {}), ("_verdicts", {}), ("_said", set()), ("DEVICE_TYPE", "cpu")):
        monkeypatch.setattr(dispatch, name, value)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    grace_opt.solve(torch.eye(12).expand(2, 12, 12), 5, "mies")  # here


@of("hf/bases/calibrate.py:basis")
def a_basis_of_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.arange(3, 90).repeat(4)
    calibrate.basis(pocket()[0], None, [ids[:200]], end_to_end=False)  # here


@of("hf/bases/at_hand.py:_warn_not_kept")
def a_basis_that_cannot_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*_: Any) -> None:
        raise CalibrationError("a folder is a file.")

    monkeypatch.setattr(at_hand.basis_folder, "folder", nowhere)
    monkeypatch.setattr(at_hand, "_WARNED", type(at_hand._WARNED)())
    monkeypatch.setattr(at_hand, "_made_now", lambda *_: CalibratedBasis.load(POCKET_BASIS))
    model = load_pocket()[0]
    with attach(model):  # here
        model.generate(**few(150))


@of("hf/bases/block_bases.py:kept_in_block")
def weights_that_change_inside_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_pocket()[0]
    with attach(model, basis=POCKET_BASIS):
        model.generate(**few(150))
        with torch.no_grad():
            next(model.parameters()).add_(1)
        model.generate(**few(150))  # here


@of("hf/bases/at_hand.py:_beside_weights")
def a_basis_of_the_models_that_is_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(tempfile.mkdtemp()) / "pocket"
    shutil.copytree(POCKET_FOLDER, folder)
    (folder / POCKET_BASIS.name).write_bytes(b"no basis")
    monkeypatch.setattr(at_hand, "_made_now", lambda *_: CalibratedBasis.load(POCKET_BASIS))
    model, _ = load_model(str(folder))
    with attach(model):
        model.generate(**few(150))  # here


@of("hf/bases/guard.py:check")
def a_prompt_unlike_the_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    basis, file = CalibratedBasis.load(POCKET_BASIS), Path(tempfile.mkdtemp()) / "wrong.safetensors"
    replace(basis, keys={0: basis.keys[1], 1: basis.keys[2], 2: basis.keys[0]}).save(file)
    with attach(pocket()[0], bits=2, basis=file):
        pocket()[0].generate(**few(150))  # here


@of("hf/engine/layer.py:_announce")
def a_prompt_too_short_for_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pocket()[0]
    with attach(model, bits=2, basis=POCKET_BASIS):
        model.generate(**few(50))  # here


@of("hf/engine/layer.py:_announce")
def a_prompt_too_short_in_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = pocket()
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    with attach(model, ratio=0.3):
        pipe("the quiet river", max_new_tokens=1)  # here


@of("hf/engine/layer.py:_announce")
def a_prompt_too_short_within_other_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pocket()[0]
    with attach(model, ratio=0.3):
        torch.no_grad()(functools.partial(model.generate, **few(20)))()  # here


@of("hf/engine/layer.py:_announce")
def a_row_too_short_for_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pocket()[0]
    given = few(150)
    mask = torch.ones(2, 150, dtype=torch.int64)
    mask[1, :90] = 0
    with attach(model, bits=3, basis=POCKET_BASIS):
        model.generate(**{**given, "input_ids": given["input_ids"].repeat(2, 1), "attention_mask": mask})  # here


@of("hf/engine/attach.py:_pruned")
def a_cache_that_nothing_is_put_into(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pocket()[0]
    plain = type(model).generate
    monkeypatch.setattr(type(model), "generate", lambda self, past_key_values=None, **rest: plain(self, **rest))
    with attach(model, ratio=0.3):
        model.generate(**few(50))  # here


@of("hf/engine/attach.py:_say_foreign")
def a_cache_of_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pocket()[0]
    with attach(model, ratio=0.3):
        model.generate(**few(50), past_key_values=DynamicCache(config=model.config))  # here


@of("hf/engine/kept_prompts.py:_loaded")
def a_stored_prompt_that_is_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    model, store = pocket()[0], PromptStore(tempfile.mkdtemp())
    read_prompt(model, few(300)["input_ids"], store, bits=3, basis=POCKET_BASIS)
    path = store.prompts()[0].path
    path.write_bytes(path.read_bytes()[:-1])
    with attach(model, bits=3, basis=POCKET_BASIS, prompts=store):
        model.generate(**few(300))  # here


@of("hf/engine/given_prompts.py:of_call")
def a_prompt_that_is_more_than_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pocket()[0]
    with attach(model, bits=3, basis=POCKET_BASIS, prompts=PromptStore(tempfile.mkdtemp())):
        model.generate(**few(300), position_ids=torch.arange(300)[None])  # here


@of("hf/engine/prompt_store.py:_say")
def a_prompt_that_is_too_large_for_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pocket()[0]
    with attach(model, bits=3, basis=POCKET_BASIS, prompts=PromptStore(tempfile.mkdtemp(), max_bytes=1)):
        model.generate(**few(300))  # here


@of("hf/engine/attach.py:__del__")
def a_block_that_is_never_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten = [attach(pocket()[0], ratio=0.3)]  # here
    forgotten.clear()


@of("hf/settings/bits.py:__post_init__")
def more_bits_than_a_code_has(monkeypatch: pytest.MonkeyPatch) -> None:
    attach(pocket()[0], bits=16, basis=POCKET_BASIS).start().stop()  # here


@of("hf/tools/learned/call.py:learn_masks")
def masks_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.arange(3, 90).repeat(2)
    learn_masks(pocket()[0], texts=[ids], tokens=64, windows=2, queries=8, recent_window=4, time_limit=1e-9)  # here


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str, int]]]:
    """Of every warning of the library: the place that warns, and the line that it points at."""
    found: list[tuple[str, str, int]] = []
    plain = warnings.warn_explicit

    def note(message: Any, category: Any, filename: str, lineno: int, *rest: Any, **others: Any) -> None:
        code = sys._getframe(2).f_code  # what called `warn`
        path = Path(code.co_filename)
        place = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
        found.append((f"{place}:{code.co_name}", filename, lineno))
        plain(message, category, filename, lineno, *rest, **others)

    monkeypatch.setattr(warnings, "warn_explicit", note)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        yield found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("place", "call"),
    [(place, call) for place, calls in CALLS.items() for call in calls],
    ids=lambda each: getattr(each, "__name__", "at"),
)
def test_points_at_the_callers_line(place: str, call: Callable[..., None], told: Any, monkeypatch: Any) -> None:
    lines, first = inspect.getsourcelines(call)
    here = [first + n for n, line in enumerate(lines) if line.rstrip().endswith("# here")]
    call(monkeypatch)
    assert [each for each in told if each[0] == place] == [(place, __file__, line) for line in here]


def test_from_another_thread_it_points_at_something() -> None:
    with warnings.catch_warnings(record=True) as found, ThreadPoolExecutor(1) as pool:
        warnings.simplefilter("always")
        pool.submit(warn, "slow").result()
    assert [str(each.message) for each in found] == ["slow"]


def test_the_filters_of_the_user_hold() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.resetwarnings()
        warnings.filterwarnings("default", category=UserWarning)
        for _ in range(3):
            warn("the same again")
        warnings.filterwarnings("error", module=__name__.rpartition(".")[2])
        with pytest.raises(UserWarning, match="at another line"):
            warn("at another line", at=users_line()._replace(number=1, module=__name__.rpartition(".")[2]))
    assert len(found) == 1


def test_every_place_that_warns_has_a_call() -> None:
    """And none warns in another way."""
    places = set()
    for folder in (ROOT, ROOT.parent / "solvers"):
        for file in folder.rglob("*.py"):
            if file == Path(warning.__file__) or (folder == ROOT and "solvers" in file.relative_to(ROOT).parts):
                continue
            for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if not isinstance(function, ast.FunctionDef):
                    continue
                for node in ast.walk(function):
                    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "warn":
                        places.add(f"{file.relative_to(folder)}:{function.name}")
            text = file.read_text(encoding="utf-8")
            assert "warnings.warn" not in text, f"{file}: write grace_opt._util.warning.warn"
            assert "stacklevel" not in text, file
    assert places == set(CALLS)

"""The benchmark of the first call, in small: what its processes print, and its page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from bench import first_call
from bench.first_call import CASES, MARK, ROOT


def test_the_readme_s_block_is_what_it_says() -> None:
    block = first_call.readme_block()
    assert "certify=True" in block
    assert "compare(W, k=6)" in block
    for code in first_call.children():
        compile(code, "child", "exec")
        assert MARK in code


@pytest.mark.slow
def test_seconds_are_those_of_the_process_or_its_own(tmp_path: Path) -> None:
    code = f"import os, time; time.sleep(0.2); print('{MARK} a', flush=True); print('{MARK} b took 0.5', flush=True)"
    found = first_call.run(code, ROOT, tmp_path)
    assert found["a"] > 0.2
    assert found["b"] == 0.5
    with pytest.raises(SystemExit, match="planted"):
        first_call.run("raise ValueError('planted')", ROOT, tmp_path)


@pytest.mark.parametrize("libraries", [("now", "wheel"), ("now",)])
def test_the_page(libraries: tuple[str, ...]) -> None:
    names = [f"{name}, {state}" for state in ("empty", "kept") for name in libraries]
    seconds = {
        case: {name: [place + at, place + at + 1.0, place + at + 4.0] for at, name in enumerate(names)}
        for place, case in enumerate(CASES)
    }
    value: dict[str, Any] = {"seconds": seconds, "load": 5.0, "rounds": 3}
    page = first_call.page(value)
    assert "busy (load 5)" in page.sure
    assert ("wheel" in page.found) == ("wheel" in page.headline) == ("wheel" in libraries)
    first_call.page(value | {"load": None})
    from matplotlib.figure import Figure

    page.draw(Figure())

"""The benchmark of `allocate`: its contenders agree on small instances, and its page says what was measured."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from bench import allocation as bench


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SIZES", (4, 8))
    monkeypatch.setattr(bench, "BATCH", 3)
    monkeypatch.setattr(bench, "FEW", 2)
    few = {bench.EXACT, bench.HIGHS}
    changed = {name: (run, 2 if name in few else 3) for name, (run, _) in bench.CONTENDERS.items()}
    monkeypatch.setattr(bench, "CONTENDERS", changed)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_contenders_agree_and_the_page_is_formed() -> None:
    rows = bench.measure(rounds=1)
    by = {(row["kind"], row["n"], row["method"]): row for row in rows}
    assert len(by) == len(rows) == 2 * 2 * 4
    for kind in bench.KINDS:
        for n in bench.SIZES:
            assert by[kind, n, bench.EXACT]["gap"] == pytest.approx(0, abs=1e-9)
            assert by[kind, n, bench.HIGHS]["gap"] == pytest.approx(0, abs=1e-6)
            assert by[kind, n, bench.EXACT]["proved"] == 1
            assert by[kind, n, bench.LAGRANGIAN]["gap"] <= by[kind, n, bench.BISECTION]["gap"] + 1e-12
    page = bench.page({"rows": rows, "rounds": 1})
    assert "certified" in page.found
    assert sum(bench.HIGHS in line for line in page.tables) == 4
    figure = Figure()
    page.draw(figure)
    assert len(figure.axes) == 2


@pytest.mark.usefixtures("small")
def test_a_bound_above_another_answer_stops_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arrays):
        f, bound, proved = bench.ours("lagrangian")(*arrays)
        return f, bound + 1.01 * np.abs(f), proved

    monkeypatch.setitem(bench.CONTENDERS, bench.LAGRANGIAN, (wrong, 3))
    with pytest.raises(SystemExit, match="a lower bound of allocate is above"):
        bench.measure(rounds=1)

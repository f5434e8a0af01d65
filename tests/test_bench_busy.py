"""`bench.busy` lets others spin and stops them, and counts what is lost as it says."""

from __future__ import annotations

import sys
import time

import psutil
import pytest

from bench import busy

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="stops processes by signals")


def status_of(process: psutil.Process, expected: str) -> str:
    for _ in range(6000):  # signals take a moment
        if process.status() == expected:
            break
        time.sleep(0.01)
    return process.status()


@pytest.mark.slow
def test_others_spin_when_told_and_are_gone_afterwards():
    with busy.spinning(2) as spin:
        others = [each for each in psutil.Process().children() if "while True" in " ".join(each.cmdline())]
        assert len(others) == 2
        for now, expected in ((False, psutil.STATUS_STOPPED), (True, psutil.STATUS_RUNNING)):
            spin(now)
            assert [status_of(other, expected) for other in others] == [expected] * 2
    assert not any(other.is_running() for other in others)


def numbers():
    """Others take half of the cores; loops lose nothing more, but in one case, and torch very much."""
    times = {}
    for case in busy.CASES:
        factor = {busy.PRODUCT: 100.0, busy.CASES[1]: 3.0}.get(case, 2.0)
        ways = zip((busy.QUIET, *busy.LOSSES), (1.0, factor, 1.0, 2.0), strict=True)
        times[case] = {way: [[0.001 * n * by, 0.002 * n] for n in (1, 2, 3)] for way, by in ways}
    return times


def test_losses_are_times_by_quiet_ones_and_the_share():
    rows = busy.summary(numbers())
    assert [row["case"] for row in rows] == list(busy.CASES)
    for row, expected in zip(rows, (1, 1.5, *[1] * 6, 50), strict=True):
        assert row[busy.BUSY]["share"] == pytest.approx(0.5)
        assert row[busy.BUSY]["loss"] == pytest.approx(expected)
        assert row[busy.MANY]["loss"] == pytest.approx(1)
        assert row[busy.BOTH]["loss"] == pytest.approx(1)
        assert row[busy.BUSY]["processor"] == pytest.approx(1)
        assert row["ms"][busy.QUIET] == pytest.approx(2)
    found = busy.page({"rounds": 3, "cores": 2, "rows": rows})
    assert "a factor of 1.5 (MIES with checks" in found.found
    assert "lose a factor of 50" in found.found
    assert sum(line.startswith("|") for line in found.tables) == 2 + len(busy.CASES) - 1


def test_whoever_hashes_waits_for_nobody(one_thread):
    assert len(busy.hashing()()) == 100

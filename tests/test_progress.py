"""Progress on stderr: a bar with the time left in a terminal, lines in a log, nothing for short work or on request.

The clock is held: nothing here takes as long as it says.
"""

from __future__ import annotations

import queue
import re
import sys

import pytest

from grace_opt._util import progress
from grace_opt._util.progress import TimeLeft, progress_bar
from grace_opt._util.quiet import quietly


class Clock:
    """Stands until it is turned; who waits for it is woken then, and is done with it when `turn` returns."""

    def __init__(self) -> None:
        self.now, self.waits = 0.0, queue.Queue()
        self._turned = queue.Queue()

    def pause(self, over, seconds):
        self.waits.put(seconds)
        return self._turned.get(timeout=60) or over.is_set()

    def turn(self, seconds, times=1):
        self.now += seconds
        for _ in range(times):
            self.waits.get(timeout=60)
            self._turned.put(False)
        asked = self.waits.get(timeout=60)  # it has written
        self.waits.put(asked)
        return asked

    def end(self):
        self._turned.put(True)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "seconds", lambda: clock.now)
    monkeypatch.setattr(progress, "pause", clock.pause)
    return clock


def test_what_comes_first_says_nothing_of_the_time_left(clock):
    """Four seconds of compiling, in the first hundredth of a calibration, were told as a quarter of an hour."""
    left = TimeLeft(6)
    left.now(0.0)
    clock.now = 4.0
    left.now(0.06)
    assert str(left) == ""
    clock.now = 6.0
    left.now(0.3)
    assert str(left) == ", about 2 min left"


def test_a_log_has_a_line_every_ten_seconds_with_what_is_left(clock, capsys):
    def said():
        return capsys.readouterr().err

    with progress_bar(None, 5, "texts") as show:
        clock.now = 3.0
        show("calibrating m", 1)  # one was done before: it says nothing about the time
        assert clock.turn(7.0) == 10.0
        assert said() == "grace_opt: calibrating m: 1 of 5 texts\n"
        clock.now = 23.0
        show("calibrating m", 2)
        clock.turn(0.0)
        assert said() == "grace_opt: calibrating m: 2 of 5 texts, about 60 s left\n"
        clock.turn(10.0)
        assert said() == "grace_opt: calibrating m: 2 of 5 texts, about 50 s left\n"
        show("calibrating m", 2.5)  # parts of a step count, and are not shown
        clock.turn(0.0)
        assert said() == "grace_opt: calibrating m: 2 of 5 texts, about 50 s left\n"
        clock.turn(1000.0)
        assert said() == "grace_opt: calibrating m: 2 of 5 texts, about 0 s left\n"
        assert clock.turn(0.0, times=30) > 10.0  # fewer lines later
        clock.end()
    assert "2 of 5" in said()


def test_short_work_has_no_line(clock, capsys):
    with progress_bar(None, 2, "texts") as show:
        show("calibrating", 1)
        clock.end()
    with progress_bar(None, 2) as show:  # of steps that have no time of their own
        show("tabu", 1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("how", ["False", "quietly", "closed"])
def test_nothing_is_said_on_request(how, clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress, "SECONDS_BEFORE_BAR", 0.0)
    if how == "closed":
        monkeypatch.setattr(sys, "stderr", None)
    if how == "quietly":
        with quietly(), progress_bar(None, 2, "texts") as show:
            show("calibrating", 1)
    else:
        with progress_bar(False if how == "False" else None, 2, "texts") as show:
            show("calibrating", 1)
    assert capsys.readouterr().err == ""


def test_the_bar_has_the_unit_and_the_time_left(clock, capsys):
    with progress_bar(True, 6, "texts") as show:
        show("calibrating", 0)
        clock.now = 15.0
        show("calibrating", 3)
    assert re.search(r"calibrating .* 3/6 texts, about 15 s left", " ".join(capsys.readouterr().err.split()))

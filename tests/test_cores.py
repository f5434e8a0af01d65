"""How many threads are worth starting: quotas of control groups, cores that others take, threads without a core."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from grace_opt._util import cores
from grace_opt.kernels._shared import threads
from grace_opt.parallel import map_in_threads
from tests.test_switches import case


def group(root: Path, place: str, **files: str) -> None:
    folder = root / place
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b": {"cpu__max": "150000 100000\n"}}, [1.5]),
        ("0::/a/b\n", {"a/b": {"cpu__max": "max 100000\n"}, "a": {"cpu__max": "400000 200000"}}, [2.0]),
        ("0::/\n", {"": {"cpu__max": "50000 100000\n"}}, [0.5]),
        ("0::/../outside\n", {"": {"cpu__max": "300000 100000\n"}}, [3.0]),
        (
            "5:memory:/x\n3:cpu,cpuacct:/x/y\n0::/\n",
            {"cpu,cpuacct/x": {"cpu__cfs_quota_us": "250000\n", "cpu__cfs_period_us": "100000\n"}},
            [2.5],
        ),
        (
            "1:cpu:/on/the/host\n",
            {"cpu": {"cpu__cfs_quota_us": "100000\n", "cpu__cfs_period_us": "50000\n"}},
            [2.0],
        ),
        ("1:cpu:/\n", {"cpu": {"cpu__cfs_quota_us": "-1\n", "cpu__cfs_period_us": "100000\n"}}, []),
        ("0::/a\n", {"a": {"cpu__max": "what is this\n"}}, []),
        ("0::/a:b\n", {"a:b": {"cpu__max": "100000 100000"}}, [1.0]),
    ],
)
def test_quotas_of_a_process_are_those_of_its_groups_and_all_above(groups, files, expected, tmp_path):
    (tmp_path / "cgroup").write_text(groups)
    for place, found in files.items():
        group(tmp_path / "fs", place, **found)
    assert list(cores._quotas(tmp_path / "cgroup", tmp_path / "fs")) == expected


def test_without_such_files_there_is_no_quota(tmp_path):
    assert list(cores._quotas(tmp_path / "none", tmp_path)) == []


def test_the_smallest_quota_holds(monkeypatch):
    for quotas, expected in (([3.0, 1.5, 2.0], 1.5), ([1.0], 1.0), ([], np.inf)):
        monkeypatch.setattr(cores, "_quotas", lambda groups, root, quotas=quotas: iter(quotas))
        assert cores._quota.__wrapped__() == expected


def test_cores_are_those_of_affinity_and_quota(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    for quota, expected in ((np.inf, 6), (2.0, 2), (1.5, 2), (0.2, 1), (64.0, 6)):
        monkeypatch.setattr(cores, "_quota", lambda quota=quota: quota)
        assert cores.cores() == expected
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(cores, "_quota", lambda: 3.0)
    assert [cores.thread_count(most) for most in (0, 1, 2, 3, 4, 9)] == [1, 1, 2, 3, 3, 3]
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS, Windows
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores.cores() == 1


class Times:
    """What a thread has run and waited, in a file as Linux has it, and the clock."""

    def __init__(self, path: Path) -> None:
        self.path, self.now, self.ran, self.waited = path, 100.0, 0.0, 0.0

    def go_on(self, seconds: float, *, ran: float, waited: float) -> None:
        self.now, self.ran, self.waited = self.now + seconds, self.ran + ran, self.waited + waited
        self.path.write_text(f"{round(1e9 * self.ran)} {round(1e9 * self.waited)} 7\n")


@pytest.fixture
def times(monkeypatch, tmp_path):
    made = Times(tmp_path / "schedstat")
    monkeypatch.setattr(cores, "OF_THIS_THREAD", made.path)
    monkeypatch.setattr(cores, "_of_thread", cores._Looks())
    monkeypatch.setattr(cores.time, "monotonic", lambda: made.now)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(cores, "cores", lambda: 2)
    return made


def test_cores_are_scarce_while_a_thread_waits_for_one(times):
    times.go_on(5, ran=3.0, waited=0.1)
    assert not cores.scarce()
    times.go_on(0.5, ran=0.02, waited=0.02)
    assert cores.scarce()
    times.go_on(cores.LOOK_AGAIN_AFTER / 2, ran=0.4, waited=0.0)  # too early to look again
    assert cores.scarce()
    times.go_on(cores.LOOK_AGAIN_AFTER, ran=0.4, waited=0.02)  # it counts what has been since the last look
    assert not cores.scarce()


def test_what_a_thread_waits_is_not_found_from_a_moment(times):
    """One that has slept for long has had no need for a core: the rest of what it sees tells."""
    times.go_on(1, ran=0.004, waited=0.004)
    assert not cores.scarce()
    times.go_on(1, ran=0.002, waited=0.002)
    assert cores.scarce()


def test_a_forked_process_counts_from_the_start(times):
    times.go_on(1, ran=100.0, waited=100.0)
    assert cores.scarce()
    times.go_on(2, ran=-99.0, waited=-100.0)
    assert not cores.scarce()


def test_each_thread_counts_for_itself(times):
    times.go_on(1, ran=1.0, waited=1.0)
    assert cores.scarce()
    times.go_on(0.01, ran=5.0, waited=-1.0)
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(cores.scarce).result()
    assert cores.scarce()


@pytest.mark.parametrize("text", [None, "", "one two three"])
def test_where_nothing_is_counted_cores_are_not_scarce(text, times):
    if text is not None:
        times.path.write_text(text)
    assert not cores.scarce()


def test_more_threads_than_cores_are_scarce_at_once(times, monkeypatch):
    times.go_on(1, ran=1.0, waited=0.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert cores.scarce()


@pytest.mark.skipif(not cores.OF_THIS_THREAD.exists(), reason="a system that does not count")
def test_linux_counts_what_this_thread_has_run():
    ran, waited, _ = map(int, cores.OF_THIS_THREAD.read_text().split())
    assert ran > 0
    assert waited >= 0


@pytest.mark.parametrize("which", ["taken", "few"])
def test_loops_do_not_wait_in_torchs_threads_where_cores_are_scarce(which, times, monkeypatch):
    """Its threads wait for each other in a loop; and the answer is the same, bit for bit."""
    from grace_opt.kernels.cache.decode import host

    teams = []
    monkeypatch.setattr(
        threads, "torch_team", lambda: lambda address, at: (teams.append(1), threads.CALLED(address)(at))
    )
    times.go_on(1, ran=1.0, waited=0.0)
    there = host.decode_attention(*case())
    assert teams == [1]
    if which == "taken":
        times.go_on(1, ran=0.5, waited=0.5)
    else:
        monkeypatch.setattr(cores, "cores", lambda: 1)
    assert torch.equal(host.decode_attention(*case()), there)
    assert teams == [1]


def test_nobody_waits_for_a_thread_that_has_no_core(monkeypatch):
    """What a thread has not begun is taken back, whoever was to do it; what it has begun is waited for."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(cores, "cores", lambda: 3)
    gate, here, done = threading.Event(), threading.get_ident(), []
    with ThreadPoolExecutor(1) as busy:
        monkeypatch.setattr(threads, "_pool", lambda count: busy)
        busy.submit(gate.wait)
        calling = threading.Thread(
            target=threads.split_batch,
            args=(lambda numbers: done.append((threading.get_ident(), numbers.tolist())), (np.arange(7),)),
        )
        calling.start()
        calling.join(60)
        still = calling.is_alive()
        gate.set()
        calling.join()
    assert not still, "it waits for a thread that has something else to do"
    assert sorted(number for _, numbers in done for number in numbers) == list(range(7))
    assert len({who for who, _ in done}) == 1
    assert here not in {who for who, _ in done}


def test_an_error_here_leaves_nothing_to_wait_for_that_has_not_begun(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(cores, "cores", lambda: 2)
    gate, done, said = threading.Event(), [], []

    def kernel(numbers):
        done.append(numbers.tolist())
        raise ZeroDivisionError

    def call():
        try:
            threads.split_batch(kernel, (np.arange(2),))
        except ZeroDivisionError as error:
            said.append(error)

    with ThreadPoolExecutor(1) as busy:
        monkeypatch.setattr(threads, "_pool", lambda count: busy)
        busy.submit(gate.wait)
        calling = threading.Thread(target=call)
        calling.start()
        calling.join(60)
        still = calling.is_alive()
        gate.set()
        calling.join()
    assert (still, done, len(said)) == (False, [[0]], 1)


def test_a_batch_has_no_more_threads_than_cores(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(cores, "cores", lambda: 2)
    inside, most, lock, both = [0], [0], threading.Lock(), threading.Barrier(2)

    def work(item):
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        both.wait(60)  # two at a time, and no more
        with lock:
            inside[0] -= 1
        both.wait(60)
        return item

    assert map_in_threads(work, range(8)) == list(range(8))
    assert most == [2]

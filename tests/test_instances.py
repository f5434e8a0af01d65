"""Instance files: round trips, the literature's text formats, and what is wrong with a broken one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grace_opt import ProblemError, instances, solve
from grace_opt.testing import instance

CLUSTER = "4 2 3\r\n1 2 0.500000 \r\n2 3 0.5\r\n3 4 0.500000\r\n"
MDP = "3 2\n0 1 1.5\n0 2 2.5\n1 2 0.5\n"


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors", ".csv", ".mtx"])
@given(seed=st.integers(0, 1000))
def test_round_trip(tmp_path_factory, suffix, seed):
    path = tmp_path_factory.mktemp("io") / f"w{suffix}"
    W = instance("wishart", 1 + seed % 7, seed)
    instances.write(path, W)
    assert np.array_equal(instances.read(path).W, W)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_k_travels_along(tmp_path, suffix):
    path = tmp_path / f"w{suffix}"
    W = np.stack([instance("wishart", 5, s) for s in range(3)])
    instances.write(path, W, [1, 2, 3])
    again = instances.read(path)
    assert again.k.tolist() == [1, 2, 3]
    assert np.array_equal(again.W, W)
    instances.write(path, W[0], 2)
    assert instances.read(path).k == 2


def test_k_cluster_and_mdplib(tmp_path):
    (tmp_path / "a.dat").write_text(CLUSTER, newline="")
    cluster = instances.read(tmp_path / "a.dat")
    assert cluster.k == 2
    assert float(solve(cluster.W, cluster.k, "exhaustive").objective) == -2.0  # one edge
    assert cluster.W.dtype.kind == "i"  # objectives differ by whole steps
    (tmp_path / "b.txt").write_text(MDP)
    mdp = instances.read(tmp_path / "b.txt")
    sol = solve(mdp.W, mdp.k, "exhaustive")
    assert (sol.indices.tolist(), float(sol.objective)) == ([0, 2], -5.0)


BROKEN = {
    "missing.npy": (None, "no instance file"),
    "w.xyz": (b"", "unknown kind '.xyz'"),
    "cut.npy": (b"\x93NUMPY\x01\x00v\x00{'descr'", "cannot be read"),
    "cut.npz": (b"PK\x03\x04", "cannot be read"),
    "noise.safetensors": (b"\xff" * 50, "cannot be read"),
    "empty.csv": (b"", "cannot be read"),
    "words.csv": (b"a,b\nc,d\n", "cannot be read"),
    "noise.mtx": (b"hello", "cannot be read"),
    "empty.dat": (b"", "first line"),
    "short.dat": (CLUSTER[:-20].encode(), "promises 3 lines"),
    "zero.dat": (CLUSTER.replace("1 2", "0 2").encode(), "1 to 4"),
    "far.txt": (MDP.replace("1 2 0.5", "1 3 0.5").encode(), "0 to 2"),
    "self.txt": (MDP.replace("1 2 0.5", "1 1 0.5").encode(), "two different"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(tmp_path, name):
    content, message = BROKEN[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ProblemError, match=message):
        instances.read(tmp_path / name)


def test_pickles_are_refused(tmp_path):
    np.save(tmp_path / "p.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ProblemError, match="cannot be read"):
        instances.read(tmp_path / "p.npy")


def test_writing_what_a_format_cannot_hold(tmp_path):
    W = np.eye(3)
    with pytest.raises(ProblemError, match="cannot write"):
        instances.write(tmp_path / "w.dat", W)
    with pytest.raises(ProblemError, match="no room for k"):
        instances.write(tmp_path / "w.csv", W, 2)
    with pytest.raises(ProblemError, match="one matrix"):
        instances.write(tmp_path / "w.mtx", np.stack([W, W]))
    np.savez(tmp_path / "two.npz", a=W, b=W)
    with pytest.raises(ProblemError, match="name the matrix 'W'"):
        instances.read(tmp_path / "two.npz")
    assert not [p for p in tmp_path.iterdir() if p.name != "two.npz"]

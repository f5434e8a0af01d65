"""Instance files: round trips, the literature's text formats, and what is wrong with a broken one."""

import gzip
import re

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from grace_opt import ChannelMask, Problem, instances, solve
from grace_opt.errors import OptionError, ProblemError
from grace_opt.testing import instance

CLUSTER = "4 2 3\r\n1 2 0.500000 \r\n2 3 0.5\r\n3 4 0.500000\r\n"
MDP = "3 2\n0 1 1.5\n0 2 2.5\n1 2 0.5\n"
CLIQUE = "c a path of three and a vertex alone\np edge 4 2\ne 1 2\ne 3 2\n"


@pytest.mark.slow
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
    "noise.mtx": (b"hello\n", "cannot be read"),
    "empty.dat": (b"", "first line"),
    "short.dat": (CLUSTER[:-14].encode(), "promises 3 lines"),
    "zero.dat": (CLUSTER.replace("1 2", "0 2").encode(), "1 to 4"),
    "far.txt": (MDP.replace("1 2 0.5", "1 3 0.5").encode(), "0 to 2"),
    "self.txt": (MDP.replace("1 2 0.5", "1 1 0.5").encode(), "two different"),
    "cut.txt": (MDP[:-8].encode(), "promises 3 lines.*found 2: truncated"),
    "more.dat": ((CLUSTER + "1 3 0.5\n").encode(), "promises 3 lines.*found 4: more than"),
    "zero-based.dat": (b"4 2 3\n0 1 .5\n1 2 .5\n2 3 .5\n", r"looks 0-based.*vertex 0.*add 1 to"),
    "one-based.txt": (b"3 2\n1 2 1.5\n1 3 2.5\n2 3 0.5\n", r"looks 1-based.*vertex 3.*take 1 from"),
    "zero-based.clq": (b"p edge 3 2\ne 0 1\ne 1 2\n", r"looks 0-based.*vertex 0"),
    "twice.dat": (CLUSTER.replace("\n2 3", "\n2 1").encode(), "pair [12] [12] appears twice"),
    "half.dat": (CLUSTER.replace("\n2 3", "\n2.5 3").encode(), "two different.*'2.5 3'"),
    "two.dat": (CLUSTER.replace("\n2 3", "\n23").encode(), "line 3 is '23 0.5': the k-cluster lines are 'i j weight'"),
    "big k.dat": (CLUSTER.replace("4 2 3", "4 5 3").encode(), "0 <= k <= n"),
    "nan.txt": (MDP.replace("2.5", "nan").encode(), "line 3: 'nan' is no weight: every weight must be finite"),
    "words.txt": (MDP.replace("2.5", "abc").encode(), "cannot be read"),
    "cut.clq": (CLIQUE[:-6].encode(), "promises 2 edges, found 1: truncated"),
    "no header.clq": (b"c nothing\n", "needs the line 'p edge n m'"),
    "edges first.clq": (b"e 1 2\np edge 2 1\n", "line 1: 'e 1 2' is none of"),
    "weights.col": (b"p col 2 1\nn 1 5\ne 1 2\n", "line 2.*vertex weights"),
    "far.clq": (CLIQUE.replace("e 3 2", "e 3 9").encode(), "1 to 4, found '3 9'"),
    "binary.clq": (b"p edge 2 1\n\xff\xfe", "cannot be read"),
    # Counted before any index is made: some machines would end the process for want of memory.
    "giant.mtx": (b"%%MatrixMarket matrix array real general\n10000000 10000000\n1\n", "promises 100000000000000 ent"),
    "half.mtx": (b"%%MatrixMarket matrix array real symmetric\n3 3\n1\n", "promises 6 entries"),
    "skew.mtx": (b"%%MatrixMarket matrix array real skew-symmetric\n3 3\n1\n", "promises 3 entries"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(tmp_path, name):
    content, message = BROKEN[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ProblemError, match=message):
        instances.read(tmp_path / name)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ProblemError, match="it is a folder; readable are"):
        instances.read(tmp_path)
    with pytest.raises(ProblemError, match="cannot write to a folder"):
        instances.write(tmp_path, np.eye(2))


def test_pickles_are_refused(tmp_path):
    objects = np.array([{}], dtype=object)
    np.save(tmp_path / "p.npy", objects, allow_pickle=True)
    np.savez(tmp_path / "p.npz", W=objects)
    for path in tmp_path.iterdir():
        with pytest.raises(ProblemError, match="holds Python objects, which are not loaded: save W as numbers"):
            instances.read(path)


def test_dimacs_is_the_complement(tmp_path):
    (tmp_path / "g.clq").write_text(CLIQUE)
    made = instances.read(tmp_path / "g.clq")
    assert made.W.tolist() == [[0, 0, 1, 1], [0, 0, 0, 1], [1, 0, 0, 1], [1, 1, 1, 0]]
    assert (made.W.dtype.kind, made.k, made.source) == ("i", None, "DIMACS")
    assert float(solve(made.W, 2, "exhaustive").objective) == 0  # an edge is a clique of two
    three = solve(made.W, 3, "exhaustive")
    assert (three.indices.tolist(), float(three.objective)) == ([0, 1, 2], 2)  # no triangle: one edge is missing
    assert made.describe(float(three.objective)) == "edges missing from a clique: 1"
    # Some colouring files list both directions; the header counts lines, or edges.
    both = CLIQUE.replace("p edge", "p col") + "e 2 1\ne 2 3\n"
    for number in (2, 4):
        (tmp_path / "g.col").write_text(both.replace("4 2", f"4 {number}"))
        assert np.array_equal(instances.read(tmp_path / "g.col").W, made.W)


@pytest.mark.slow
@given(n=st.integers(1, 12), seed=st.integers(0, 10**6), density=st.sampled_from([0.0, 0.3, 1.0]))
def test_round_trip_of_the_literatures_formats(tmp_path_factory, n, seed, density):
    folder = tmp_path_factory.mktemp("io")
    rng = np.random.default_rng(seed)
    A = np.triu(rng.random((n, n)) < density, 1).astype(np.int64)
    A, k = A + A.T, int(rng.integers(0, n + 1))
    d = np.triu(rng.normal(size=(n, n)) * 10.0 ** rng.integers(-9, 9), 1)
    files = {
        "a.dat": (-A, k),
        "a.txt": (-3 * A, k),
        "b.txt": (d + d.T, k),
        "a.clq": (A, None),
        "a.col": (A, None),
        "a.mtx": (A, None),
        "a.csv": (A, None),
    }
    for name, (W, given_k) in files.items():
        instances.write(folder / name, W, given_k)
        again = instances.read(folder / name)
        assert np.array_equal(again.W, W), name
        assert again.k == given_k
        if name not in ("b.txt", "a.csv"):
            assert again.W.dtype.kind == "i", name  # whole numbers stay whole
    assert {p.name for p in folder.iterdir()} == set(files)


def test_a_graph_in_a_mtx_file_is_its_own_adjacency(tmp_path):
    (tmp_path / "g.mtx").write_text("%%MatrixMarket matrix coordinate pattern symmetric\n3 3 2\n2 1\n3 2\n")
    made = instances.read(tmp_path / "g.mtx")
    assert made.W.tolist() == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
    assert made.W.dtype.kind == "i"


def test_objectives_in_the_sources_terms(tmp_path):
    (tmp_path / "a.dat").write_text(CLUSTER)
    (tmp_path / "b.txt").write_text(MDP)
    assert instances.read(tmp_path / "a.dat").describe(-58) == "edges: 29"
    assert instances.read(tmp_path / "b.txt").describe(-5.0) == "dispersion: 2.5"
    assert instances.read(tmp_path / "b.txt").describe(0.0) == "dispersion: 0"  # not -0
    instances.write(tmp_path / "w.npy", np.eye(2))
    assert instances.read(tmp_path / "w.npy").describe(1.0) is None


@pytest.mark.parametrize(
    ("name", "W", "k", "message"),
    [
        ("w.dat", -2 * (1 - np.eye(3)), 1, "as k-cluster: it has other entries.*W = -A"),
        ("w.dat", np.array([[0, -1], [0, 0]]), 1, "not symmetric"),
        ("w.txt", np.eye(3), 1, "as MDPLIB: its diagonal is not zero"),
        ("w.txt", np.array([[0, np.inf], [np.inf, 0]]), 1, "every weight must be finite"),
        ("w.clq", -(1 - np.eye(3)), None, "as DIMACS: it has other entries.*complement"),
        ("w.clq", 1 - np.eye(3), 1, "cannot store k"),
        ("w.dat", np.zeros((3, 3)), None, "states k in its first line"),
        ("w.txt", np.zeros((3, 3)), 4, "0 to 3"),
        ("w.txt", np.zeros((3, 3)), 1.5, "an integer"),
        ("w.csv", np.zeros(3), None, "square matrix"),
        ("w.col", np.zeros((2, 3, 3)), None, "one matrix"),
    ],
)
def test_what_the_literatures_formats_cannot_hold(tmp_path, name, W, k, message):
    with pytest.raises(ProblemError, match=message):
        instances.write(tmp_path / name, W, k)
    assert not list(tmp_path.iterdir())


def test_writing_what_a_format_cannot_hold(tmp_path):
    W = np.eye(3)
    with pytest.raises(ProblemError, match="cannot write"):
        instances.write(tmp_path / "w.dat", W)
    with pytest.raises(ProblemError, match="cannot store k"):
        instances.write(tmp_path / "w.csv", W, 2)
    with pytest.raises(ProblemError, match="one matrix"):
        instances.write(tmp_path / "w.mtx", np.stack([W, W]))
    np.savez(tmp_path / "two.npz", a=W, b=W)
    with pytest.raises(ProblemError, match="name the matrix 'W'"):
        instances.read(tmp_path / "two.npz")
    assert not [p for p in tmp_path.iterdir() if p.name != "two.npz"]


@pytest.mark.parametrize("k", [1.5, 2.0, np.nan, True, "2", [1.0], [True, False], [[0.5]], np.datetime64(1, "s")])
def test_a_k_that_is_no_integer_is_neither_read_nor_written(tmp_path, k):
    """1.5 was cut off to 1."""
    np.savez(tmp_path / "w.npz", W=np.eye(3), k=k)
    with pytest.raises(ProblemError, match=r"w\.npz: k has dtype .* must be an integer"):
        instances.read(tmp_path / "w.npz")
    for suffix in (".npz", ".safetensors", ".txt"):
        with pytest.raises(ProblemError, match="k "):
            instances.write(tmp_path / f"x{suffix}", np.zeros((3, 3)), k)
        assert not (tmp_path / f"x{suffix}").exists()


@pytest.mark.parametrize("k", [0, 2, np.int8(2), np.array(2), np.array([1, 2], np.uint8)])
def test_a_whole_k_is_read_as_it_is(tmp_path, k):
    W = np.stack([np.eye(3)] * 2)
    for name in ("w.npz", "w.safetensors"):
        instances.write(tmp_path / name, W, k)
        assert np.array_equal(instances.read(tmp_path / name).k, k)


def test_tensors_of_any_kind_are_written(tmp_path):
    """Those that need a gradient, are sparse or in bfloat16 were "nothing that numpy makes an array of"."""
    for tensor in (
        torch.eye(2).requires_grad_(),
        torch.eye(2).bfloat16(),
        torch.eye(2).to_sparse(),
        torch.eye(2).int(),
    ):
        instances.write(tmp_path / "w.npz", tensor)
        assert instances.read(tmp_path / "w.npz").W.tolist() == [[1, 0], [0, 1]]
    with pytest.raises(ProblemError, match=r"W has dtype complex64: give real numbers"):
        instances.write(tmp_path / "w.npz", torch.eye(2).to(torch.complex64))


@pytest.mark.parametrize("name", ["-", "/dev/stdin", "/dev/fd/0"])
def test_pipes_are_not_read(name):
    with pytest.raises(ProblemError, match=r"its name has no ending.*Pipes are not read: save what they bring"):
        instances.read(name)


def test_a_name_without_an_ending(tmp_path):
    with pytest.raises(ProblemError, match=r"w: its name has no ending, which says the kind; readable are .*\.$"):
        instances.read(tmp_path / "w")
    with pytest.raises(ProblemError, match=r"w: cannot write a file without an ending, which says the kind"):
        instances.write(tmp_path / "w", np.eye(2))
    with pytest.raises(ProblemError, match=r"cannot write '\.pdf'"):
        instances.write(tmp_path / "w.pdf", np.eye(2))


def test_numbers_that_are_read_as_others_are_explained(tmp_path):
    """A file has 1e400, and the error said inf."""
    for name in ("w.csv", "w.mtx"):
        instances.write(tmp_path / name, [[1.0, 7.0], [7.0, 1.0]])
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(re.sub(r"\b7(\.0)?\b", "1e400", text))
        with pytest.raises(
            ProblemError, match=r"line \d.*: '1e400' would become inf, as any number beyond 1\.8e308 does"
        ):
            instances.read(tmp_path / name)
    (tmp_path / "w.csv").write_text("0,inf\ninf,0\n")
    with pytest.raises(ProblemError, match=r"line 1, column 2: 'inf' is no weight: every weight must be finite"):
        instances.read(tmp_path / "w.csv")
    (tmp_path / "w.csv").write_text("2023,2024\n0,1\n1,0\n")
    with pytest.raises(
        ProblemError, match=r"3 rows, and one of 2 cells: .* names that are numbers, begin all with a name"
    ):
        instances.read(tmp_path / "w.csv")
    with pytest.raises(ProblemError, match=r"W\[.*\] is inf \(as any number beyond 1\.8e308 is\): every"):
        solve([[1.0, np.inf], [np.inf, 1.0]], 1)
    with pytest.raises(ProblemError, match=r"is nan: every weight"):
        solve([[1.0, np.nan], [np.nan, 1.0]], 1)
    (tmp_path / "w.csv").write_text(f"0,{2**53 + 1}\n{2**53 + 1},0\n")
    with pytest.raises(ProblemError, match=rf"give floats: W\.astype\(float\), or in a file {2**53 + 1}\.0\.$"):
        solve(instances.read(tmp_path / "w.csv").W, 1)
    for name, text in (("w.csv", f"0,{2**64 + 1}\n{2**64 + 1},0\n"), ("w.txt", f"2 1\n0 1 {2**64 + 1}\n")):
        (tmp_path / name).write_text(text)  # no integers of 64 bits, and once rounded without a word
        with pytest.raises(ProblemError, match=rf"{name} holds the integer {2**64 + 1}, beyond 2\*\*53"):
            instances.read(tmp_path / name)
    (tmp_path / "w.csv").write_text(f"0,{2**53 + 1}.0\n{2**53 + 1}.0,0\n")
    assert solve(instances.read(tmp_path / "w.csv").W, 2).objective == 2**54


@pytest.mark.parametrize("path", [None, 5, ["w.npy"]])
def test_what_is_no_name_of_a_file(path):
    for call in (instances.read, ChannelMask.load, lambda given: instances.write(given, np.eye(2))):
        with pytest.raises(OptionError, match="give the name of a file"):
            call(path)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors", ".csv", ".tsv", ".mtx"])
def test_weights_that_are_not_finite_are_not_written(tmp_path, suffix):
    frame = pd.DataFrame([[1.0, 2.0], [2.0, np.nan]], index=["a", "b"], columns=["a", "b"])
    with pytest.raises(ProblemError, match=r"W\[1, 1\] \(row 'b', column 'b'\) is nan: every weight must be finite"):
        instances.write(tmp_path / f"w{suffix}", frame)
    with pytest.raises(ProblemError, match=r"W\[0, 1\] is -inf"):
        instances.write(tmp_path / f"w{suffix}", [[1.0, -np.inf], [2.0, 1.0]])
    assert not list(tmp_path.iterdir())


def test_masks_are_not_lost_in_files(tmp_path):
    masked = np.ma.array(np.eye(2), mask=[[True, False], [False, False]])
    for W, k in ((masked, None), (np.eye(2), np.ma.array(1, mask=True))):
        with pytest.raises(ProblemError, match="masked array"):
            instances.write(tmp_path / "w.npz", W, k)


NAMED = {
    "header.csv": "\ufeffa,b\n1,2\n2,3\n",
    "pandas.csv": ",a,b\na,1,2\nb,2,3\n",
    "quoted.csv": '"","a","b"\n"a",1,2\n"b",2,3\n',
    "european.csv": "x;a;b\na;1,0;2\nb;2;3,0\n",
    "semicolons.csv": "a;b\n1.0;2\n2;3\n",
    "r.csv": '"a","b"\n"a",1,2\n"b",2,3\n',
    "tabs.tsv": "\ta\tb\na\t1\t2\nb\t2\t3\n",
    "tabs.csv": "a\tb\n1\t2.0\n2\t3\n",
    "commas.tsv": ",a,b\na,1,2\nb,2,3\n",
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("packed", [False, True])
def test_names_in_tables(tmp_path, name, packed):
    content = NAMED[name].encode()
    path = tmp_path / (f"{name}.GZ" if packed else name)
    path.write_bytes(gzip.compress(content) if packed else content)
    made = instances.read(path)
    assert made.W.tolist() == [[1, 2], [2, 3]]
    assert made.labels == ("a", "b")
    problem = Problem.of(made.W, 1, labels=made.labels, protected=["a"])
    assert solve(problem).labels == ["b"]


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".tsv", ".tsv.gz"])
@pytest.mark.parametrize("names", [("a, b", "c"), ("a;b", "c\td"), ("1,5", "2;5")])
def test_names_round_trip_and_pandas_reads_them(tmp_path, suffix, names):
    frame = pd.DataFrame([[1.5, 2.0], [2.0, 1e300]], index=names, columns=names)
    path, mark = tmp_path / f"w{suffix}", "\t" if "tsv" in suffix else ","
    instances.write(path, frame)
    assert pd.read_csv(path, index_col=0, sep=mark).equals(frame)
    made = instances.read(path)
    assert (frame.to_numpy() == made.W).all()
    assert made.labels == names
    frame.to_csv(path, sep=mark)
    assert instances.read(path).labels == names
    instances.write(path, frame.to_numpy(), labels=["x", "y"])
    assert instances.read(path).labels == ("x", "y")
    with pytest.raises(ProblemError, match="cannot store labels"):
        instances.write(tmp_path / "w.npy", frame.to_numpy(), labels=["x", "y"])


def test_names_that_look_like_comments_are_quoted(tmp_path):
    instances.write(tmp_path / "w.csv", np.eye(3), labels=["#x", '#"', "c"])
    assert instances.read(tmp_path / "w.csv").labels == ("#x", '#"', "c")
    assert pd.read_csv(tmp_path / "w.csv", index_col=0, comment="%").to_numpy().tolist() == np.eye(3).tolist()


@pytest.mark.parametrize("name", ["", " a", "a ", "a\nb", "a\r"])
def test_names_that_could_not_be_read_again_are_not_written(tmp_path, name):
    with pytest.raises(ProblemError, match=r"vertex 1 is called .* which could not be read again"):
        instances.write(tmp_path / "w.csv", np.eye(2), labels=["a", name])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["w.npz", "w.safetensors", "of scipy.npz"])
@pytest.mark.parametrize("k", [-1, 4])
def test_a_k_that_w_has_not_is_neither_read_nor_written(tmp_path, name, k):
    W, path = np.eye(3), tmp_path / name
    W = sparse.csr_array(W) if "scipy" in name else W
    with pytest.raises(ProblemError, match=rf"k is {k}: it must be from 0 to 3"):
        instances.write(path, W, k)
    assert not path.exists()
    instances.write(path, W, 3)
    assert instances.read(path).k == 3
    if path.suffix == ".npz":
        np.savez(path, **{**np.load(path), "k": k})
        with pytest.raises(ProblemError, match=rf"k is {k}: it must be from 0 to 3"):
            instances.read(path)


def test_what_was_read_does_not_change_with_the_file(tmp_path):
    path = tmp_path / "w.safetensors"
    instances.write(path, np.eye(300))
    made = instances.read(path)
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(b"1" * 50_000)
    assert (np.eye(300) == made.W).all()
    path.write_bytes(b"")
    assert (np.eye(300) == made.W).all()  # the whole process ended here, if it was the file itself


def test_equal_instances_are_equal_gzipped_files(tmp_path):
    for name in ("a.mtx.gz", "b.mtx.gz"):
        instances.write(tmp_path / name, [[1, 2], [2, 3]])
    assert (tmp_path / "a.mtx.gz").read_bytes() == (tmp_path / "b.mtx.gz").read_bytes()
    for name in ("w.npy.gz", "w.gz"):
        with pytest.raises(ProblemError, match=r"text also with \.gz"):
            instances.write(tmp_path / name, [[1, 2], [2, 3]])
        with pytest.raises(ProblemError, match=r"text also with \.gz"):
            instances.read(tmp_path / name)


TABLES = {
    "corner.csv": ("0..5,2,3\n2,7,1\n3,1,9\n", "'0..5' in the first row is no number.*leave its corner, '0..5', blank"),
    "typos.csv": ("5,2..0,3\n2..0,7,1\n3,1,9\n", "'2..0' in the first row is no number.*leave its corner, '5', blank"),
    "minus.csv": (
        "\u22125,2,3\n2,7,1\n3,1,9\n",
        "'\u22125' in the first row is no number.*leave its corner",
    ),
    "true.csv": ("True,2\n2,1\n", "'True' in the first row is no number"),
    "two lines.csv": (',"a\nb",c\na,1,2\nc,2,1\n', "the cell 'ab' goes over several lines, to line 2"),
    "rows.csv": ("a,b\n1,2\n2,3\n3,4\n", "3 rows after the first one, which was taken for names because of 'a'"),
    "other names.csv": (",a,b\nb,1,2\na,2,3\n", "row 1 is called 'b' and column 1 'a'"),
    "twice.csv": ("a,a\n1,2\n2,3\n", "column 1 and column 2 are both called 'a'"),
    "no name.csv": ("a,\n1,2\n2,3\n", "a name is empty"),
    "two marks.csv": ("a;b\n1,5;2\n2;1.000,5\n", "decimal commas and '1.000,5'"),
    "half named.csv": ("a,b\na,1,2\n2,3\n", "some rows have a name"),
    "typing error.csv": ("1,2\n2,o\n", "line 2, column 2: 'o' is not a number"),
    "empty.csv": (
        "# made by hand\n,a,b\na,1,2\n\nb,,3\n",
        r"line 5, column 2 \(row 'b', column 'a'\): the cell is empty",
    ),
    "empty first.csv": ("1,,3\n2,3,4\n3,4,5\n", "line 1, column 2: the cell is empty, and every weight needs a number"),
    "no diagonal.csv": (",\n1,2\n", "line 1, column 1: the cell is empty"),
    "empty.tsv.gz": (
        gzip.compress(b"\ta\tb\na\t1\t2\nb\t2\t\n"),
        r"line 3, column 3 \(row 'b', column 'b'\): the cell is",
    ),
    "commas for points.tsv": ("1\t2\n2,5\t3\n", "line 2, column 1: '2,5' is not a number"),
    "latin.csv": (
        "a,b\n1,2\n2,3\n\xe9,\n".encode("latin-1"),
        r"not in UTF-8 \(byte 0xe9 in line 4\). Save it as UTF-8",
    ),
    "utf-16.csv": ("a,b\n1,2\n2,3\n".encode("utf-16"), r"not in UTF-8 \(byte 0xff in line 1\). Save it as UTF-8"),
    "typing error first.csv": ("1,o\n2,3\n4,5\n6,7\n", "3 rows after the first one.*because of 'o'"),
    "no numbers.csv": ("a,b\n", "no row of numbers"),
    "many names.csv": ("a,b,c\n1,2\n2,3\n", "3 names in the first row, and 2 rows"),
    "cut.csv.gz": (gzip.compress(b"1,2\n2,3\n")[:-9], r"cannot be read as \.csv"),
    "plain.csv.gz": ("1,2\n2,3\n", r"cannot be read as \.csv"),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_that_are_no_matrix(tmp_path, name):
    content, message = TABLES[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ProblemError, match=message):
        instances.read(tmp_path / name)

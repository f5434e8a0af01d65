"""Instance files that were cut at any byte, or changed in one: refused by name, or read as the same W. Never another.

Where a format says nothing of its content (a digit of a weight), a changed byte cannot be told; where it does (counts,
vertices, digests), it is.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from grace_opt import instances
from grace_opt.errors import ProblemError

GENERAL = np.array([[1.5, -2.25, 0.125], [1e-300, 1e300, 12345.678], [-7.0, 0.1, 2.0]])
SYMMETRIC = GENERAL + GENERAL.T
WHOLE = np.array([[10, 20, 2**53 + 1], [20, 123, 45], [2**53 + 1, 45, -(2**62)]])
GRAPH = np.array([[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0]])
TEXT = (".csv", ".mtx", ".dat", ".txt", ".clq", ".col")

#: Files as the library writes them.
OURS: list[tuple[str, Any, Any]] = [
    *((suffix, W, None) for suffix in (".npy", ".safetensors", ".csv", ".mtx") for W in (GENERAL, WHOLE)),
    (".mtx", SYMMETRIC, None),
    (".npz", GRAPH, 2),
    (".safetensors", GENERAL, 2),
    (".dat", -GRAPH, 2),
    (".txt", -SYMMETRIC * (1 - np.eye(3)), 2),
    (".txt", -WHOLE * (1 - np.eye(3, dtype=int)), 2),
    (".clq", GRAPH, None),
    (".csv.gz", GENERAL, None),
    (".dat.gz", -GRAPH, 2),
    (".col", GRAPH, None),
]
BANNER = "%%MatrixMarket matrix"
#: Files as others write them.
THEIRS = {
    "a.mtx": f"{BANNER} coordinate real general\n% a comment\n%\n\n3 3 4\n1 1 1.5\n3 1 -2.5e-3\n2 3 .5\n1 3 12\n",
    "b.mtx": f"{BANNER} coordinate real symmetric\n3 3 3\n1 1 1.5\n3 1 -2.5\n3 2 17.25\n",
    "c.mtx": f"{BANNER} coordinate integer symmetric\r\n%x\r\n3 3 3\r\n1 1 10\r\n3 1 -25\r\n3 2 9007199254740993\r\n",
    "d.mtx": f"{BANNER} coordinate pattern symmetric\n4 4 3\n2 1\n3 2\n4 1\n",
    "e.mtx": f"{BANNER} coordinate real skew-symmetric\n3 3 2\n2 1 1.5\n3 2 25\n",
    "f.mtx": f"{BANNER} array real general\n% c\n2 2\n1.0\n12\n-3\n44\n",
    "g.mtx": f"{BANNER} array integer symmetric\n2 2\n10\n12\n-33\n",
    "h.mtx": f"{BANNER} array real skew-symmetric\n3 3\n1.5\n12\n-33\n",
    "i.mtx": "%%MatrixMarket MATRIX Coordinate Real General\n2 2 1\n2 2 1.5\n",
    "a.dat": "4 2 3\r\n1 2 0.500000 \r\n2 3 0.500000 \r\n3 4 0.500000 \r\n",
    "a.txt": "3 2\r\n0 1 15.5 \r\n0 2 2.25\r\n1 2 123\r\n",
    "a.clq": "c a path\nc 12\np edge 4 3\ne 1 2\ne 2 3\ne 3 4\n",
    "both.col": "p col 3 4\ne 1 2\ne 2 1\ne 2 3\ne 3 2\n",
    "half.col": "p col 3 3\ne 1 2\ne 1 3\ne 2 1\ne 2 3\ne 3 1\ne 3 2\n",
    "a.csv": "# W\n1,22,3\n22, 5,6\n3,6,77\n",
    "b.csv": "1.5,22\r\n22,77.25\r\n",
    "excel.csv": "\ufeff1.5,22\r\n22,77.25\r\n",
    "header.csv": "\ufeffa,b b\n1.5,22\n22,77.25\n",
    "pandas.csv": ',a,"b, b"\na,1.5,22\n"b, b",22,77.25\n',
    "european.csv": '"";a;b\r\na;1,5;22\r\nb;22;77,25\r\n',
    "r.csv": '"a","b"\n"a",1.5,22\n"b",22,77.25\n',
}


def ours(folder: Path, suffix: str, W: Any, k: Any) -> Path:
    path = folder / f"whole{suffix}"
    instances.write(path, W, k)
    return path


def theirs(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text(THEIRS[name], newline="")
    return path


CASES = [
    *(pytest.param(lambda f, c=case: ours(f, *c), id=f"{case[0]}-{at}") for at, case in enumerate(OURS)),
    *(pytest.param(lambda f, n=name: theirs(f, n), id=name) for name in THEIRS),
]


def outcome(path: Path, content: bytes) -> Any:
    """What is read of this content, or None if it is refused with the file's name."""
    path.write_bytes(content)
    try:
        return instances.read(path)
    except ProblemError as error:
        return None if str(path) in str(error) else f"an error without the file's name: {error}"


def same(a: Any, b: Any) -> bool:
    return bool(np.array_equal(a.W, b.W) and np.array_equal(a.k, b.k) and a.W.dtype == b.W.dtype)


@pytest.mark.parametrize("make", CASES)
def test_cut_at_every_byte(make: Any, tmp_path: Path) -> None:
    path = make(tmp_path)
    whole, content = instances.read(path), path.read_bytes()
    for size in range(len(content)):
        read = outcome(path, content[:size])
        assert read is None or same(read, whole), f"{size} of {len(content)} bytes: {content[:size][-30:]!r}"


@pytest.mark.parametrize("make", CASES)
def test_lines_dropped_doubled_and_swapped(make: Any, tmp_path: Path) -> None:
    path = make(tmp_path)
    if path.suffix not in TEXT:
        pytest.skip("no lines")
    whole, content = instances.read(path), path.read_bytes()
    lines = content.splitlines(keepends=True)
    for at, line in enumerate(lines):
        for changed in (
            [*lines[:at], *lines[at + 1 :]],
            [*lines[:at], line, *lines[at:]],
            [*lines, line],
            [line, *lines],
        ):
            read = outcome(path, b"".join(changed))
            assert read is None or same(read, whole), f"line {at + 1}, {line!r}: {b''.join(changed)!r}"


@pytest.mark.parametrize("make", CASES)
@pytest.mark.slow
def test_every_byte_changed(make: Any, tmp_path: Path) -> None:
    """Nothing but an instance or an error by name comes of it; what has a checksum is never another W."""
    path = make(tmp_path)
    whole, content = instances.read(path), path.read_bytes()
    for at in range(len(content)):
        for other in {content[at] ^ 1, content[at] ^ 0x80, 0x0A, 0x39} - {content[at]}:
            read = outcome(path, content[:at] + bytes([other]) + content[at + 1 :])
            assert read is None or (read.W.shape[-1] == read.W.shape[-2] and read.W.dtype.kind in "biuf")
            if path.suffix in (".npz", ".gz"):  # these have checksums, and say how much they hold
                assert read is None or same(read, whole), f"byte {at}"


def test_a_flipped_vertex_is_told_by_the_others(tmp_path: Path) -> None:
    """`e 1 2` that became `e 2 3` appears twice, though the count is right."""
    path = theirs(tmp_path, "a.clq")
    for old, new in (("e 1 2", "e 2 3"), ("e 1 2", "e 3 2")):
        path.write_text(THEIRS["a.clq"].replace(old, new))
        with pytest.raises(ProblemError, match="name 2 DIMACS edges"):
            instances.read(path)


@pytest.mark.parametrize("name", [name for name in THEIRS if name.endswith(".mtx")])
def test_matrix_market_is_what_scipy_reads(name: str, tmp_path: Path) -> None:
    from scipy.io import mmread

    path = theirs(tmp_path, name)
    there = mmread(path)
    there = there.toarray() if hasattr(there, "toarray") else there
    assert np.array_equal(instances.read(path).W, there)


@pytest.mark.parametrize("W", [GENERAL, SYMMETRIC, WHOLE, GRAPH, np.float32([[0.1, 2], [2, 0.3]]), GRAPH.astype(bool)])
def test_scipy_reads_what_we_write(W: Any, tmp_path: Path) -> None:
    from scipy.io import mmread

    instances.write(tmp_path / "w.mtx", W)
    assert np.array_equal(mmread(tmp_path / "w.mtx"), W)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 1 1\n1 1 1\n", "the first line must be"),
        (f"{BANNER} coordinate complex general\n1 1 1\n1 1 1 0\n", "complex"),
        (f"{BANNER} coordinate real hermitian\n1 1 1\n1 1 1\n", "hermitian"),
        (f"{BANNER} array pattern general\n1 1\n1\n", "pattern"),
        (f"{BANNER} coordinate real general\n2 3 1\n1 1 1\n", "2 by 3"),
        (f"{BANNER} coordinate real general\n0 0 0\n", "0 by 0"),
        (f"{BANNER} coordinate real general\n% nothing\n", "line of sizes"),
        (f"{BANNER} coordinate real general\n2 2 1\n1 3 1\n", "'?1 3 1'? lies outside"),
        (f"{BANNER} coordinate real general\n2 2 1\n0 1 1\n", "1 to 2"),
        (f"{BANNER} coordinate real general\n2 2 1\n1 99999999999999999999999 1\n", "lies outside"),
        (f"{BANNER} coordinate real general\n2 2 2\n1 2 1\n1 2 1\n", "1 2 appears twice"),
        (f"{BANNER} coordinate real symmetric\n2 2 2\n1 2 1\n2 1 1\n", "2 1 appears twice"),
        (f"{BANNER} coordinate real skew-symmetric\n2 2 1\n1 1 1\n", "diagonal"),
        (f"{BANNER} coordinate integer general\n1 1 1\n1 1 1.5\n", "64-bit"),
        (f"{BANNER} coordinate integer general\n1 1 1\n1 1 99999999999999999999999\n", r"beyond 2\*\*53"),
        (f"{BANNER} coordinate real general\n1 1 1\n1 1 1_0\n", "'1_0' is not a number"),
        (f"{BANNER} coordinate real general\n1 1 1\n1 1\n", "not an entry"),
        (f"{BANNER} array real general\n1 1\n1 2\n", "one on each line"),
        (f"{BANNER} array real general\n1 1\n1\n2\n", "more than the header"),
    ],
)
def test_matrix_market_files_that_are_none(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "w.mtx").write_text(text)
    with pytest.raises(ProblemError, match=message):
        instances.read(tmp_path / "w.mtx")


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors", ".csv", ".mtx"])
@pytest.mark.parametrize("dtype", ["<f8", ">f8", "f4", "f2", "i8", "u8", "i4", "u1", "?"])
def test_every_number_comes_back(suffix: str, dtype: str, tmp_path: Path) -> None:
    """Also those that float64 rounds: 2**53 + 1 was read back as 2**53 from .csv."""
    W = np.array([[0, 1], [1, 0]]).astype(dtype)
    if W.dtype.kind in "iu" and W.dtype.itemsize == 8:
        W[0, 0], W[1, 1] = 2**53 + 1, np.iinfo(W.dtype).max
    if W.dtype.kind == "f":
        W[0, 0], W[1, 1] = np.finfo(W.dtype).smallest_subnormal, np.finfo(W.dtype).max
    instances.write(tmp_path / f"w{suffix}", W)
    read = instances.read(tmp_path / f"w{suffix}").W
    assert np.array_equal(read, W)
    assert (read.dtype.kind in "f") == (W.dtype.kind in "f")


def test_distances_beyond_53_bits(tmp_path: Path) -> None:
    W = -np.array([[0, 2**53 + 1], [2**53 + 1, 0]])
    instances.write(tmp_path / "w.txt", W, 1)
    assert np.array_equal(instances.read(tmp_path / "w.txt").W, W)
    for large in (2**63, 2**64 - 1, -(2**63)):
        (tmp_path / "w.txt").write_text(f"2 1\n0 1 {large}\n")
        with pytest.raises(ProblemError, match="beyond 63 bits"):
            instances.read(tmp_path / "w.txt")


@pytest.mark.parametrize("suffix", instances.SUFFIXES)
@pytest.mark.parametrize(
    ("W", "k", "message"),
    [
        (np.eye(2) * 1j, None, "complex128"),
        (np.array([[{}, 1], [1, 1]], dtype=object), None, "object"),
        ([["a", "b"], ["c", "d"]], None, "U1"),
        (np.eye(2, dtype=np.longdouble), None, "at most 64 bits"),
        (np.eye(2), {"no": 1}, "no room for k|k is a dict"),
    ],
)
def test_no_objects_are_written(suffix: str, W: Any, k: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=message):
        instances.write(tmp_path / f"w{suffix}", W, k)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("W", [np.ones(3), np.ones((2, 3)), np.array([["a"]]), np.array([[1j]])])
def test_what_is_no_matrix_is_refused_with_the_files_name(W: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", W)
    with pytest.raises(ProblemError, match=r"w\.npy holds .*: W must be square and real"):
        instances.read(tmp_path / "w.npy")


def test_npy_files_that_hold_more_than_they_say(tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", np.eye(3))
    whole = (tmp_path / "w.npy").read_bytes()
    for changed in (whole + b"\0", whole.replace(b"'<f8'", b"'<f4'"), whole.replace(b"(3, 3)", b"(2, 2)")):
        (tmp_path / "w.npy").write_bytes(changed)
        with pytest.raises(ProblemError, match="more than its header says"):
            instances.read(tmp_path / "w.npy")
    np.savez(tmp_path / "z.npz", np.eye(3))
    (tmp_path / "z.npz").replace(tmp_path / "w.npy")
    with pytest.raises(ProblemError, match="cannot be read"):
        instances.read(tmp_path / "w.npy")


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    import os

    (tmp_path / "folder.npy").mkdir()
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "fifo.npy")  # would be waited for
    (tmp_path / "dangling.npy").symlink_to("none")
    (tmp_path / "device.npy").symlink_to(os.devnull)
    for name in ("dangling.npy", "a" * 300 + ".npy", "x\0.npy", "none/x.npy"):
        with pytest.raises(ProblemError, match=r"no instance file|cannot be read"):
            instances.read(tmp_path / name)
    for name in {"folder.npy", "fifo.npy", "device.npy"} & {p.name for p in tmp_path.iterdir()}:
        with pytest.raises(ProblemError, match=rf"{name} cannot be read as \.npy: it is not a regular file"):
            instances.read(tmp_path / name)


def test_an_npz_member_that_the_directory_skips(tmp_path: Path) -> None:
    """One byte, the length of the first entry's comment or extra field, hid k: read as a file without."""
    path = tmp_path / "w.npz"
    instances.write(path, GENERAL, 2)
    content = path.read_bytes()
    first = content.index(b"PK\1\2")
    for at in (first + 30, first + 32):  # the lengths of the extra field and of the comment
        for length in range(1, 256):
            path.write_bytes(content[:at] + bytes([length]) + content[at + 1 :])
            with pytest.raises(ProblemError, match=r"damaged|cannot be read"):
                instances.read(path)


def test_npz_files_of_others(tmp_path: Path) -> None:
    """Uncompressed, and with a comment at the end of the archive."""
    path = tmp_path / "w.npz"
    np.savez(path, W=GENERAL, k=2)
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b"made elsewhere"
    assert np.array_equal(instances.read(path).W, GENERAL)
    assert instances.read(path).k == 2


def test_bfloat16_is_read_and_smaller_floats_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    W = torch.tensor([[1.5, -2.25], [-2.25, 3e38]], dtype=torch.bfloat16)
    save_file({"W": W, "k": torch.tensor(1), "other": W.to(torch.float8_e4m3fn)}, path)
    read = instances.read(path)
    assert read.W.dtype == np.float32
    assert np.array_equal(read.W, W.double().numpy())
    assert read.k == 1
    for name in ("float8_e4m3fn", "float8_e5m2"):
        save_file({"W": torch.eye(2).to(getattr(torch, name))}, path)
        with pytest.raises(ProblemError, match=rf"w\.safetensors: W has dtype {name}: give real numbers"):
            instances.read(path)
    save_file({"W": W, "k": torch.tensor(1, dtype=torch.bfloat16)}, path)
    with pytest.raises(ProblemError, match="k has dtype"):
        instances.read(path)

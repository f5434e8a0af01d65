"""How much an installation downloads, and its size on disk: ``python -m bench.install_size``.

In a new virtual environment in a temporary folder, pip downloads what ``.[demo]`` needs, in the versions of
constraints.txt, and installs it from these files. The script prints the bytes of the files and of the environment as
Markdown, with date and versions. ``--extras hf`` measures other extras; ``--pip-flags`` can name an index of PyTorch's
CPU builds. It needs only Python and a network, and is not part of ``make results`` because PyTorch's default build
has gigabytes.

When: the sizes in docs/howto/install.md have to be updated.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parent.parent


def bytes_in(folder: Path) -> int:
    """Bytes that files take on the disk, as ``du`` counts them: whole blocks, links once."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            status = os.lstat(Path(place) / name)
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                total += getattr(status, "st_blocks", -(-status.st_size // 512)) * 512
    return total


def largest(folder: Path, count: int = 5) -> list[tuple[str, int]]:
    """The largest files of a folder."""
    sizes = sorted(((path.stat().st_size, path.name) for path in folder.iterdir()), reverse=True)
    return [(name.split("-")[0], size) for size, name in sizes[:count]]


def run(words: Sequence[str]) -> None:
    """Run, and stop with what was said if it fails."""
    done = subprocess.run(words, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"{shlex.join(words[:4])} ... failed with exit code {done.returncode}")


def measure(extras: str, flags: Sequence[str], folder: Path) -> dict[str, object]:
    """Download, install and weigh.

    Parameters
    ----------
    extras : str
        With commas; empty for the solvers alone.
    flags : sequence of str
        More options for pip.
    folder : Path
        Empty; the environment and the files go there.
    """
    environment, files = folder / "venv", folder / "files"
    run([sys.executable, "-m", "venv", str(environment)])
    python = str(environment / ("Scripts" if os.name == "nt" else "bin") / "python")
    empty = bytes_in(environment)
    what = f".[{extras}]" if extras else "."
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    options = ["--quiet", "-c", "constraints.txt"]
    run([*pip, "download", *options, *flags, "--dest", str(files), what])
    downloaded = [path for path in files.iterdir() if not path.name.startswith("grace_opt")]
    found = largest(files)
    run([*pip, "install", *options, *flags, "--find-links", str(files), what])
    return {
        "what": what,
        "files": len(downloaded),
        "downloaded": sum(path.stat().st_size for path in downloaded),
        "on the disk": bytes_in(environment),
        "pip": empty,
        "largest": found,
    }


def report(found: dict[str, object], flags: Sequence[str]) -> str:
    """The sizes in words."""

    def gb(size: object) -> str:
        return f"{int(str(size)) / 1e9:.2f} GB"

    parts = ", ".join(f"{name} {gb(size)}" for name, size in found["largest"])  # type: ignore[attr-defined]
    plain = "" if not flags else f" with {len(flags)} more options for pip"
    return (
        f"`pip install {found['what']}`{plain}: {found['files']} files of {gb(found['downloaded'])} are downloaded "
        f"({parts}); the environment takes {gb(found['on the disk'])} on disk, including pip with "
        f"{gb(found['pip'])}. {datetime.now(UTC):%Y-%m-%d}, Python "
        f"{platform.python_version()}, {platform.system()} {platform.machine()}, versions of constraints.txt."
    )


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.install_size", description=__doc__)
    parser.add_argument("--extras", default="demo", help='with commas, "" for none (default: %(default)s)')
    parser.add_argument("--pip-flags", default="", help='for instance "--extra-index-url ADDRESS"')
    args = parser.parse_args(given)
    flags = shlex.split(args.pip_flags)
    with tempfile.TemporaryDirectory() as name:
        print(report(measure(args.extras, flags, Path(name)), flags))


if __name__ == "__main__":
    main()

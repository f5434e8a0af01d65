"""Build a wheel that brings compiled loops: ``python -m bench.wheel``, or ``make wheel``.

Every loop is compiled for the kinds of processors in `KINDS`, from the very sources that are packed, so that a first
call on such a processor compiles none of them. The wheel installs everywhere: other machines compile what they need, as
a checkout does. Building takes Linux on x86-64 and some minutes.

When: a release, and the benchmark of the first call (`bench.first_call`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.progress import track

ROOT = Path(__file__).resolve().parent.parent
#: What x86-64-v3 has: most processors since 2013 (Intel) and 2015 (AMD).
V3 = (
    "64bit cx8 cx16 cmov mmx fxsr sahf popcnt sse sse2 sse3 ssse3 sse4.1 sse4.2 crc32 avx avx2 bmi bmi2 f16c fma lzcnt "
    "movbe xsave"
)
#: And what x86-64-v4 has; and what turns bit planes into codes (Intel's servers since Ice Lake, AMD since Zen 4).
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
KINDS = {"x86-64-v3": V3, "x86-64-v4": V4, "x86-64-v4-gfni": f"{V4} gfni avx512vbmi"}
_SETUPTOOLS = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def source_in(folder: Path) -> Path:
    """Make a source distribution in a folder, and unpack it beside.

    Of a copy: setuptools leaves ``*.egg-info`` behind, and would ship what is still listed there.
    """
    copied, skip = folder / "copied", shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("grace_opt", "solvers"):
        shutil.copytree(ROOT / name, copied / name, symlinks=True, ignore=skip)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copied / name)
    made = folder / _run([sys.executable, "-c", _SETUPTOOLS, "build_sdist", str(folder)], copied)
    with tarfile.open(made) as archive:
        archive.extractall(folder, filter="data")
    return folder / made.name.removesuffix(".tar.gz")


def compile_into(source: Path, kind: str, names: Sequence[str] = ()) -> Path:
    """Compile functions of a source tree for a kind of processors, into that tree; all if none is named."""
    file = source / "grace_opt" / "data" / "machine_code" / f"{kind}.safetensors"
    file.parent.mkdir(exist_ok=True)
    features = ",".join(f"+{feature}" for feature in KINDS[kind].split())
    with tempfile.TemporaryDirectory() as empty:
        env = os.environ | {
            "PYTHONPATH": str(source),
            "PYTHONDONTWRITEBYTECODE": "1",
            "NUMBA_CACHE_DIR": empty,
            "NUMBA_CPU_NAME": "x86-64",
            "NUMBA_CPU_FEATURES": features,
            "GRACE_OPT_LLVM": "1",  # what is made without would never be used
        }
        program = Path(__file__).with_name("machine_code.py")
        _run([sys.executable, "-P", str(program), str(file), features, *names], source, env)
    return file


def wheel_of(source: Path, out: Path) -> Path:
    """Build the wheel of a source tree."""
    return out / _run([sys.executable, "-c", _SETUPTOOLS, "build_wheel", str(out.resolve())], source)


def build(out: Path, kinds: Iterable[str] = tuple(KINDS), names: Sequence[str] = ()) -> Path:
    """Build a wheel with machine code, and return it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"cannot write to {out} ({error.strerror}): give another folder") from None
    kinds = list(kinds)
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(os.cpu_count()) as pool:
        source = source_in(Path(work))
        files = pool.map(lambda kind: compile_into(source, kind, names), kinds)
        for file in track(files, "compiling", total=len(kinds)):
            print(f"{file.stem}: {file.stat().st_size / 1e6:.1f} MB")
        return wheel_of(source, out)


def _run(command: list[str], folder: Path, env: dict[str, str] | None = None) -> str:
    """Return the last line that a command prints; stop with what it says if it fails."""
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:4])} failed:\n{done.stdout}{done.stderr}")
    return (done.stdout.splitlines() or [""])[-1]


def main(given: list[str] | None = None) -> None:
    """Build it where the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "dist", help="folder (default: dist)")
    print(build(parser.parse_args(given).out))


if __name__ == "__main__":
    main()

"""Where a number comes from: date, machine, versions, commit and command, stored beside every committed result."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grace_opt.sweep.measure import cpu_name

#: Lists what is changed, results and model cards aside: they are what is being measured.
DIRTY = ("status", "--porcelain", "-uno", "--", ":/", ":!/docs/results", ":!/grace_opt/data")
PACKAGES = ("numpy", "scipy", "torch", "numba", "transformers")


def provenance() -> dict[str, Any]:
    """What a stranger needs to judge and repeat a measurement; no names or paths of the machine."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": "python -m " + module_name() + "".join(f" {Path(a).name if '/' in a else a}" for a in sys.argv[1:]),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _git(*DIRTY) else ""),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }


def module_name() -> str:
    """The running ``python -m`` module."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).stem


def write_json(path: Path, value: Any) -> None:
    """Write aside and rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(aside, path)


def caption(source: dict[str, Any]) -> str:
    """One line under a table."""
    packages = ", ".join(f"{name} {source[name]}" for name in PACKAGES)
    return (
        f"`{source['command']}`, {source['date']}, commit {source['commit']}, {source['cores']} cores of "
        f"{source['cpu']}, Python {source['python']}, {packages}."
    )


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return done.stdout.strip()

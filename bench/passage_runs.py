"""KL divergences of many settings on many passages: what benchmarks that only differ in their settings share.

When: `bench.evictions`, `bench.layer_budgets` and `bench.learned`. Each passage has its own file, so that a run that
was stopped goes on; those of other texts, weights, settings or commits are measured again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from bench.material import MODEL
from bench.passages import Passage
from bench.provenance import is_clean, write_json
from bench.real_model import digest, read_record
from bench.report import add_options

ROOT = Path(__file__).parent.parent


def passage_options(page: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of such a benchmark, which writes a page of that name."""
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{page}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=MODEL, help="Hub id, folder or .gguf file (default: %(default)s, fetched)")
    parser.add_argument("--name", help="what to call the model in the results (default: the last part of --model)")
    parser.add_argument("--text", type=Path, nargs="+", help="books as plain text (default: four, fetched)")
    parser.add_argument("--prompt", type=int, default=1792, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens after it (default %(default)s)")
    parser.add_argument("--passages", type=int, help="number of passages (default: all 16)")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / page, help="folder of the records")
    add_options(parser, page)
    return parser


def measure_passages(
    cut: Sequence[Passage],
    folder: Path,
    settings: Mapping[str, Any],
    source: Mapping[str, Any],
    measure: Callable[[Passage], Any],
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return kind, name and ``kl`` of each passage, and where each comes from.

    Parameters
    ----------
    cut : sequence of Passage
    folder : Path
        Of the records.
    settings : mapping
        With which a record must have been made, the commit among them, to count.
    source : mapping
        From `require_clean`.
    measure : callable
        Returns what ``kl`` is to be, of a passage that has no such record.
    """
    found, origins = [], {}
    for number, passage in enumerate(cut):
        path, about = folder / f"passage_{number:02}.json", {**settings, "ids": digest(passage.ids)}
        record = read_record(path, about) if is_clean(source) else None
        if record is None:
            kl = measure(passage)
            record = {"settings": about, "date": source["date"], "commit": source["commit"], "kl": kl}
            write_json(path, record)
        print(f"{number + 1} of {len(cut)}: {passage.name}", flush=True)
        found.append({"kind": passage.kind, "name": passage.name, "kl": record["kl"]})
        origins[f"passage {number}"] = {**source, "date": record["date"], "commit": record["commit"]}
    return found, origins


def kl_by_share(axes: Axes, places: Sequence[float], label: str) -> None:
    """Make the axes of a picture of KL divergences by shares kept, both on logarithmic scales."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(places, [f"{place:.0%}" for place in places])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(label)
    axes.set_ylabel("KL, nats")
    axes.legend()

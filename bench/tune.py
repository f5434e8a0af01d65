"""Whether ``grace-opt tune`` keeps what it promises on texts that it did not see: ``python -m bench.tune``.

`grace_opt.hf.tune` measures settings on windows of the texts of `bench.passages`: books, Python, JSON, numbered lines.
Each text is left out in turn: a setting is recommended for a KL on the windows of the others, and its KL and bytes on
the text that was left out are compared with what was asked for, and with the smallest setting that would have kept it
there. Everything is measured once, and then only averaged in other ways.

Measurements of a model are kept in a folder of ``--runs``, one file each, for a commit; a stopped run goes on where it
was. Writes docs/results/tune.{json,md,png}. If they are missing, models and texts are downloaded (`bench.material`).
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from bench.caches import calibrated
from bench.material import books
from bench.passages import sources
from bench.provenance import is_clean
from bench.report import parser_of
from bench.several import publish_models
from bench.tune_page import KEPT, page
from grace_opt.hf import tune
from grace_opt.hf.tools.tune.candidates import default_candidates
from grace_opt.hf.tools.tune.windows import LATER


def measure(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: Mapping[str, str],
    basis: Path,
    folder: Path,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Measure all settings on windows of all texts.

    Returns
    -------
    dict
        ``texts``, the name of each window's text; ``settings``, by name the share of the bytes and the KL on each
        window;
        ``left_out``, by name why a setting was not measured.
    """
    candidates = [one for one in default_candidates(args.tokens - args.later, basis=str(basis)) if one.config]
    result = tune(
        model,
        tokenizer,
        texts,
        candidates=candidates,
        windows=args.windows * len(texts),
        tokens=args.tokens,
        later=args.later,
        folder=folder,
    )
    if result.interrupted:
        raise SystemExit("interrupted: what was measured is kept, and the same command goes on from there")
    names = [row.name for row in result.rows]
    places = range(len(result.windows))
    settings = {
        name: {key: [result.measured[name, place][0][key] for place in places] for key in KEPT} for name in names
    }
    return {
        "texts": [str(one["name"]).partition(", tokens ")[0] for one in result.windows],
        "settings": settings,
        "left_out": dict(result.left_out),
    }


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of("tune", __doc__, models=True)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a window (default %(default)s)")
    parser.add_argument("--later", type=int, default=LATER, help="those fed afterwards (default %(default)s)")
    parser.add_argument("--windows", type=int, default=2, help="windows of each text (default %(default)s)")
    args = parser.parse_args(given)

    def measured(source: dict[str, Any], model: PreTrainedModel, tokenizer: Any, name: str) -> tuple[Any, Any]:
        basis = args.runs / name / "basis.safetensors"
        made, _ = calibrated(model, tokenizer, basis, source)
        # Records belong to a commit; if files differ from it, nothing is used again.
        folder = args.runs / name / (str(source["commit"]) if is_clean(source) else secrets.token_hex(8))
        texts = {title: text for _, title, text in sources(args.text or books(), args.tokens, 0)}
        found = measure(model, tokenizer, texts, basis, folder, args)
        return {"calibration": {"texts": made.texts, "tokens": made.tokens}, **found}, {}

    settings = {"tokens": args.tokens, "later": args.later, "windows": args.windows}
    publish_models(args, page, settings, measured)


if __name__ == "__main__":
    main()

"""A page of several models: each is measured when its turn comes, and says itself where its numbers come from.

A model takes minutes or hours, so that a run need not measure all of them: those that it does not name stay on the page
as they were, each with the commit, machine and command that measured it. After each model the page is written, so that
a run that is stopped has lost only the one that it was at.

When: every benchmark whose numbers depend on the model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any

from bench.material import MODELS, label_of, open_models, require_texts
from bench.provenance import digest, refuse, require_clean
from bench.report import Page, read_results, write_results


def publish_models(
    args: argparse.Namespace,
    page: Callable[[dict[str, Any]], Page],
    settings: Mapping[str, Any],
    measure: Callable[[dict[str, Any], Any, Any, str], tuple[dict[str, Any], Mapping[str, Mapping[str, Any]]]],
) -> None:
    """Measure one model of ``--model`` after the other, and write the page of these and of those that it has.

    Parameters
    ----------
    args : Namespace
        From ``parser_of(..., models=True)``.
    page : callable
        Gets `settings` and ``models``, which maps the name of each to what was measured of it, its ``weights`` and its
        ``provenance``.
    settings : mapping
        What all models of a page have in common.
    measure : callable
        Gets the provenance of this run, a model, its tokenizer and its name; returns what to write of it, and the
        provenances of its records, by name.

    Raises
    ------
    SystemExit
        If the page has other models with other settings.
    """
    if args.report_only:
        print(write_results(args.out, read_results(args.out), page, allow_dirty=args.allow_dirty, measured=False))
        return
    require_texts(args.text)
    source = require_clean(args.allow_dirty)
    models, text = _before(args, settings), ""
    for model, tokenizer, name in open_models(args):
        found, origins = measure(source, model, tokenizer, name)
        models[name] = {
            "provenance": refuse(origins or {"this run": source}, args.allow_dirty),
            "weights": digest(*model.parameters()),
            **found,
        }
        order = sorted(models, key=lambda each: [*MODELS, each].index(each))
        value = {**settings, "models": {each: models[each] for each in order}}
        text = write_results(args.out, value, page, allow_dirty=args.allow_dirty)
    print(text)


def _before(args: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the models of the page as it is; none if all that it has are measured now, with other settings."""
    if not args.out.with_name(args.out.name + ".json").exists():
        return {}
    value, asked = read_results(args.out), json.loads(json.dumps(dict(settings)))
    before: dict[str, dict[str, Any]] = value.pop("models")
    different = [name for name in asked if value.get(name) != asked[name]]
    if different and (others := [name for name in before if name not in map(label_of, args.model)]):
        raise SystemExit(
            f"{args.out.name} has {', '.join(others)}, measured with other settings: {different[0]} was "
            f"{value.get(different[0])!r} and is {asked[different[0]]!r}; measure these models too, or name another "
            "--out"
        )
    return {} if different else before

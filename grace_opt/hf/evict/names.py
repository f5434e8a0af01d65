"""Evictions by name, and as plain values for JSON: what settings say in words, and what files keep of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..._util.names import nearest_name
from ..._util.parameters import shown
from ...errors import CalibrationError, OptionError
from .eviction import H2O, PyramidKV, SnapKV, StreamingLLM, TokenEviction
from .graph_eviction import GraphEviction
from .layer_budgets import LayerBudgets
from .layer_losses import LayerLosses

Ours = SnapKV | H2O | StreamingLLM | GraphEviction | LayerBudgets
#: That of evictions divided among layers is no name to choose by: they want losses.
DIVIDED = "layer_budgets"
_NAMES: dict[str, type[SnapKV | H2O | StreamingLLM | GraphEviction]] = {
    "snapkv": SnapKV,
    "pyramidkv": PyramidKV,
    "h2o": H2O,
    "streaming_llm": StreamingLLM,
    "graph": GraphEviction,
}


def eviction_named(name: str) -> Ours:
    """Return the eviction of this name with its defaults; case, hyphens and underscores do not matter.

    Raises
    ------
    OptionError
        If the name is unknown; suggests the nearest one.

    Examples
    --------
    >>> eviction_named("streaming-LLM")
    StreamingLLM(budget=512, sinks=4)
    """
    short = {known.replace("_", ""): known for known in _NAMES}
    meant = name.lower().replace("_", "").replace("-", "")
    if meant not in short:
        near = nearest_name(meant, short)
        raise OptionError(
            f"evict={shown(name)}: write one of {', '.join(map(repr, _NAMES))}, or an eviction with its budget, for "
            f"instance SnapKV(budget=0.25){'' if near is None else f'. Did you mean {short[near]!r}?'}"
        )
    return _NAMES[short[meant]]()


def eviction_to_dict(eviction: TokenEviction) -> dict[str, Any]:
    """Return an eviction as plain values for JSON; `eviction_from_dict` reads them back.

    Examples
    --------
    >>> eviction_to_dict(StreamingLLM(budget=64))
    {'name': 'streaming_llm', 'budget': 64, 'sinks': 4}
    """
    if isinstance(eviction, LayerBudgets):
        losses = dataclasses.asdict(eviction.losses)
        return {"name": DIVIDED, "evict": eviction_to_dict(eviction.evict), "losses": losses}
    for name, kind in _NAMES.items():
        if type(eviction) is kind:
            return {"name": name, **dataclasses.asdict(eviction)}
    known = ", ".join(kind.__name__ for kind in _NAMES.values())
    raise OptionError(f"eviction={shown(eviction)} cannot be saved: give one of {known}.")


def eviction_from_dict(values: Mapping[str, Any]) -> Ours:
    """Read the eviction that `eviction_to_dict` wrote; missing fields get their defaults.

    Raises
    ------
    OptionError
        If the name or a field is unknown, or a value out of range.
    """
    known = ", ".join(map(repr, _NAMES))
    name = values.get("name") if isinstance(values, Mapping) else None
    if name == DIVIDED:
        return _divided_from_dict(values)
    if not isinstance(name, str) or name not in _NAMES:
        raise OptionError(f'eviction {shown(values)}: give {{"name": ..., "budget": ...}}, with a name from {known}.')
    given = {key: value for key, value in values.items() if key != "name"}
    fields = [field.name for field in dataclasses.fields(_NAMES[name])]
    unknown = [key for key in given if key not in fields]
    if unknown:
        raise OptionError(f"{name!r} has no {', '.join(map(repr, unknown))}: its fields are {fields}.")
    return _NAMES[name](**given)


def _divided_from_dict(values: Mapping[str, Any]) -> LayerBudgets:
    parts = values.get("evict"), values.get("losses")
    names = {field.name for field in dataclasses.fields(LayerLosses)}
    wanted = names - {"fingerprint"}
    good = all(isinstance(part, Mapping) for part in parts) and wanted <= set(parts[1] or ()) <= names
    if not good or set(values) != {"name", "evict", "losses"}:
        raise OptionError(f'{DIVIDED!r} has "evict", an eviction, and "losses" with {sorted(names)}; and nothing else')
    try:
        return LayerBudgets(eviction_from_dict(parts[0]), LayerLosses(**parts[1]))  # type: ignore[arg-type]
    except CalibrationError as error:
        raise OptionError(f"the losses of {DIVIDED!r}: {error}") from None

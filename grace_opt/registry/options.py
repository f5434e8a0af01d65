"""Which method a caller means, by name and keyword options or by an options object; and which options are not usual."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from .._util.parameters import shown
from ..errors import OptionError, UnknownSolverError
from .methods import SolverSpec, get, specs


def chosen(method: Any, options: Mapping[str, Any], arguments: Iterable[str] = ()) -> tuple[SolverSpec, Any]:
    """A method and its options object, from a name and keyword options, or from an options object.

    `arguments` are those of the caller, which an unknown option may have been meant to be.

    Raises
    ------
    UnknownSolverError
        As in `get`, or if no method has options of this class.
    OptionError
        If `method` is neither a name nor an options object, if it is an options object and `options` is not empty, or
        if an option is wrong.

    Examples
    --------
    >>> from grace_opt.solvers import TabuOptions
    >>> spec, options = chosen(TabuOptions(iterations=500), {})
    >>> spec.name, options == chosen("tabu", {"iterations": 500})[1]
    ('tabu', True)
    """
    if isinstance(method, str):
        spec = get(method)
        return spec, spec.make_options(options, arguments)
    spec = _owner(method)
    if options:
        name, kind = next(iter(options)), type(method).__name__
        raise OptionError(
            f"method is a {kind} already, so {name}= cannot be given separately: write {kind}({name}=...), or "
            f"method={spec.name!r} and all options by name."
        )
    return spec, method


def changed(options: Any) -> dict[str, Any]:
    """The options that differ from their defaults, by name.

    Examples
    --------
    >>> from grace_opt.solvers import TabuOptions
    >>> changed(TabuOptions(iterations=500))
    {'iterations': 500}
    """
    found = {}
    for field in dataclasses.fields(options):
        factory, value = field.default_factory, getattr(options, field.name)
        usual = field.default if factory is dataclasses.MISSING else factory()
        if type(value) is not type(usual) or value != usual:  # of equal types, so that no array is compared
            found[field.name] = value
    return found


def _owner(options: Any) -> SolverSpec:
    """The method that these options belong to."""
    kind = options if isinstance(options, type) else type(options)
    owners = [spec for spec in specs().values() if spec.options is kind]
    if isinstance(options, SolverSpec):
        raise OptionError(f"method={shown(options)}: that describes a method; write its name, {options.name!r}.")
    if isinstance(options, type) and owners:
        raise OptionError(f"method={kind.__name__} is a class: write {kind.__name__}(...) for an object of it.")
    if not dataclasses.is_dataclass(options) or isinstance(options, type):
        raise OptionError(
            f"method={shown(options)}: give a method's name, such as 'tabu', or its options, such as "
            "TabuOptions(iterations=500)."
        )
    if not owners:
        raise UnknownSolverError(
            f"method={shown(options)}: no method is registered with options={kind.__name__}. Give a method's name, one "
            f"of {', '.join(sorted(specs()))}, or options of its own class."
        )
    if len(owners) > 1:
        names = ", ".join(repr(spec.name) for spec in owners)
        raise OptionError(f"method={shown(options)}: {kind.__name__} belongs to {names}; give one of these names.")
    return get(owners[0].name)

"""Modules with one thing wrong, to see that the tests notice."""

import importlib.util


def mutant(module, old, new, folder):
    """A copy of a module with one thing wrong."""
    with open(module.__file__, encoding="utf-8") as file:
        source = file.read()
    assert source.count(old) == 1, f"{old!r} is there {source.count(old)} times"
    path = folder / "mutant.py"
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"{module.__package__}.mutant", path)
    wrong = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wrong)
    return wrong

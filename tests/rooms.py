"""Which part of `grace_opt` imports which: rooms (modules and packages at its top), files, and circles among them.

``python tests/rooms.py`` prints the number of rooms, every circle of files (imports inside functions and those for
types alone count too; import-linter misses some of these), and the longest chain of rooms. With ``--map`` it writes
``docs/map.md``: every room and every file, described by its own first line. `tests/test_house.py` checks the figures
and the map, and `make contracts` prints the figures.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from pathlib import Path

import networkx as nx

PACKAGE = Path(__file__).resolve().parent.parent / "grace_opt"
MAP = PACKAGE.parent / "docs" / "map.md"
HEAD = """# Map of the code

`grace_opt` has few rooms. Each number is a floor: a room uses only rooms on lower floors. `solvers/` is the folder of
that name at the top of the checkout, one file per method.

Written by `python tests/rooms.py --map` from the first lines of the files themselves.
"""


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Every module's dotted name and file; a package goes by its ``__init__``."""
    found = {}
    for path in _walk(package):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _walk(folder: Path) -> Iterable[Path]:
    """All Python files in order, through the link to the solvers too, which rglob does not follow before 3.13."""
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            yield from _walk(entry)
        elif entry.suffix == ".py":
            yield entry


def imports(name: str, path: Path, known: Iterable[str]) -> set[str]:
    """The modules of the package that one of them imports, wherever in the file it does."""
    known, found = set(known), set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, [above, node.module or ""]))
            # `from .room import file` imports the file, `from .room import name` the room's __init__.
            found |= {full if (full := f"{base}.{alias.name}") in known else base for alias in node.names}
    return (found & known) - {name}


def graph(package: Path = PACKAGE) -> nx.DiGraph:
    """An arrow from each module to every one that it imports."""
    known = modules(package)
    arrows = nx.DiGraph()
    arrows.add_nodes_from(known)
    arrows.add_edges_from((name, other) for name, path in known.items() for other in imports(name, path, known))
    return arrows


def rooms(arrows: nx.DiGraph) -> nx.DiGraph:
    """The same between rooms: modules and packages at the top of ``grace_opt/``."""
    between = nx.DiGraph()
    for name in arrows:
        if name.count("."):
            between.add_node(name.split(".")[1])
    between.add_edges_from(
        (a.split(".")[1], b.split(".")[1])
        for a, b in arrows.edges
        if a.count(".") and b.count(".") and a.split(".")[1] != b.split(".")[1]
    )
    return between


def circles(arrows: nx.DiGraph) -> list[list[str]]:
    """Sets of nodes that reach each other."""
    return sorted(sorted(found) for found in nx.strongly_connected_components(arrows) if len(found) > 1)


def longest_chain(arrows: nx.DiGraph) -> list[str]:
    """The longest chain of rooms, circles taken as one."""
    flat = nx.condensation(arrows)
    return ["+".join(sorted(flat.nodes[each]["members"])) for each in nx.dag_longest_path(flat)]


def plan(arrows: nx.DiGraph, folder: Path = PACKAGE) -> str:
    """``docs/map.md``: the rooms, the lowest first, and the files in each."""
    found, between = modules(folder), rooms(arrows)
    floor: dict[str, int] = {}
    for room in reversed(list(nx.topological_sort(between))):
        floor[room] = 1 + max((floor[below] for below in between.successors(room)), default=0)
    lines = [HEAD]
    for room in sorted(between, key=lambda room: (floor[room], room)):
        files = {name: path for name, path in found.items() if f"{name}.".startswith(f"grace_opt.{room}.")}
        own = f"grace_opt.{room}"
        lines += [f"## {floor[room]}. {room.strip('_') if room == '__main__' else room}", "", _first(files[own]), ""]
        inside = [(name.removeprefix(f"{own}."), path) for name, path in sorted(files.items()) if name != own]
        if inside:
            lines += ["| file | what is in it |", "|---|---|"]
            lines += [
                f"| `{name.replace('.', '/')}` | {_first(path).replace('|', chr(92) + '|')} |" for name, path in inside
            ]
            lines.append("")
    return "\n".join(lines)


def _first(path: Path) -> str:
    """The first sentence or paragraph of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()) or "–"


def main() -> None:
    arrows = graph()
    if "--map" in sys.argv[1:]:
        MAP.write_text(plan(arrows), encoding="utf-8")
    between = rooms(arrows)
    chain = longest_chain(between)
    print(f"{len(between)} rooms at the top of grace_opt/, {between.number_of_edges()} arrows between them")
    print(f"{len(arrows)} files, {arrows.number_of_edges()} arrows between them")
    print(f"{len(chain)} floors: {' > '.join(chain)}")
    for name, found in (("files", circles(arrows)), ("rooms", circles(between))):
        print(f"{len(found)} circles of {name}")
        for circle in found:
            print("   ", " ".join(circle))


if __name__ == "__main__":
    main()

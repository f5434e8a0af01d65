"""Which part of `grace_opt` imports which: rooms (modules and packages at its top), files, and circles among them.

``python tests/rooms.py`` prints the number of rooms, every circle of files (imports inside functions and those for
types alone count too; import-linter misses some of these), and the longest chain of rooms; the same for the wing
``grace_opt.hf``. With ``--map`` it draws both houses and lists every folder in ``docs/map.md``, by its own first line,
between what is written there by hand. `tests/test_house.py` checks figures, pictures and list; `make contracts` prints
the figures.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from html import escape
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "grace_opt"
MAP = ROOT / "docs" / "map.md"
#: What is drawn, and where: a package whose rooms are its modules and packages.
HOUSES = {"grace_opt": ROOT / "docs" / "map_house.svg", "grace_opt.hf": ROOT / "docs" / "map_hf.svg"}
#: Folders of other implementations of what their parent has; the parent's line speaks for them.
IMPLEMENTATIONS = ("cpu", "gpu", "reference")
#: Pixels: from floor to floor, height of a room, between rooms, width of a letter, beside a room's name, margins.
FLOOR, HEIGHT, GAP, LETTER, BESIDE, LEFT, TOP = 62, 28, 26, 8.4, 20, 56, 8
INK, LINE, BAND = "#1b1f24", "#7b8794", "#f1f4f8"
MARK = "<!-- written by python tests/rooms.py --map -->\n"


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


def rooms(arrows: nx.DiGraph, house: str = "grace_opt") -> nx.DiGraph:
    """The same between the rooms of a house: modules and packages inside that package."""
    room = {name: name.split(".")[house.count(".") + 1] for name in arrows if name.startswith(f"{house}.")}
    between = nx.DiGraph()
    between.add_nodes_from(room.values())
    between.add_edges_from(
        (room[a], room[b]) for a, b in arrows.edges if a in room and b in room and room[a] != room[b]
    )
    return between


def circles(arrows: nx.DiGraph) -> list[list[str]]:
    """Sets of nodes that reach each other."""
    return sorted(sorted(found) for found in nx.strongly_connected_components(arrows) if len(found) > 1)


def arrows_up(between: nx.DiGraph) -> list[tuple[str, str]]:
    """Arrows that have a way back: whichever floor their rooms have, they lead up as well as down."""
    return sorted((a, b) for circle in circles(between) for a, b in between.edges if a in circle and b in circle)


def longest_chain(arrows: nx.DiGraph) -> list[str]:
    """The longest chain of rooms, circles taken as one."""
    flat = nx.condensation(arrows)
    return ["+".join(sorted(flat.nodes[each]["members"])) for each in nx.dag_longest_path(flat)]


def floors(between: nx.DiGraph) -> dict[str, int]:
    """Each room's floor: one above the highest that it uses. Rooms in a circle share theirs."""
    flat, found = nx.condensation(between), {}
    for node in reversed(list(nx.topological_sort(flat))):
        used = [found[room] for below in flat.successors(node) for room in flat.nodes[below]["members"]]
        found.update(dict.fromkeys(flat.nodes[node]["members"], 1 + max(used, default=0)))
    return found


def drawn(between: nx.DiGraph, title: str) -> str:
    """Draw a graph of rooms, the lowest floor at the bottom."""
    floor = floors(between)
    count = max(floor.values())
    rows = [sorted(room for room in floor if floor[room] == number) for number in range(1, count + 1)]
    wide = {room: len(room) * LETTER + BESIDE for room in floor}
    inside = max(sum(wide[room] + GAP for room in row) for row in rows)
    middle: dict[str, float] = {}
    for row in rows:  # from below: each room near those that it uses
        below = {room: [middle[other] for other in between.successors(room) if other in middle] for room in row}
        row.sort(key=lambda room, of=below: (sum(of[room]) / len(of[room]) if of[room] else LEFT + inside / 2, room))
        spare = (inside - sum(wide[room] for room in row)) / (len(row) + 1)
        x = LEFT + spare
        for room in row:
            middle[room] = x + wide[room] / 2
            x += wide[room] + spare
    top = {room: TOP + FLOOR * (count - floor[room]) + (FLOOR - HEIGHT) / 2 for room in floor}
    width, height = inside + 2 * LEFT, 2 * TOP + FLOOR * count
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width:.0f}" height="{height}" fill="#fff"/>',
    ]
    for number in range(1, count + 1, 2):
        y = TOP + FLOOR * (count - number)
        lines.append(f'<rect x="0" y="{y}" width="{width:.0f}" height="{FLOOR}" fill="{BAND}"/>')
    lines.append(f'<g fill="none" stroke="{LINE}" stroke-width="1.2">')
    down = nx.transitive_reduction(nx.DiGraph((a, b) for a, b in between.edges if floor[a] > floor[b]))
    ends = sorted((middle[a], top[a] + HEIGHT, middle[b], top[b]) for a, b in down.edges)
    for x, y, to, end in ends:
        half = (y + end) / 2
        lines.append(f'<path d="M{x:.0f} {y:.0f}C{x:.0f} {half:.0f} {to:.0f} {half:.0f} {to:.0f} {end - 7:.0f}"/>')
    lines.append(f'</g><g fill="{LINE}">')
    lines += [f'<path d="M{x - 4:.0f} {y - 8:.0f}h8l-4 8z"/>' for x, y in sorted({(to, end) for *_, to, end in ends})]
    lines.append(f'</g><g fill="#fff" stroke="{INK}" stroke-width="1.2">')
    lines += [
        f'<rect x="{middle[room] - wide[room] / 2:.0f}" y="{top[room]:.0f}" width="{wide[room]:.0f}" '
        f'height="{HEIGHT}" rx="4"/>'
        for room in sorted(floor)
    ]
    lines.append(f'</g><g fill="{INK}" font-family="Menlo,Consolas,monospace" font-size="14" text-anchor="middle">')
    lines += [
        f'<text x="{middle[room]:.0f}" y="{top[room] + HEIGHT / 2 + 5:.0f}">{escape(room)}</text>'
        for room in sorted(floor)
    ]
    lines += [
        f'<text x="24" y="{TOP + FLOOR * (count - n) + FLOOR / 2 + 5:.0f}">{n}</text>' for n in range(1, count + 1)
    ]
    return "\n".join([*lines, "</g>", "</svg>", ""])


def folders(package: Path = PACKAGE) -> str:
    """A table of all folders, and of the modules at the top, each in its own words."""
    found = {tuple(name.split(".")[1:]): path for name, path in modules(package).items() if "." in name}
    floor = floors(rooms(graph(package), package.name))
    lines = ["| floor | folder or module | what is in it |", "|---:|---|---|"]
    for inside in sorted(found, key=lambda inside: (-floor[inside[0]], inside)):
        if len(inside) == 1 or (found[inside].name == "__init__.py" and inside[-1] not in IMPLEMENTATIONS):
            number = floor[inside[0]] if len(inside) == 1 else ""
            lines.append(f"| {number} | `{'/'.join(inside)}` | {_first(found[inside])} |")
    return "\n".join(lines) + "\n"


def written() -> dict[Path, str]:
    """What ``--map`` writes: the pictures, and the map with its list made anew."""
    arrows, by_hand = graph(), MAP.read_text(encoding="utf-8").split(MARK)
    pictures = {path: drawn(rooms(arrows, house), f"the rooms of {house}") for house, path in HOUSES.items()}
    return {**pictures, MAP: MARK.join([by_hand[0], folders(), by_hand[2]])}


def _first(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "–"
    return re.split(r"(?<=\.) (?=[A-Z])", " ".join(text.split("\n\n")[0].split()))[0].replace("|", r"\|")


def main() -> None:
    """Print the figures of both houses; write the map if asked to."""
    if "--map" in sys.argv[1:]:
        for path, text in written().items():
            path.write_text(text, encoding="utf-8")
    arrows = graph()
    print(f"{len(arrows)} files, {arrows.number_of_edges()} arrows, {len(circles(arrows))} circles", *circles(arrows))
    for house in HOUSES:
        between = rooms(arrows, house)
        chain, up = longest_chain(between), arrows_up(between)
        print(
            f"{house}: {len(between)} rooms, {between.number_of_edges()} arrows, {len(up)} of them up",
            *circles(between),
        )
        print(f"    {len(chain)} floors: {' > '.join(chain)}")


if __name__ == "__main__":
    main()

"""The house stands: what is shipped is what is in the tree, and importing the library is quiet and light."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import networkx as nx
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import grace_opt
from bench.wheel import source_in, wheel_of
from grace_opt import registry
from grace_opt._util import optional
from grace_opt._util.optional import pip_install
from tests import rooms, starter

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]

# Loaded where they are used and not before: each costs its users time, or may not be installed.
HEAVY = ["cvxpy", "networkx", "numba", "matplotlib", "triton", "transformers", "pandas", "sklearn", "typer"]


def python(code: str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def tree() -> Iterator[str]:
    """Every file that belongs to the library, by its installed name."""
    for folder, installed in (("grace_opt", "grace_opt"), ("solvers", "grace_opt/solvers")):
        for directory, _, files in os.walk(ROOT / folder, followlinks=False):
            if "__pycache__" not in directory:
                inside = Path(directory).relative_to(ROOT / folder)
                yield from ((installed / inside / file).as_posix() for file in files)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source distribution, and a wheel that was built from it."""
    work = tmp_path_factory.mktemp("house")
    wheel_of(source_in(work), work)
    return work


@pytest.mark.slow
def test_wheel_holds_the_tree_and_nothing_else(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        shipped = [name for name in archive.namelist() if not name.endswith("/")]
    library = sorted(name for name in shipped if ".dist-info/" not in name)
    assert library == sorted(tree()), "does a new folder lack __init__.py, or is a file missing from package-data?"
    assert {name.split("/")[0] for name in shipped} == {"grace_opt", f"grace_opt-{PROJECT['version']}.dist-info"}
    assert "grace_opt/py.typed" in library
    assert any(name.endswith("licenses/LICENSE") for name in shipped)


@pytest.mark.slow
def test_sdist_holds_each_solver_once(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [Path(member.name) for member in archive.getmembers()]
    for solver in (ROOT / "solvers").glob("*.py"):
        assert sum(name.name == solver.name and name.parent.name == "solvers" for name in names) == 1


def test_symlink_is_relative_and_leads_to_the_solvers() -> None:
    link = ROOT / "grace_opt" / "solvers"
    assert link.is_symlink(), "git made no symlink here: git config core.symlinks true, then check out again"
    assert os.readlink(link) == "../solvers"
    assert link.resolve() == ROOT / "solvers"


def test_solvers_under_another_name_says_what_to_write() -> None:
    run = python("import solvers")
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: this folder is the package grace_opt.solvers, not 'solvers'")
    assert "import grace_opt.solvers" in last


@pytest.mark.parametrize(
    "module",
    [
        "grace_opt",
        pytest.param("grace_opt.solvers", marks=pytest.mark.slow),
        pytest.param("grace_opt.testing", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_import_is_quiet_and_light(module: str) -> None:
    # What torch itself brings is not ours to avoid.
    code = f"""if True:
        import sys, torch
        before = set(sys.modules)
        import {module}
        sys.exit(", ".join(m for m in {HEAVY} if m in sys.modules and m not in before) or 0)
    """
    run = starter.python(code, dict(os.environ), ROOT)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", ""), f"import {module} loads or prints: {run.stderr}"


@pytest.mark.slow
def test_numba_is_imported_before_its_modules() -> None:
    """Threads that begin with different modules of numba wait for each other's import locks, and one import fails."""
    seen = 0
    for name in tree():
        if not name.endswith(".py"):
            continue
        path = name.removeprefix("grace_opt/") if name.startswith("grace_opt/solvers/") else name
        first: dict[ast.AST, str] = {}
        source = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        for place in ast.walk(source):
            for line in getattr(place, "body", []) if isinstance(place, (ast.Module, ast.FunctionDef)) else []:
                found = [line.module or ""] if isinstance(line, ast.ImportFrom) and not line.level else []
                found += [alias.name for alias in line.names] if isinstance(line, ast.Import) else []
                for module in found:
                    if module.split(".")[0] == "numba":
                        first.setdefault(place, module)
        seen += len(first)
        assert set(first.values()) <= {"numba"}, f"{path}: write `import numba` before {sorted(first.values())}"
    assert seen > 5


@pytest.mark.slow
def test_import_leaves_the_global_state_of_others_alone() -> None:
    code = """if True:
        import random, warnings, numpy, torch
        def state():
            return [
                random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist(),
                torch.get_num_threads(), torch.get_default_dtype(), numpy.geterr(), str(numpy.get_printoptions()),
                list(warnings.filters),
            ]
        before = state()
        import grace_opt
        changed = [i for i, (a, b) in enumerate(zip(before, state())) if a != b]
        raise SystemExit(f"changed: {changed}" if changed else 0)
    """
    run = starter.python(code, dict(os.environ), ROOT)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_the_house_has_few_rooms_and_floors_and_nobody_walks_in_circles() -> None:
    files = rooms.graph()
    between = rooms.rooms(files)
    assert len(between) <= 24
    assert len(rooms.longest_chain(between)) <= 10
    assert rooms.circles(files) == rooms.circles(between) == []


@pytest.mark.slow
def test_the_wing_of_caches_is_a_house_of_its_own() -> None:
    """Rooms are the packages and modules directly in `grace_opt/hf`, but for its face, the `__init__`."""
    between = rooms.rooms(rooms.graph(), "grace_opt.hf")
    assert len(between) <= 9, sorted(between)
    assert len(rooms.longest_chain(between)) <= 9
    assert between.number_of_edges() <= 32, sorted(between.edges)
    assert rooms.arrows_up(between) == []


def test_a_circle_inside_functions_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "house").mkdir()
    for name, content in {"__init__": "", "a": "from .b import x", "b": "def x():\n    from . import a"}.items():
        (tmp_path / "house" / f"{name}.py").write_text(content)
    assert rooms.circles(rooms.graph(tmp_path / "house")) == [["house.a", "house.b"]]


def test_arrows_that_have_a_way_back_lead_up(tmp_path: Path) -> None:
    (tmp_path / "house" / "wing").mkdir(parents=True)
    content = {"__init__": "", "a": "from . import b", "b": "from . import c", "c": "from . import b, wing"}
    content |= {"wing/__init__": "", "wing/x": "from . import y", "wing/y": "", "wing/z": "from .. import a"}
    for name, text in content.items():
        (tmp_path / "house" / f"{name}.py").write_text(text)
    files = rooms.graph(tmp_path / "house")
    between = rooms.rooms(files, "house")
    assert set(between.edges) == {("a", "b"), ("b", "c"), ("c", "b"), ("c", "wing"), ("wing", "a")}
    assert rooms.arrows_up(between) == sorted(between.edges)
    inside = rooms.rooms(files, "house.wing")
    assert (set(inside), list(inside.edges), rooms.arrows_up(inside)) == ({"x", "y", "z"}, [("x", "y")], [])


def test_a_house_is_drawn_with_every_room_on_its_floor() -> None:
    between = nx.DiGraph([("top", "middle"), ("top", "ground"), ("middle", "ground"), ("side", "ground")])
    assert rooms.floors(between) == {"top": 3, "middle": 2, "side": 2, "ground": 1}
    picture = ElementTree.fromstring(rooms.drawn(between, "a house"))
    places = {text.text: float(text.get("y", "")) for text in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert places["top"] < places["middle"] == places["side"] < places["ground"]
    assert all(places[room] == places[str(floor)] for room, floor in rooms.floors(between).items())
    curves = [path for path in picture.iter("{http://www.w3.org/2000/svg}path") if "C" in path.get("d", "")]
    assert len(curves) == 3  # from the top to the ground, others lead as well


@pytest.mark.slow
def test_the_map_is_that_of_the_house() -> None:
    for path, text in rooms.written().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python tests/rooms.py --map"


def test_the_map_has_a_line_for_each_folder_and_names_functions_that_exist() -> None:
    text = rooms.MAP.read_text(encoding="utf-8")
    assert text.count("\n") <= 120
    named = set(re.findall(r"(\w+)\(\)", text))
    defined = {
        node.name
        for path in rooms.modules(rooms.PACKAGE / "hf").values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    assert len(named) > 3
    assert named <= defined


def test_every_public_name_exists() -> None:
    missing = [name for name in grace_opt.__all__ if not hasattr(grace_opt, name)]
    assert not missing
    assert len(set(grace_opt.__all__)) == len(grace_opt.__all__) <= 20


@pytest.mark.parametrize("room", ["errors", "attention"])
def test_names_that_the_face_had_say_where_they_are(room) -> None:
    names = {
        "errors": [name for name, value in vars(grace_opt.errors).items() if isinstance(value, type)],
        "attention": grace_opt.attention.__all__,
    }[room]
    never = ("Any", "EvaluationError", "InfeasibleConstraintsError", "MovedNameError", "output_matrix")  # on the face
    moved = [name for name in names if name not in (*grace_opt.__all__, *never)]
    assert len(moved) == {"errors": 11, "attention": 3}[room]
    for name in moved:
        says = rf"^grace_opt\.{name} has another name now: write grace_opt\.{room}\.{name}\.$"
        with pytest.raises(grace_opt.errors.OptionError, match=says):
            exec(f"from grace_opt import {name}")
        with pytest.raises(grace_opt.errors.MovedNameError, match=says):
            getattr(grace_opt, name)
        assert not hasattr(grace_opt, name)  # as tools ask that look for the shortest name


def test_the_version_is_one() -> None:
    version = PROJECT["version"]
    assert grace_opt.__version__ == version
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[{re.escape(version)}\]", changelog, re.MULTILINE)
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(rf'^version: "?{re.escape(version)}"?$', citation, re.MULTILINE)


def test_constraints_pin_everything_that_make_installs() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pins = {canonicalize_name(requirement.name): requirement for requirement in requirements}
    extras = PROJECT["optional-dependencies"]
    (named,) = re.findall(r"^EXTRAS := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    wanted = [*PROJECT["dependencies"], *(r for extra in ("hf", *named.split(",")) for r in extras[extra])]
    for requirement in map(Requirement, wanted):
        if (name := canonicalize_name(requirement.name)) != PROJECT["name"]:
            assert name in pins, f"constraints.txt has no pin for {name}"
            (pin,) = pins[name].specifier
            assert pin.operator == "=="
            assert requirement.specifier.contains(pin.version), f"{pins[name]} is outside {requirement}"
    # A looser request may replace the build of torch that somebody chose, and download gigabytes.
    assert str(pins["torch"]) == "torch==2.13.0"


@pytest.fixture
def dry_run(tmp_path: Path) -> Callable[..., str]:
    """``make --dry-run`` in a folder with our Makefile and whichever stamps a test puts there, the oldest first."""
    if shutil.which("make") is None:
        pytest.skip("there is no make here")
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints-oldest.txt"):
        shutil.copy(ROOT / name, tmp_path)
        os.utime(tmp_path / name, (1, 1))

    def commands(target: str, *stamps: str) -> str:
        for time, stamp in enumerate(stamps, 2):
            path = tmp_path / ".venv" / stamp
            path.parent.mkdir(exist_ok=True)
            path.touch()
            os.utime(path, (time, time))
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        run = subprocess.run(
            ["make", "-n", target], cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=60
        )
        assert run.returncode == 0, run.stderr
        return run.stdout

    return commands


def test_the_demo_installs_what_the_demo_needs(dry_run: Callable[..., str]) -> None:
    asked = re.findall(r"install\.py .*", dry_run("demo"))
    assert len(asked) == 1
    assert asked[0].endswith('-c constraints.txt -e ".[demo]"')
    extras = PROJECT["optional-dependencies"]
    needed = {"grace-opt[hf]", "matplotlib>=3.9", "optimum-quanto>=0.2.7"}
    assert set(extras["demo"]) == needed, "is that for the demo, or for bench, docs, dev?"
    assert {Requirement(r).name for r in extras["hf"]} == {"transformers", "accelerate", "gguf"}


def test_what_installs_more_is_said_for_a_checkout_and_for_a_wheel(monkeypatch, tmp_path) -> None:
    assert pip_install("quant") == 'pip install ".[quant]" in the checkout of grace_opt'
    assert pip_install() == "pip install . in the checkout of grace_opt"
    monkeypatch.setattr(optional, "PROJECT_FILE", tmp_path / "pyproject.toml")
    said = pip_install("quant")
    assert said.endswith('in the checkout of grace_opt, or pip install "FILE.whl[quant]" if it came as a wheel')


def test_tests_add_to_the_demo_and_the_demo_takes_nothing_back(dry_run: Callable[..., str]) -> None:
    for there in ((), (".installed-demo",)):
        said = dry_run("unit", *there)
        (asked,) = re.findall(r"install\.py .*", said)
        assert ('-e ".[demo,' in asked, ",dev]" in asked) == (True, True)
        assert "touch .venv/.installed-demo .venv/.installed" in said
    for target in ("demo", "unit", "docs"):
        assert "install.py" not in dry_run(target, ".installed-demo", ".installed")


def test_resolve_asks_for_what_make_installs(dry_run: Callable[..., str]) -> None:
    """Both environments and the demo, on the oldest Python that is supported and on each one that is named."""
    asked, makefile = dry_run("resolve"), (ROOT / "Makefile").read_text(encoding="utf-8")
    for stamp in ("unit", "test-oldest"):
        for wanted in re.findall(r'-e "(\.\[.*?\])"', dry_run(stamp)):
            assert f'"{wanted}"' in asked
    (pythons,) = re.findall(r"^RESOLVE_PYTHONS := (.*)$", makefile, re.MULTILINE)
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert f"{oldest}.0" in pythons.split()
    named = {c.rsplit(" ", 1)[1] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)}
    assert named <= {version.rsplit(".", 1)[0] for version in pythons.split()}


STEPS = {
    "lint": "ruff",
    "contracts": "lint-imports",
    "types": "mypy",
    "docs": "python -m sphinx",
    "unit": "python -m pytest -n",
    "oldest": "python -m pytest tests/hf",
}


@pytest.mark.parametrize("fails", [None, *STEPS])
def test_make_test_runs_every_step_and_fails_with_any(fails: str | None, tmp_path: Path) -> None:
    """Some of them beside others: what they say is shown, whoever fails."""
    if shutil.which("make") is None:
        pytest.skip("there is no make here")
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints-oldest.txt"):
        shutil.copy(ROOT / name, tmp_path)
        os.utime(tmp_path / name, (1, 1))
    wrong = f'case "$said" in "{STEPS[fails]}"*) exit 3;; esac' if fails else ""
    for environment in (".venv", ".venv-oldest"):
        (tmp_path / environment / "bin").mkdir(parents=True)
        for name in ("python", "ruff", "mypy", "lint-imports"):
            tool = tmp_path / environment / "bin" / name
            tool.write_text(f'#!/bin/sh\nsaid="{name} $*"; echo "said $said"; {wrong}\n')
            tool.chmod(0o755)
        for stamp in (".installed-demo", ".installed"):
            (tmp_path / environment / stamp).touch()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    run = subprocess.run(["make", "test"], cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=60)
    assert (run.returncode == 0) == (fails is None), run.stdout + run.stderr
    said = [step for step, tool in STEPS.items() if f"said {tool}" in run.stdout]
    assert said == list(STEPS) if fails is None else fails in said


def python_blocks(path: Path) -> list[str]:
    """The Python examples of a Markdown file, in order."""
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = python_blocks(ROOT / "README.md")[0]
    exec(compile(example, "README.md", "exec"), {})
    assert "mies" in capsys.readouterr().out


@pytest.mark.slow
def test_readme_example_for_models_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """As it stands, with nothing of the reader's; a model that is here takes the place of the Hub's."""
    from grace_opt.hf.models import POCKET_FOLDER

    block = python_blocks(ROOT / "README.md")[1]
    example, count = re.subn(r'^name = "HuggingFaceTB/[\w-]+"', f"name = {str(POCKET_FOLDER)!r}", block, flags=re.M)
    assert count == 1
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    assert "coded tokens have 2.2" in capsys.readouterr().out
    assert names["output"].shape[1] == names["inputs"].input_ids.shape[1] + 64  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_solver_of_the_walk_through_is_found_and_conforms(tmp_path: Path) -> None:
    """One file in `solvers/`, and nothing else: what CONTRIBUTING tells, in a copy of the library."""
    solver, check = python_blocks(ROOT / "CONTRIBUTING.md")[:2]  # the others add a store: tests/hf/test_stores.py
    for folder in ("grace_opt", "solvers"):
        skip = shutil.ignore_patterns("__pycache__", "data")
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=skip)
    (tmp_path / "solvers" / "anticlique.py").write_text(solver, encoding="utf-8")
    code = f"""if True:
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import grace_opt
        from grace_opt import registry, testing
        assert grace_opt.__file__.startswith({str(tmp_path)!r})
        ours = [name for name in registry.specs() if registry.get(name).solver.__module__.startswith("grace_opt.")]
        assert "anticlique" in ours and ours == sorted(ours), ours
    """
    run = python(code + "\n" + check, cwd=tmp_path)
    assert run.returncode == 0, run.stderr


def test_every_solver_has_a_page_and_every_page_a_solver() -> None:
    from grace_opt import solvers

    pages = {page.stem for page in (ROOT / "docs" / "methods").glob("*.md")}
    files = {name for name in solvers.__all__ if inspect.ismodule(getattr(solvers, name))}
    assert pages == {"index", *files}
    assert files <= set(registry.specs())


@pytest.mark.slow
def test_the_list_of_methods_finds_a_new_page(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    shutil.copytree(ROOT / "docs" / "methods", tmp_path / "methods")
    (tmp_path / "methods" / "anticlique.md").write_text("# Anticlique\n", encoding="utf-8")
    (tmp_path / "index.md").write_text("# Docs\n\n```{toctree}\nmethods/index\n```\n", encoding="utf-8")
    (tmp_path / "conf.py").write_text('extensions = ["myst_parser"]\n', encoding="utf-8")
    code = """if True:
        from sphinx.application import Sphinx
        site = Sphinx(".", ".", "built", "built", "dummy", status=None, warning=None)
        site.build()
        print(*sorted(site.env.toctree_includes["methods/index"]))
    """
    run = python(code, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    pages = sorted(f"methods/{page.stem}" for page in (tmp_path / "methods").glob("*.md") if page.stem != "index")
    assert run.stdout.split() == pages


def test_links_to_headings_work_on_github_as_well_as_in_the_built_pages() -> None:
    """Sphinx also finds a heading by docutils' name for it, so that a link can work there and nowhere else."""

    def anchors(page: Path) -> set[str]:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        titles = re.findall(r"^#{1,6} +(.+?) *$", text, flags=re.M)
        # As GitHub and MyST make them: links as their text, no punctuation, one hyphen for every space.
        plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
        return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}

    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    links = [
        (page, (page.parent / name).resolve() if name else page, anchor)
        for page in pages
        if "_build" not in page.parts
        for name, anchor in re.findall(r"\]\(([^)\s:#]*\.md|)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    ]
    assert len(links) > 40
    assert not [
        f"{page.relative_to(ROOT)}: {target.name}#{anchor}"
        for page, target, anchor in links
        if not target.is_file() or anchor not in anchors(target)
    ]


ADVICE = ROOT / "docs" / "howto" / "choose_a_setting.md"


def test_the_advice_gives_figures_of_speed_as_the_tables_do() -> None:
    """2.1 where the table has 2.03, and "whole models" for 8 of 30 layers."""
    advice = ADVICE.read_text(encoding="utf-8")
    results = ROOT / "docs" / "results"
    efficiency = (results / "efficiency.md").read_text(encoding="utf-8")
    at_8192 = efficiency.split("**8,192 tokens", 1)[1]
    (share,) = re.findall(r"([\d.]+) × the time", advice)
    assert re.search(rf"^\| GRACE, K and V in 4 bits \| 0\.6 .* ms \| {share} \|", at_8192, re.M)
    some = re.search(r"(\d+) of (\d+) layers", efficiency)
    assert some is not None
    told = [re.sub(r"\s+", " ", part) for part in re.split(r"\n\n|\n- ", advice) if "efficiency.md" in part]
    assert told
    for part in told:
        assert f"{some[1]} of its {some[2]} layers" in part
        assert "random weights" in part


def test_the_advice_gives_figures_of_quality_as_the_table_does() -> None:
    advice = ADVICE.read_text(encoding="utf-8")
    table = (ROOT / "docs" / "results" / "real_model.md").read_text(encoding="utf-8")
    row = re.search(r"^\| smollm2-135m \| GRACE \| 0\.6 \|.*\| ([\d.]+)% \| [\d.]+% \| ([\d.]+) \|$", table, re.M)
    assert row is not None
    assert f"stays the same at {row[1]} % of" in advice
    words = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    assert f"differ after about {words[round(float(row[2]))]} tokens" in advice


def test_testing_without_hypothesis_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec("grace_opt.testing")
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ImportError, match=r'hypothesis.*pip install "\.\[dev\]"') as caught:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert isinstance(caught.value, grace_opt.GraceError)


def test_every_command_to_install_is_one_for_a_clone() -> None:
    """grace_opt is on no package index, where a stranger could take its name."""
    rooms_and_pages = ("grace_opt", "solvers", "bench", "tests", "docs/howto", "docs/reference", "docs/tutorials")
    texts = [path for folder in rooms_and_pages for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")]
    texts += [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/examples/*.py"), ROOT / "Makefile"]
    named = re.compile("""pip install ["']?grace[-_]opt""")
    assert len(texts) > 400
    assert not [path for path in texts if named.search(path.read_text(encoding="utf-8"))]

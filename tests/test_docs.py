"""The documentation's own code: formulas become MathML, the check of the built site finds what it is for, and the
columns that the gallery keeps are those that it says.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
pytest.importorskip("sphinx")


def loaded(path: Path) -> ModuleType:
    """A file that lies in no package, as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def mathml() -> Any:
    return loaded(DOCS / "_ext" / "mathml.py").mathml


@pytest.fixture(scope="module")
def problems() -> Any:
    return loaded(DOCS / "_ext" / "complete.py").problems


def test_formulas_become_mathml(mathml: Any) -> None:
    found = mathml(r"f(S) = \mathbf 1_S^{\mathsf T} W \mathbf 1_S < \frac{a}{b}", "block")
    assert found.startswith('<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">')
    assert "<mfrac>" in found
    assert "\\" not in found
    below = mathml(r"\min_{x} x_1", "block")
    assert "<munder><mo>min</mo>" in below
    assert "<msub><mi>x</mi>" in below
    assert "<munder>" not in mathml(r"\min_{x} x_1", "inline")


@pytest.mark.parametrize("wrong", [r"\unheardof{x}", r"\frac{1}{", r"\begin{matrix} 1"])
def test_a_formula_that_cannot_be_converted_is_an_error(mathml: Any, wrong: str) -> None:
    with pytest.raises(ValueError, match=r"Error: |has no MathML"):
        mathml(wrong, "inline")


PAGE = "<html><head><title>{title}</title>{head}</head><body><h1>{title}</h1>{body}</body></html>"


@pytest.mark.parametrize(
    ("head", "body", "said"),
    [
        ('<script src="https://cdn.example/mathjax.js"></script>', "", "loads https://cdn.example/mathjax.js"),
        ('<link rel="stylesheet" href="//fonts.example/a.css">', "", "loads //fonts.example/a.css"),
        ("", '<img src="HTTP://pictures.example/a.png">', "loads HTTP://pictures.example/a.png"),
        ("", r"<p>\(x_i\)</p>", "shows a formula in TeX"),
        ("", "<h1>Again</h1>", "no first heading, or several"),
        ("<title>Again</title>", "", "no title, or several"),
        ("", "", ""),
        ('<link rel="canonical" href="https://docs.example/a.html">', '<a href="https://example.org">a</a>', ""),
        ("", r"<svg><title>a picture</title></svg><code>\(x\)</code>", ""),
    ],
)
def test_the_check_of_the_built_site(tmp_path: Path, problems: Any, head: str, body: str, said: str) -> None:
    (tmp_path / "a.html").write_text(PAGE.format(title="A", head=head, body=body))
    found = problems(tmp_path)
    assert (len(found) == 1 and said in found[0]) if said else found == []


def test_the_check_finds_two_pages_of_one_title_and_styles_from_elsewhere(tmp_path: Path, problems: Any) -> None:
    for name in "ab":
        (tmp_path / f"{name}.html").write_text(PAGE.format(title="Same", head="", body=""))
    (tmp_path / "site.css").write_text('@import "https://fonts.example/a.css"; b { background: url(own.png) }')
    title, style = problems(tmp_path)
    assert title.startswith("b.html: has the title of a.html")
    assert "https://fonts.example/a.css" in style


@pytest.mark.slow
def test_the_site_uses_both(tmp_path: Path) -> None:
    """A formula is built as MathML without warnings; a script from elsewhere, or an unknown command, ends the build."""
    from sphinx.cmd.build import build_main

    (tmp_path / "conf.py").write_text(
        f"import sys\nsys.path.insert(0, {str(DOCS / '_ext')!r})\n"
        'extensions = ["myst_parser", "mathml", "complete"]\nhtml_math_renderer = "mathml"\nhtml_theme = "furo"\n'
        f'templates_path = [{str(DOCS / "_templates")!r}]\nmyst_enable_extensions = ["dollarmath"]\n'
    )
    build = ["-W", "-q", "-b", "html", str(tmp_path), str(tmp_path / "built")]
    before = list(sys.path)
    try:
        (tmp_path / "index.md").write_text("# Page\n\nA formula $x_i$.\n")
        assert build_main(build) == 0
        assert "<msub>" in (tmp_path / "built" / "index.html").read_text()
        (tmp_path / "index.md").write_text('# Page\n\n<script src="https://cdn.example/a.js"></script>\n')
        assert build_main(build) != 0
        (tmp_path / "index.md").write_text("# Page\n\nA formula $\\unheardof$.\n")
        assert build_main(build) != 0
    finally:
        sys.path[:] = before


@pytest.mark.slow
def test_the_columns_of_the_gallery_are_the_least_correlated() -> None:
    pytest.importorskip("sklearn")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    example = loaded(DOCS / "examples" / "plot_least_correlated_columns.py")
    pyplot.close("all")
    assert example.selector.solution_.status.name == "OPTIMAL"
    kept = example.selector.get_support()
    among = example.tumours.data.corr().abs().to_numpy()[kept][:, kept]
    assert (among.sum() - 8) / 8**2 == pytest.approx(float(example.selector.solution_.objective))

"""Sphinx extension: formulas as MathML, made at build time, so that pages show them without a network or a script.

When: ``html_math_renderer = "mathml"`` in conf.py. Built on latex2mathml; browsers have drawn MathML Core since 2023. A
formula that cannot be converted, or of which a command would be left as it is, is a warning, which ends a build.
"""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)
COMMAND = re.compile(r"\\[A-Za-z]+")
NAMESPACE = "http://www.w3.org/1998/Math/MathML"
#: Below which TeX writes an index, in a formula that stands alone; latex2mathml does so for sums only.
LIMITS = ("min", "max", "inf", "sup", "argmin", "argmax", "lim")
BELOW = {f"{{{NAMESPACE}}}msub": f"{{{NAMESPACE}}}munder", f"{{{NAMESPACE}}}msubsup": f"{{{NAMESPACE}}}munderover"}
ElementTree.register_namespace("", NAMESPACE)


def mathml(latex: str, display: str) -> str:
    r"""Return a formula as a ``<math>`` element.

    Parameters
    ----------
    latex : str
        Without dollar signs.
    display : {"inline", "block"}

    Raises
    ------
    ValueError
        If it cannot be converted, or a command is left.

    Examples
    --------
    >>> mathml(r"x_i", "inline").endswith("<mrow><msub><mi>x</mi><mi>i</mi></msub></mrow></math>")
    True
    """
    try:
        formula = ElementTree.fromstring(convert(latex, display=display))
    except Exception as error:  # the library has no common class of errors
        raise ValueError(f"{type(error).__name__}: {error}") from error
    for part in formula.iter() if display == "block" else ():
        if part.tag in BELOW and part[0].text in LIMITS:
            part.tag = BELOW[part.tag]
    found = ElementTree.tostring(formula, encoding="unicode")
    if left := COMMAND.search(found):
        raise ValueError(f"{left[0]} has no MathML")
    return found


def visit_inline(translator: Any, node: nodes.math) -> None:
    """Write a formula within a line."""
    translator.body.append(_written(node, "inline"))
    raise nodes.SkipNode


def visit_block(translator: Any, node: nodes.math_block) -> None:
    """Write a formula that stands alone; a wide one scrolls by itself."""
    translator.body.append(translator.starttag(node, "div", CLASS="math-block"))
    translator.body.append(_written(node, "block") + "</div>\n")
    raise nodes.SkipNode


def _written(node: nodes.Element, display: str) -> str:
    try:
        return mathml(node.astext(), display)
    except ValueError as error:
        LOGGER.warning("formula %r: %s", node.astext(), error, location=node)
        return f"<code>{node.astext()}</code>"


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the renderer."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}

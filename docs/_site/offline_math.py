r"""Render formulas as MathML, which browsers draw by themselves: no script, no picture, no network.

latex2mathml converts them. It passes on what it does not know: then a backslash is left, and that is a warning, which
fails the build. (docutils has a converter too; it sets the index of ``\bar g_u`` below the letter.)
"""

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util import logging

SAY = logging.getLogger(__name__)
BETTER = {
    "&#x029F5;": "&#x02216;",  # the set minus that fonts have
    "<mo>&#x02016;</mo>": '<mo stretchy="false">&#x02016;</mo>',  # both bars of a norm equally high
}


def mathml(node: nodes.Element, display: str) -> str:
    """Return the formula of a node as MathML."""
    text = convert(node.astext().strip(), display=display)
    if "\\" in text:
        SAY.warning("latex2mathml cannot convert all of the formula %r", node.astext(), location=node, type="math")
    for old, new in BETTER.items():
        text = text.replace(old, new)
    return text


def inline(self: Any, node: nodes.Element) -> None:
    self.body.append(mathml(node, "inline"))
    raise nodes.SkipNode


def block(self: Any, node: nodes.Element) -> None:
    self.body.append(f'<div class="formula">{mathml(node, "block")}</div>\n')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", inline_renderers=(inline, None), block_renderers=(block, None))
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

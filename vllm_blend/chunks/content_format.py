"""What a chat template reads: whether it loops over the parts of a content, and which variables it knows."""

from __future__ import annotations

from functools import lru_cache

from jinja2 import Environment, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser

from vllm_blend.chunks.messages import ContentFormat


class _Generation(Extension):
    """The {% generation %} blocks of training templates, which transformers knows and Jinja does not."""

    tags = {"generation"}  # noqa: RUF012  as the base class has it

    def parse(self, parser: Parser) -> nodes.Scope:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@lru_cache(maxsize=32)
def detect_content_format(template: str) -> ContentFormat:
    """Return "openai" for a template with a loop over the content of a message, as vLLM does, and "string" for others:
    these would show a list as Python writes it. Raises TemplateSyntaxError for text that is no template."""
    tree = _parse(template)
    messages = {"messages"}
    assignments = [a for a in tree.find_all(nodes.Assign) if isinstance(a.target, nodes.Name)]
    while found := {a.target.name for a in assignments if _source(a.node) in messages} - messages:  # type: ignore[attr-defined]
        messages |= found
    loops = [loop for loop in tree.find_all(nodes.For) if isinstance(loop.target, nodes.Name)]
    message = {loop.target.name for loop in loops if _source(loop.iter) in messages}  # type: ignore[attr-defined]
    contents = {f"{name}.content" for name in message}
    return "openai" if any(_source(loop.iter) in contents for loop in loops) else "string"


@lru_cache(maxsize=32)
def template_variables(template: str) -> frozenset[str]:
    """Return the variables that a template reads from what it is rendered with."""
    return frozenset(find_undeclared_variables(_parse(template)))


def _parse(template: str) -> nodes.Template:
    return Environment(extensions=[loopcontrols, _Generation]).parse(template)


def _source(node: nodes.Node) -> str | None:
    """Return what an expression takes its items from: "name" or "name.key", seen through slices, filters and tests."""
    while isinstance(node, nodes.Filter | nodes.Test) or _is_slice(node):
        inner = node.node  # type: ignore[attr-defined]
        if inner is None:
            return None
        node = inner
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.Getattr):
        key: object = node.attr
    elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        key = node.arg.value
    else:
        return None
    return f"{node.node.name}.{key}" if isinstance(node.node, nodes.Name) else None


def _is_slice(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)

"""Where chat templates run: jinja2's immutable sandbox, with an end to every template.

A template is code out of a checkpoint. It reaches nothing outside, and is stopped when it computes
for too long: its loops and calls look at the clock. What a single filter or operator takes is
bounded only where it makes much of little (repetition, powers, numbers of many digits).
"""

import time
from contextvars import ContextVar
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

# Of processor time, so that a busy machine refuses nothing. Large chats take milliseconds.
_MOST_S = 10.0
_MOST_CHARACTERS = 256_000_000
_MOST_ITEMS = 1_000_000
_MOST_BITS = 4096
_MOST_EXPONENT = 64
_TICK = "_tick"

_deadline: ContextVar[float] = ContextVar("deadline")


class Sandbox(ImmutableSandboxedEnvironment):
    """With the whitespace rules and extensions that Hugging Face templates are written for."""

    # What is intercepted is not computed while a template is compiled either.
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        self.filters[_TICK] = _tick

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _TickingLoops().visit(template)
        return template

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        _check_time()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if not (_may_multiply if operator == "*" else _may_raise)(left, right):
            raise SecurityError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


def rendered(template: jinja2.Template, names: dict[str, Any]) -> str:
    """The template's text. Raises what the template raises, and SecurityError when it takes too
    long or writes too much.
    """
    token = _deadline.set(time.thread_time() + _MOST_S)
    try:
        pieces, size = [], 0
        for piece in template.generate(names):
            size += len(piece)
            if size > _MOST_CHARACTERS:
                raise SecurityError(f"it writes more than {_MOST_CHARACTERS} characters")
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _deadline.reset(token)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TickingLoops(NodeTransformer):
    """Makes every round of a loop look at the clock, those that its condition leaves out too."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - as jinja2 calls it
        self.generic_visit(node)
        tick = nodes.Filter(nodes.Const(True), _TICK, [], [], None, None)
        if node.test is None:
            node.body.insert(0, nodes.ExprStmt(tick))
        else:
            node.test = nodes.And(tick, node.test)
        return node


@jinja2.pass_context  # without the context it would be computed once, when compiled
def _tick(context: Context, value: bool) -> bool:
    _check_time()
    return value


def _check_time() -> None:
    if time.thread_time() > _deadline.get():
        raise SecurityError(f"it takes more than {_MOST_S:g} s")


def _may_multiply(left: Any, right: Any) -> bool:
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() + right.bit_length() <= _MOST_BITS
    for times, repeated in ((left, right), (right, left)):
        if isinstance(times, int) and hasattr(repeated, "__len__"):
            return times * len(repeated) <= _MOST_ITEMS
    return True


def _may_raise(left: Any, right: Any) -> bool:
    if isinstance(left, int) and isinstance(right, int):
        return right <= _MOST_EXPONENT and left.bit_length() <= _MOST_EXPONENT
    return True

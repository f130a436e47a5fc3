"""Where chat templates run: Jinja's immutable sandbox, which lets out no internals, with a budget for each rendering.

Every loop turn and every call of a macro is a step, with the work of what it may run. Every value that an operator, a
filter, a method or an output moves or builds is work, of as many units as it has characters; where a result may be far
larger than what it is made of, the work is known before it is begun. Filters and methods are those that chat templates
use: what pads, formats or computes without bounds (`center`, `indent`, `%`, `**`, ...) is not there. The work allowed
grows with what came in, so that honest templates fit.

Knows nothing of messages and prompts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import Undefined, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import _PassArg
from jinja2.visitor import NodeTransformer

MAX_STEPS: Final = 50_000  # turns of all loops and calls of all macros, together
MAX_WORK: Final = 16 * 1024 * 1024  # units, for a template without input
WORK_PER_UNIT: Final = 64  # more, for each unit of what came in
ITEM_WORK: Final = 64  # an item of a list or a dict, in units
CALL_WORK: Final = 256  # of any filter, comparing test or call
NODE_WORK: Final = 8  # of any expression or statement in a loop or a macro, each time it may run
PIECE_WORK: Final = 1024  # of a piece of indented JSON
MAX_REPEATED: Final = 50_000  # characters or items that `*` may make
MAX_INT_BITS: Final = 4096
MAX_LAYOUT_CHARS: Final = 256
MAX_INDENT: Final = 16
BUDGET: Final = " budget"  # no name that a template can spell

# Of one value, whatever its size: constant time.
PLAIN_FILTERS: Final = frozenset({"abs", "attr", "count", "d", "default", "first", "last", "length"})
# That walk over the items of a value.
ITEM_FILTERS: Final = frozenset({"items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr"})
# That read all the text in a value, however deep.
TEXT_FILTERS: Final = frozenset(
    {"capitalize", "dictsort", "float", "int", "join", "lower", "max", "min", "replace", "safe", "sort"}
    | {"string", "title", "trim", "unique", "upper"}
)
COMPARING_TESTS: Final = frozenset(
    {"in", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan", "<=", "le"}
)

SPLITTING: Final = frozenset({"partition", "rpartition", "rsplit", "split", "splitlines"})
# Whose time or result may be the product of what they are given.
GROWING: Final = frozenset(
    {"join", "lstrip", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim"}
)
METHODS: Final[tuple[tuple[type, frozenset[str]], ...]] = (
    (
        str,
        SPLITTING
        | {"capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdecimal", "isdigit"}
        | {"islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip", "removeprefix"}
        | {"removesuffix", "replace", "rfind", "rindex", "rstrip", "startswith", "strip", "swapcase", "title", "upper"},
    ),
    (dict, frozenset({"copy", "get", "items", "keys", "values"})),
    (list, frozenset({"count", "index"})),
    (tuple, frozenset({"count", "index"})),
    (int, frozenset()),
    (float, frozenset({"is_integer"})),
    (bytes, frozenset()),
)


class TemplateRefusal(Exception):
    """The template itself says, by `raise_exception`, that it does not take these messages."""


class Budget:
    """What one rendering may still do."""

    def __init__(self, given: object) -> None:
        self._steps = MAX_STEPS
        self.work = MAX_WORK + WORK_PER_UNIT * size_of(given, MAX_WORK)

    def step(self, work: int) -> None:
        self._steps -= 1
        if self._steps < 0:
            raise SecurityError(f"its loops take more than {MAX_STEPS} turns")
        self.spend(work)

    def spend(self, work: int) -> None:
        self.work -= work
        if self.work < 0:
            raise SecurityError("it does more work on text and lists than any prompt needs")

    def spend_on(self, value: object) -> None:
        """All the text in `value`."""
        self.spend(size_of(value, self.work))


def size_of(value: object, most: int) -> int:
    """Units of `value` with all that it holds; about `most` and one more is as far as it counts."""
    size = 0
    pending = [value]
    while pending and size <= most:
        one = pending.pop()
        size += extent(one)
        if isinstance(one, Mapping):
            pending += one.keys()
            pending += one.values()
        elif isinstance(one, Collection) and not isinstance(one, str | bytes | range):
            pending += one
    return size


def extent(value: object) -> int:
    """Units of `value` itself: characters, or its items without what they hold."""
    if isinstance(value, str | bytes):
        return len(value) + 1
    if isinstance(value, int):
        return 1 + value.bit_length() // 3
    if isinstance(value, Collection) and not isinstance(value, Undefined):
        return (ITEM_WORK // 8 if isinstance(value, range) else ITEM_WORK) * len(value) + 1
    return 1


class Sandbox(ImmutableSandboxedEnvironment):
    """The helpers and white-space rules of Hugging Face's templates. Render with a `Budget` as variable `BUDGET`."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_spend_on_output,
            extensions=[LoopControlExtension, _GenerationBlock],
        )
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        for name, function in list(self.filters.items()):
            self.filters[name] = self._bounded_filter(name, function)
        self.filters["tojson"] = _to_json
        tests: dict[str, Any] = self.tests
        tests |= {name: self._bounded_test(tests[name]) for name in COMPARING_TESTS}

    # ---- at compile time

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse, then make all that repeats count its turns, and what Jinja does by itself go through here."""
        template = super()._parse(source, name, filename)
        for block in template.find_all(nodes.Block):
            raise TemplateSyntaxError("blocks are not available", block.lineno, name, filename)
        for node in template.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
            count = _call_here("count_step", nodes.Const(_step_work(node)))
            node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))
            if isinstance(node, nodes.For) and node.test is not None:  # turns that it skips are turns
                node.test = nodes.And(_call_here("count_step", nodes.Const(0)), node.test)
        weighed: nodes.Template = _Weigher().visit(template)
        return weighed

    # ---- while rendering

    def count_step(self, context: Context, work: int) -> bool:
        _budget(context).step(work)
        return True

    def weigh(self, context: Context, value: Any) -> Any:
        """`value`, all of which is about to be read."""
        _budget(context).spend_on(value)
        return value

    def weigh_items(self, context: Context, value: Any) -> Any:
        """`value`, a new list or string."""
        _budget(context).spend(extent(value))
        return value

    def join_text(self, context: Context, *values: Any) -> str:
        """`a ~ b`."""
        _budget(context).spend_on(values)
        return "".join([str(value) for value in values])

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Raise at once, where Jinja would wait until the value is used."""
        raise SecurityError(f"it reaches for the attribute {attribute!r} of {type(obj).__name__!r}")

    def wrap_str_format(self, value: Any) -> None:
        """`str.format` is an attribute like all others: not on the list."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, methods in METHODS:
            if isinstance(obj, kind) and hasattr(kind, attr):
                return attr in methods
        return super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(__context)
        owner = getattr(__obj, "__self__", None)
        if owner is __self:
            return __obj(*args)  # of _Weigher's calls; Jinja adds keywords for functions of a template
        if isinstance(owner, str):
            args = _spend_on_method(budget, owner, __obj.__name__, args)
        elif isinstance(owner, list | tuple):
            budget.spend_on(owner)
        budget.spend(CALL_WORK + extent(args) + extent(kwargs))
        result = super().call(__context, __obj, *args, **kwargs)
        budget.spend(extent(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or (operator == "%" and isinstance(left, str | bytes)):
            raise SecurityError(f"the operator {operator} is not available")
        if any(isinstance(value, int) and value.bit_length() > MAX_INT_BITS for value in (left, right)):
            raise SecurityError(f"it computes with integers of more than {MAX_INT_BITS} bits")
        for value, times in ((left, right), (right, left)):
            if operator == "*" and isinstance(value, str | list | tuple) and isinstance(times, int):
                if len(value) * times > MAX_REPEATED:
                    raise SecurityError(f"it repeats a value to more than {MAX_REPEATED} characters or items")
                _budget(context).spend(ITEM_WORK * len(value) * max(times, 0))
        _budget(context).spend(extent(left) + extent(right))
        return super().call_binop(context, operator, left, right)

    # ---- filters and tests

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if name not in PLAIN_FILTERS | ITEM_FILTERS | TEXT_FILTERS:
            return _refused(name)

        @pass_context
        def bounded(context: Context, value: Any = "", *args: Any, **kwargs: Any) -> Any:
            budget = _budget(context)
            budget.spend(CALL_WORK)
            if name in TEXT_FILTERS:
                value = _listed(value)
                budget.spend_on((value, args, kwargs))
                _spend_on_growth(budget, name, value, args, kwargs)
            elif name in ITEM_FILTERS:
                budget.spend(extent(value))
            result = function(*self._passed(context, function), value, *args, **kwargs)
            budget.spend(1 if name in PLAIN_FILTERS else extent(result))
            return result

        return bounded

    def _bounded_test(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @pass_context
        def bounded(context: Context, value: Any, other: Any) -> Any:
            budget = _budget(context)
            budget.spend(CALL_WORK)
            budget.spend_on(other)
            return function(value, other)

        return bounded

    def _passed(self, context: Context, function: Callable[..., Any]) -> tuple[Any, ...]:
        """What Jinja passes first to a filter that asks for it."""
        kind = _PassArg.from_obj(function)
        if kind is None:
            return ()
        return ({_PassArg.context: context, _PassArg.eval_context: context.eval_ctx}.get(kind, self),)


class _Weigher(NodeTransformer):
    """Sends through the sandbox what Jinja compiles to bare Python."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call_here("join_text", *node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        for operand in node.ops:
            if not isinstance(operand.expr, nodes.Const):
                operand.expr = _call_here("weigh", operand.expr)  # no comparison reads more than its right side
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _call_here("weigh_items", node) if isinstance(node.arg, nodes.Slice) else node


class _GenerationBlock(Extension):
    """`{% generation %}` marks what training learns from; here it is its content."""

    tags = {"generation"}  # noqa: RUF012, a ClassVar cannot override Jinja's declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _step_work(node: nodes.Node) -> int:
    """Of a turn, at most: what the loops in it do is theirs."""
    text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
    return text + NODE_WORK * sum(1 for _ in node.find_all(nodes.Node))


def _call_here(method: str, *arguments: nodes.Expr) -> nodes.Call:
    """A call of the sandbox's own `method` with the context and `arguments`."""
    function = nodes.EnvironmentAttribute(method)
    return nodes.Call(function, [nodes.ContextReference(), *arguments], [], None, None)


def _budget(context: Context) -> Budget:
    budget = context.parent[BUDGET]
    assert isinstance(budget, Budget)
    return budget


@pass_context
def _spend_on_output(context: Context, value: Any) -> Any:
    _budget(context).spend_on(value)
    return value


def _spend_on_method(budget: Budget, owner: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Before a method of `owner` is called; its arguments as they are to be passed."""
    args = tuple(_listed(value) for value in args)
    budget.spend(len(owner) * (2 if name in SPLITTING else 1))
    budget.spend_on(args)
    if name == "join" and args:
        _spend_on_growth(budget, "join", args[0], (owner,), {})
    elif name in GROWING:
        _spend_on_growth(budget, name, owner, args, {})
    return args


def _spend_on_growth(budget: Budget, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """For what takes or makes much more than it is given, which is weighed already."""
    if name == "join" and isinstance(value, Collection):
        separator = args[0] if args else kwargs.get("d", "")
        budget.spend(len(value) * size_of(separator, budget.work))
    elif name == "replace":
        old, new = _replacement(*args, **kwargs)
        budget.spend(str(value).count(old) * len(new))
    elif name in GROWING:
        budget.spend(sum(extent(value) * extent(sought) // 8 for sought in (*args, *kwargs.values())))


def _replacement(old: object = "", new: object = "", count: object = None) -> tuple[str, str]:
    return str(old), str(new)


def _listed(value: Any) -> Any:
    """A generator's items, so that they can be weighed."""
    return list(value) if hasattr(value, "__next__") else value


def _refused(name: str) -> Callable[..., Any]:
    @pass_context
    def refuse(context: Context, *args: Any, **kwargs: Any) -> NoReturn:
        raise SecurityError(f"the filter {name!r} is not available")

    return refuse


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))


def _strftime_now(layout: str) -> str:
    if len(layout) > MAX_LAYOUT_CHARS:
        raise SecurityError(f"its date layout has more than {MAX_LAYOUT_CHARS} characters")
    return datetime.now().strftime(layout)


@pass_context
def _to_json(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, without the HTML escapes of Jinja's own filter. Indents grow with the depth: they are weighed."""
    for space in (" " * min(indent, MAX_INDENT + 1) if isinstance(indent, int) else indent or "", *(separators or ())):
        if len(space) > MAX_INDENT:
            raise SecurityError(f"its JSON has an indent or a separator of more than {MAX_INDENT} characters")
    budget = _budget(context)
    budget.spend_on(value)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return encoder.encode(value)
    pieces: list[str] = []
    for piece in encoder.iterencode(value):
        budget.spend(PIECE_WORK + len(piece))
        pieces.append(piece)
    return "".join(pieces)

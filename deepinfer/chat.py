"""Messages to a prompt, through the chat template that comes with a model.

A template is foreign code: it runs in Jinja's immutable sandbox, where it reaches no internals, and within bounds on
its loops and its output. The memory of a single expression is not bounded, save that of `*`; there is no `**`.

Knows nothing of tokens, or of which model the template belongs to.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import repeat
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from deepinfer.errors import InvalidRequest, UnsupportedModel

MAX_STEPS: Final = 50_000  # turns of all loops and calls of all macros, together
MAX_PROMPT_CHARS: Final = 16 * 1024 * 1024
_STEPS: Final = " steps left"  # no name that a template can spell


class ChatTemplate:
    """A compiled chat template. Safe to render from several threads at once."""

    def __init__(self, source: str | None, *, bos_token: str = "", eos_token: str = "") -> None:
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = None if source is None else _Environment().from_string(source)
        except (TemplateError, RecursionError) as error:
            raise UnsupportedModel(f"the chat template does not compile: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt for `messages`, each of them with at least a role and a content."""
        checked = check_messages(messages)
        if self._template is None:
            raise InvalidRequest("messages", "this model has no chat template")
        variables: dict[str, Any] = {**self._tokens, "messages": checked, "tools": tools, "documents": None}
        variables |= {"add_generation_prompt": add_generation_prompt, _STEPS: repeat(None, MAX_STEPS)}
        try:
            return _joined(self._template.generate(variables))
        except InvalidRequest:
            raise
        except (SecurityError, OverflowError, RecursionError, MemoryError) as error:
            raise UnsupportedModel(f"the chat template was stopped: {error}") from None
        except Exception as error:  # foreign code may fail in any way
            raise InvalidRequest("messages", f"the chat template cannot render them: {error}") from error


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Copies of `messages` with plain text as content, or InvalidRequest that names the message at fault."""
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequest("messages", "expected a list of at least one message")
    return [_check_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _check_message(name: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(name, f"expected an object, not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{name}.role", "expected a string that is not empty")
    return {**message, "content": _check_content(f"{name}.content", message.get("content"))}


def _check_content(name: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidRequest(name, f"expected a string or a list of text parts, not {type(content).__name__}")
    return "".join(_check_part(f"{name}[{index}]", part) for index, part in enumerate(content))


def _check_part(name: str, part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidRequest(name, 'expected {"type": "text", "text": "..."}; only text is supported')


def _joined(pieces: Iterator[str]) -> str:
    prompt: list[str] = []
    num_chars = 0
    for piece in pieces:
        prompt.append(piece)
        num_chars += len(piece)
        if num_chars > MAX_PROMPT_CHARS:
            raise InvalidRequest("messages", f"the prompt is longer than {MAX_PROMPT_CHARS} characters")
    return "".join(prompt)


class _GenerationBlock(Extension):
    """`{% generation %}` marks what training learns from; here it is its content."""

    tags = {"generation"}  # noqa: RUF012, a ClassVar cannot override Jinja's declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The helpers and white-space rules of Hugging Face's templates, with bounds on the work."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationBlock])
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.filters["tojson"] = _to_json

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse, then make each loop and macro count its turns: no construct else can repeat itself."""
        template = super()._parse(source, name, filename)
        for node in template.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
            counted = nodes.EnvironmentAttribute("count_step")
            call = nodes.Call(counted, [nodes.ContextReference()], [], None, None, lineno=node.lineno)
            node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return template

    def count_step(self, context: Context) -> None:
        if next(context.parent[_STEPS], self) is self:
            raise SecurityError(f"its loops take more than {MAX_STEPS} turns")

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Raise at once, where Jinja would wait until the value is used."""
        raise SecurityError(f"it reaches for the attribute {attribute!r} of {type(obj).__name__!r}")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("the operator ** is not available")
        for value, times in ((left, right), (right, left)):
            if isinstance(value, str | list | tuple) and isinstance(times, int) and len(value) * times > MAX_STEPS:
                raise SecurityError(f"it repeats a value to more than {MAX_STEPS} characters or items")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: object) -> NoReturn:
    raise InvalidRequest("messages", str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

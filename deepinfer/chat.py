"""Messages to a prompt: what every way of doing it takes and gives, and the way of the chat templates in model folders.

A template is foreign code: it runs in a sandbox, where its work is bounded and it reaches no internals.

Knows nothing of tokens, or of which model the template belongs to. Models without a template: `deepseek_chat`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError

from deepinfer.errors import InvalidRequest, UnsupportedModel
from deepinfer.sandbox import BUDGET, Budget, Sandbox, TemplateRefusal

MAX_PROMPT_CHARS: Final = 16 * 1024 * 1024


class ChatOptions(NamedTuple):
    """How messages are to be answered. Made by `chat_options`; `None`: not asked for."""

    thinking: bool | None = None
    reasoning_effort: str | None = None
    tools: bytes | None = None
    """JSON, so that nobody changes them meanwhile."""
    tool_choice: bytes | None = None
    """JSON."""


NO_OPTIONS: Final = ChatOptions()


class ChatPrompt(NamedTuple):
    """Messages as a model reads them."""

    text: str
    encode: Callable[[], list[int]]
    """Its token ids. Takes its time with a long text."""


class ChatFormat(Protocol):
    """One model's way from messages to a prompt. Safe to use from several threads at once."""

    @property
    def is_known(self) -> bool:
        """Messages can be rendered at all."""

    def render(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> ChatPrompt:
        """The prompt for `messages`, ready for an answer. Raises `InvalidRequest`, which names the field."""


def chat_options(*, thinking: object, reasoning_effort: object, tools: object, tool_choice: object) -> ChatOptions:
    """What a caller gave, checked as far as that needs no model. Raises `InvalidRequest`."""
    if thinking is not None and not isinstance(thinking, bool):
        raise InvalidRequest("thinking", f"expected True or False, not {type(thinking).__name__}")
    if reasoning_effort is not None and not isinstance(reasoning_effort, str):
        raise InvalidRequest("reasoning_effort", f"expected a string, not {type(reasoning_effort).__name__}")
    if tools is not None and not (isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)):
        raise InvalidRequest("tools", "expected a list of objects")
    if tool_choice is not None and not isinstance(tool_choice, str | Mapping):
        raise InvalidRequest("tool_choice", f"expected a string or an object, not {type(tool_choice).__name__}")
    return ChatOptions(
        thinking,
        reasoning_effort,
        tools=as_json("tools", tools) if tools else None,
        tool_choice=None if tool_choice is None else as_json("tool_choice", tool_choice),
    )


def as_json(field: str, value: object) -> bytes:
    """Raises `InvalidRequest` for what JSON cannot say."""
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(field, f"cannot be written as JSON: {error}") from None


class TemplateFormat:
    """The way of a chat template. It gets messages only."""

    def __init__(self, template: ChatTemplate, encode: Callable[[str], list[int]]) -> None:
        """`encode` reads special tokens in the prompt as such, and adds none."""
        self._template = template
        self._encode = encode

    @property
    def is_known(self) -> bool:
        return self._template.is_there

    def render(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> ChatPrompt:
        for field, value in options._asdict().items():
            if value is not None:
                raise InvalidRequest(field, "this model has no such choice: its chat template gets messages only")
        text = self._template.render(messages)
        return ChatPrompt(text, lambda: self._encode(text))


class ChatTemplate:
    """A compiled chat template. Safe to render from several threads at once."""

    def __init__(self, source: str | None, *, bos_token: str = "", eos_token: str = "") -> None:
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = None if source is None else Sandbox().from_string(source)
        except (TemplateError, RecursionError) as error:
            raise UnsupportedModel(f"the chat template does not compile: {error}") from None

    @property
    def is_there(self) -> bool:
        return self._template is not None

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
        variables |= {"add_generation_prompt": add_generation_prompt, BUDGET: Budget([checked, tools])}
        try:
            return _joined(self._template.generate(variables))
        except InvalidRequest:
            raise
        except TemplateRefusal as refusal:
            raise InvalidRequest("messages", str(refusal)) from None
        except (SecurityError, OverflowError, RecursionError, MemoryError) as error:
            raise UnsupportedModel(f"the chat template was stopped: {error}") from None
        except Exception as error:  # foreign code may fail in any way
            raise InvalidRequest("messages", f"the chat template cannot render them: {error}") from error


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Copies of `messages` with plain text as content (`None` may stand beside tool calls).

    Raises `InvalidRequest`, which names the message at fault.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequest("messages", "expected a list of at least one message")
    return [_check_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _check_message(name: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(name, f"expected an object, not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{name}.role", "expected a string that is not empty")
    content = message.get("content")
    if content is not None or role != "assistant" or not message.get("tool_calls"):
        content = _check_content(f"{name}.content", content)
    return {**message, "content": content}


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

"""What a request demands of the form of its answer: a JSON Schema, any JSON object, a pattern, calls of tools.

The one place that turns it into sampling parameters. What cannot be enforced is refused: an answer that only happens to
have the form is worse than none. Where a tool is required, tools are strict, or an answer that calls none has a form,
calls are forced into their grammar; others are as the model makes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from deepinfer.http.fault import refused
from deepinfer.http.tool_calls import CannotEnforce, CannotEnforceForm, Tool

if TYPE_CHECKING:
    from deepseek_recipe import Conversation, ToolDefinition

    from deepinfer.http.fields import JsonFormat

_ANY_OBJECT: Final = {"type": "object"}


class WriteCalls(Protocol):
    """`calls_grammar` of a model."""

    def __call__(self, tools: Sequence[Tool], *, is_required: bool, form: Any = None) -> str: ...


class Constraint(NamedTuple):
    """What is demanded of one answer."""

    sampling: dict[str, Any]
    """Fields of `SamplingParams`."""
    names: Mapping[str, str]
    """What the API calls them."""


def constrained(
    conversation: Conversation,
    field: str,
    messages_format: JsonFormat | None,
    came: Mapping[str, Tool],
    write_calls: WriteCalls | None,
) -> Constraint:
    """Raises `HttpFault`; `field` is where the API has the response format.

    That of Messages comes by itself: the recipe does not read it, and it is not in the prompt therefore. `came` are the
    tools as they came: the recipe has changed strict ones, and does not read whether those of Messages are.
    `write_calls` is `None` for a model that calls none.

    The schema is as it came: the recipe's own `output_constraint` has lost the definitions of a strict one, and beside
    tools it is about calls alone. Where the model thinks, the engine enforces the form from `</think>` on.
    """
    form = conversation.response_format if messages_format is None else messages_format.type
    if form == "text":
        calls = {} if write_calls is None else _forced_calls(conversation, came, write_calls)
        return Constraint(calls, {"grammar": "tools"})
    if any(message.prefix for message in conversation.messages):
        raise refused(field, f"{field}: it cannot be enforced where the answer has begun with a prefix", "unsupported")
    if form == "regex":
        if conversation.tools:
            told = "it cannot be enforced beside tools, which may be called instead: give tool_choice none, or no tools"
            raise refused(field, f"{field}: {told}", "unsupported")
        return Constraint({"regex": conversation.response_regex}, {"regex": field})
    schema = _schema(conversation, form, messages_format)
    if conversation.tools and write_calls is not None:
        calls = _forced_calls(conversation, came, write_calls, schema, field)
        return Constraint(calls, {"grammar": "tools" if _is_call_required(conversation) else field})
    return Constraint({"json_schema": schema}, {"json_schema": field})


def _schema(conversation: Conversation, form: str, messages_format: JsonFormat | None) -> Any:
    if form == "json_object":
        return _ANY_OBJECT
    return conversation.response_schema if messages_format is None else messages_format.schema


def _forced_calls(
    conversation: Conversation, came: Mapping[str, Tool], write_calls: WriteCalls, form: Any = None, field: str = ""
) -> dict[str, Any]:
    """`form`: the schema of an answer that calls nothing, which the API has in `field`; `None` for any text."""
    is_required = _is_call_required(conversation)
    try:
        tools = [_as_it_came(tool, came) for tool in conversation.tools]
        if form is None and not is_required and not any(tool.is_strict for tool in tools):
            return {}
        return {"grammar": write_calls(tools, is_required=is_required, form=form)}
    except CannotEnforce as error:
        at_fault = field if isinstance(error, CannotEnforceForm) else "tools"
        raise refused(at_fault, f"{at_fault}: {error}", "unsupported") from None


def _is_call_required(conversation: Conversation) -> bool:
    return conversation.tool_choice == "required"


def _as_it_came(tool: ToolDefinition, came: Mapping[str, Tool]) -> Tool:
    if tool.name in came and came[tool.name].is_strict:
        return came[tool.name]
    if tool.strict:
        raise CannotEnforce(f"{tool.name}: a tool of its kind cannot be strict")
    return Tool(tool.name, tool.parameters, is_strict=False)

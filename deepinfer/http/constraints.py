"""What a request demands of the form of its answer: a JSON Schema, any JSON object, a pattern, strict tools.

The one place that turns it into sampling parameters. What cannot be enforced is refused: an answer that only happens to
have the form is worse than none. Calls of tools that are not strict are as the model makes them, also where one is
required: then the prompt itself begins the call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from deepinfer.http.fault import refused

if TYPE_CHECKING:
    from deepseek_recipe import Conversation

    from deepinfer.http.fields import JsonFormat

FIELDS: Final = ("json_schema", "regex")
"""Those of `SamplingParams` that come of a response format."""
_ANY_OBJECT: Final = {"type": "object"}


def constrained_sampling(
    conversation: Conversation, field: str, messages_format: JsonFormat | None = None
) -> dict[str, Any]:
    """Fields of `SamplingParams`. Raises `HttpFault`; `field` is where the API has the response format.

    That of Messages comes by itself: the recipe does not read it, and it is not in the prompt therefore.

    The schema is as it came: the recipe's own `output_constraint` has lost the definitions of a strict one. Where the
    model thinks, the engine enforces the form from `</think>` on.
    """
    if any(tool.strict for tool in conversation.tools):
        raise refused("tools", "tools: the arguments of strict ones cannot be enforced yet", "unsupported")
    form = conversation.response_format if messages_format is None else messages_format.type
    if form == "text":
        return {}
    if conversation.tools:
        told = "it cannot be enforced beside tools, which may be called instead: give tool_choice none, or no tools"
        raise refused(field, f"{field}: {told}", "unsupported")
    if any(message.prefix for message in conversation.messages):
        raise refused(field, f"{field}: it cannot be enforced where the answer has begun with a prefix", "unsupported")
    if form == "regex":
        return {"regex": conversation.response_regex}
    if form == "json_object":
        return {"json_schema": _ANY_OBJECT}
    return {"json_schema": conversation.response_schema if messages_format is None else messages_format.schema}

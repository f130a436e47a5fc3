"""What a request demands of the form of its answer: a JSON schema, a pattern, strict tools.

The one place that turns it into sampling parameters. Nothing enforces a form yet, so a demand is refused: an answer
that only happens to have the form is worse than none. Calls of tools that are not strict are as the model makes them,
also where one is required: then the prompt itself begins the call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepinfer.http.fault import refused

if TYPE_CHECKING:
    from deepseek_recipe import ConversationRequest


def constrained_sampling(request: ConversationRequest, field: str, schema: Any = None) -> dict[str, Any]:
    """Fields of `SamplingParams`. Raises `HttpFault`; `field` is where the API has the response format.

    `schema` is one that the recipe does not read: that of Messages, and not in the prompt therefore.

    The schema to compile is `request.conversation.response_schema`, as it came: the one in
    `inference_options.output_constraint` has lost its definitions. In thinking mode it holds behind `</think>`.
    """
    conversation = request.conversation
    if conversation.response_format != "text" or schema:
        raise refused(field, f"{field}: answers of a given form are not served yet", "unsupported")
    if any(tool.strict for tool in conversation.tools):
        raise refused("tools", "tools: strict ones are not served yet", "unsupported")
    return {}

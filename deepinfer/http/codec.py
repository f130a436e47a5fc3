"""Bodies of three APIs to prompts, and answers back to them, for one model: by DeepSeek's own `deepseek-recipe`.

It reads /v1/chat/completions, /v1/responses and /v1/messages into one form of conversation, and writes their events and
responses. A DeepSeek model gets its conversation as the recipe renders it, and its answer is parsed token by token. Any
other model gets it by its own chat template, and its answer is text. What the recipe ignores or does not know is
handled here: names of models, `max_completion_tokens`, the role `developer`, `n`.

Knows nothing of HTTP or engines: everything here is pure, and may run in a thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from deepinfer.admission import ModelLimits, check_characters
from deepinfer.chat import NO_OPTIONS
from deepinfer.deepseek_chat import DeepseekFormat, import_recipe
from deepinfer.errors import ContextLengthExceeded, InvalidRequest
from deepinfer.grammar import grammar_source
from deepinfer.http.constraints import WriteCalls, constrained
from deepinfer.http.fault import HttpFault, fault_of, refused
from deepinfer.http.fields import (
    MAX_VALUES,
    ChatFields,
    MessagesFields,
    ResponsesFields,
    asked_tools,
    check_lists,
    check_served,
    check_values,
    decode_fields,
    decode_object,
)
from deepinfer.http.tool_calls import Tool, calls_grammar
from deepinfer.text import TextPipeline
from deepinfer_protocol import SamplingParams

if TYPE_CHECKING:
    from deepseek_recipe import Conversation, ConversationRequest, ConversionOptions, ImageSource, ResponsesEcho

Fields = ChatFields | ResponsesFields | MessagesFields


class Api(NamedTuple):
    """One of the three."""

    name: str
    request: str
    """The recipe's class for a body."""
    response: str
    fields: type[Fields]
    id_prefix: str
    format_field: str
    sound: Mapping[str, Raw]
    """With a model, a body that nothing is wrong with."""


_SOUND_MESSAGES: Final = Raw(b'[{"role":"user","content":"."}]')
CHAT: Final = Api(
    "chat",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    ChatFields,
    "chatcmpl-",
    "response_format",
    {"messages": _SOUND_MESSAGES},
)
RESPONSES: Final = Api(
    "responses",
    "ResponsesRequest",
    "ResponsesResponse",
    ResponsesFields,
    "resp_",
    "text.format",
    {"input": Raw(b'"."')},
)
MESSAGES: Final = Api(
    "messages",
    "MessagesRequest",
    "MessagesResponse",
    MessagesFields,
    "msg_",
    "output_config.format",
    {"messages": _SOUND_MESSAGES, "max_tokens": Raw(b"1")},
)


class Converted(NamedTuple):
    """A body, as far as it needs no tokenizer."""

    fields: Fields
    request: ConversationRequest
    tools: Mapping[str, Tool]
    """As they came."""
    echo: ResponsesEcho | None = None
    """What a response of /v1/responses repeats of its request."""
    namespaces: dict[str, tuple[str, str]] | None = None
    """Where tools came in groups: the group and the name within it, by what the model calls the tool."""


class Asked(NamedTuple):
    """What a body asks for, ready for an engine."""

    api: Api
    converted: Converted
    prompt: list[int]
    params: SamplingParams
    names: Mapping[str, str]
    """What the API calls fields of them."""


class Codec:
    """Of one model."""

    def __init__(self, text: TextPipeline | None, limits: ModelLimits, names: Sequence[str]) -> None:
        """Requests name the model by one of `names`. Raises `ModelError` where the recipe is not installed."""
        self.recipe: Final = import_recipe()
        self._text = text
        self._limits = limits
        self.names: Final = tuple(names)
        self.deepseek: Final = text.chat if text is not None and isinstance(text.chat, DeepseekFormat) else None
        self._options = self._conversion_options()
        self._write_calls = self._calls_of_the_model()
        self._refusals = (self.recipe.ConversionError, ValueError, OverflowError, RecursionError)

    def _calls_of_the_model(self) -> WriteCalls | None:
        if self.deepseek is None:
            return None
        [mark_id] = self.deepseek.tokenizer.encode(self.recipe.SpecialToken.Dsml.default_str())
        return partial(calls_grammar, family=self.deepseek.family, mark_id=mark_id)

    def _conversion_options(self) -> ConversionOptions:
        """Of a model that is not DeepSeek's the sampling is as it was asked for, which is so with the older one."""
        versions = self.recipe.ModelVersion
        is_newer = self.deepseek is not None and self.deepseek.family == "v4.1"
        version = versions.DeepseekV41Flash if is_newer else versions.DeepseekV4Pro
        options: ConversionOptions = self.recipe.ConversionOptions(
            default_thinking_mode=self.deepseek is not None and self.deepseek.thinks
        )
        return options.with_model_versions_by_name(dict.fromkeys(self.names, version))

    # ---- from a body to a prompt

    def ask(self, api: Api, body: bytes) -> Asked:
        """All of it. Raises `HttpFault` and `InvalidRequest`, which name the field."""
        converted = self.convert(api, body)
        fields = converted.fields
        config = fields.output_config if isinstance(fields, MessagesFields) else None
        form = None if config is None else config.format
        conversation = converted.request.conversation
        constraint = constrained(conversation, api.format_field, form, converted.tools, self._write_calls)
        prompt = self.encode(converted.request)
        params = _with_text(self._sampling(converted, constraint.sampling, len(prompt)), constraint.names)
        return Asked(api, converted, prompt, params, constraint.names)

    def convert(self, api: Api, body: bytes) -> Converted:
        """A body as the recipe has it. Raises `HttpFault`, which names the field."""
        check_values(body, MAX_VALUES)
        fields = decode_fields(body, api.fields)
        self.check_model(fields.model)
        raw = decode_object(body)
        check_served(raw, api.fields)
        check_lists(raw)
        if isinstance(fields, ChatFields):
            _amend_chat(raw, fields)
        try:
            return self._convert(api, fields, raw)
        except self._refusals as error:
            if getattr(error, "status_code", 400) != 400:
                raise HttpFault(500, "internal", "the request could not be read") from None
            raise refused(self._field_at_fault(api, raw), str(error)) from None

    def _convert(self, api: Api, fields: Fields, raw: Mapping[str, Raw]) -> Converted:
        request = getattr(self.recipe, api.request)(msgspec.json.encode(raw))
        if api is not RESPONSES:
            return Converted(fields, request.convert(self._options), asked_tools(raw))
        namespaces, echo = request.namespace_tool_map(self._options), request.echo()
        return Converted(fields, request.convert(self._options), asked_tools(raw), echo, namespaces)

    def check_model(self, name: str) -> None:
        if name not in self.names:
            known = ", ".join(self.names)
            raise HttpFault(404, "model_not_found", f"model: {name!r} is not served here, {known} is", "model")

    def _field_at_fault(self, api: Api, raw: Mapping[str, Raw]) -> str | None:
        """The recipe names none: the first that is refused in a body that is sound without it."""
        sound = {"model": raw["model"], **api.sound}
        for name in [*api.sound, *raw]:
            beside = {"tools": raw["tools"]} if name == "tool_choice" and "tools" in raw else {}
            try:
                body = {**sound, **beside, name: raw[name]} if name in raw else {"model": raw["model"]}
                getattr(self.recipe, api.request)(msgspec.json.encode(body)).convert(self._options)
            except self._refusals:
                return name
        return None

    def encode(self, request: ConversationRequest) -> list[int]:
        """The prompt. Raises `HttpFault` and `InvalidRequest`."""
        conversation = request.conversation
        if self.deepseek is None:
            return self._encode_by_template(conversation)
        rendered = self.deepseek.rendered(conversation)
        if rendered.image_sources:
            raise _no_images(rendered.image_sources[0])
        self.check_characters("messages", len(rendered.prompt))
        return self.deepseek.encode(conversation)

    def check_characters(self, field: str, num_characters: int) -> None:
        """As `admission` has it, of this model. Raises `ContextLengthExceeded`."""
        check_characters(
            field, num_characters, self._limits, 1 if self._text is None else self._text.max_token_characters
        )

    def _encode_by_template(self, conversation: Conversation) -> list[int]:
        if self._text is None:
            raise InvalidRequest("messages", "this model has no tokenizer: /v1/completions takes token ids")
        if conversation.thinking_mode:
            raise refused("thinking", "thinking: this model has no such choice", "unsupported")
        messages = conversation.messages
        if conversation.tools or any(message.tool_calls for message in messages):
            raise refused("tools", "tools: this model has none", "unsupported")
        if any(message.prefix for message in messages):
            raise refused("messages", "messages: this model cannot go on with a prefix", "unsupported")
        for image in (image for message in messages for image in message.image_sources):
            raise _no_images(image)
        said = [{"role": message.role, "content": message.content} for message in messages]
        prompt = self._text.render(said, NO_OPTIONS)
        self.check_characters("messages", len(prompt.text))
        return prompt.encode()

    def _sampling(self, converted: Converted, constraint: dict[str, Any], num_prompt: int) -> SamplingParams:
        """What the recipe made of the body, never the body's own values: a model may have rules of its own."""
        fields, request = converted.fields, converted.request
        options, own = request.inference_options, fields.sampling()
        if options.logprobs:
            own["logprobs"] = options.top_logprobs or 0
        return SamplingParams(
            max_tokens=self.max_tokens(request, num_prompt),
            temperature=1.0 if options.temperature is None else options.temperature,
            top_p=1.0 if options.top_p is None else options.top_p,
            seq_seed=options.seed,
            n=fields.n or 1,
            detokenize=self.deepseek is None,
            **own,
            **constraint,
        )

    def max_tokens(self, request: ConversationRequest, num_prompt: int) -> int:
        """As the recipe has it, which has room for one token where there is none. Raises `ContextLengthExceeded`."""
        limit = self._limits.max_length
        if num_prompt >= limit:
            raise ContextLengthExceeded("messages", f"{num_prompt} tokens, {limit} is the model's limit")
        try:
            return request.resolve_max_tokens(num_prompt, limit)
        except self.recipe.ConversionError as error:
            raise ContextLengthExceeded("max_tokens", str(error)) from None


def _with_text(params: SamplingParams, names: Mapping[str, str]) -> SamplingParams:
    """With a schema as text: a large one is written and measured here, not where it keeps others waiting.

    Raises `HttpFault`.
    """
    try:
        source = grammar_source(params)
    except InvalidRequest as error:
        raise fault_of(error, names) from None
    return params if source is None else replace(params, **{source.field: source.text})


def _no_images(image: ImageSource) -> HttpFault:
    return refused(image.path.lstrip(".") or "messages", "unsupported: image", "unsupported")


def _amend_chat(raw: dict[str, Raw], fields: ChatFields) -> None:
    """What OpenAI's clients say and the recipe does not know."""
    raw.pop("n", None)
    if fields.max_completion_tokens is not None:
        if fields.max_tokens not in (None, fields.max_completion_tokens):
            raise refused("max_completion_tokens", "max_completion_tokens: it is another number than max_tokens")
        raw["max_tokens"] = raw.pop("max_completion_tokens")
    messages = raw.get("messages")
    if messages is not None and b"developer" in bytes(messages):
        raw["messages"] = _with_system_for_developer(messages)


def _with_system_for_developer(messages: Raw) -> Raw:
    try:
        decoded = msgspec.json.decode(messages, type=list[dict[str, Raw]])
    except (msgspec.DecodeError, RecursionError):
        return messages  # the recipe says what is wrong with them
    for message in decoded:
        if bytes(message.get("role", b"")) == b'"developer"':
            message["role"] = Raw(b'"system"')
    return Raw(msgspec.json.encode(decoded))

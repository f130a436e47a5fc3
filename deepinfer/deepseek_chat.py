"""Messages to a prompt for DeepSeek-V4.1 and V4 models, by DeepSeek's own `deepseek-recipe`.

These models come without a chat template. Text in messages never becomes a special token, however it is spelt: the
recipe encodes it with the bare vocabulary, and puts the special ids where its own rendering has them. (Marks of
grounding, `<｜ref｜>` and the like, are an exception in what an assistant said: the model itself says them so.)
Knows nothing of requests' lives, and nothing of sampling: what the recipe would make of temperatures and limits is a
server's business.
The recipe is imported when such a model is opened, and not before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from deepinfer.chat import ChatOptions, ChatPrompt, as_json
from deepinfer.errors import InvalidRequest, ModelError, ModelFileError
from deepinfer.model_files import read_model_file

if TYPE_CHECKING:
    from deepseek_recipe import Conversation, RenderedPrompt, Tokenizer

Family = Literal["v4.1", "v4"]

ROLES: Final = ("system", "user", "assistant", "tool", "latest_reminder")
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max")
"""`none` turns thinking off, unless `thinking` says otherwise; minimal is low, medium is high, ultra is max."""

_FAMILIES: Final[Mapping[object, Family]] = {
    "deepseek_v41": "v4.1",
    "DeepseekV41ForCausalLM": "v4.1",
    "deepseek_v4": "v4",
    "DeepseekV4ForCausalLM": "v4",
}
_MODEL: Final[Mapping[Family, str]] = {"v4.1": "DeepSeek-V4.1-Flash", "v4": "DeepSeek-V4-Pro"}
"""The names by which the recipe chooses a rendering."""
_SOUND: Final = b'[{"role": "system", "content": "."}, {"role": "user", "content": "."}]'


class _Config(msgspec.Struct):
    model_type: Any = None
    architectures: Any = None
    kv_source_layers: Any = None
    """Only the file beside V4.1's official inference code has it, which names no architecture."""


def deepseek_family(folder: Path) -> Family | None:
    """Which of them the config.json in `folder` describes, if any. Raises `ModelFileError` for one that is no JSON."""
    file = folder / "config.json"
    content = read_model_file(file)
    if content is None:
        return None
    try:
        config = msgspec.json.decode(content, type=_Config)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelFileError(str(file), f"cannot be read: {error}") from None
    if config.kv_source_layers is not None:
        return "v4.1"
    architectures = config.architectures if isinstance(config.architectures, list) else []
    names = [name for name in (config.model_type, *architectures) if isinstance(name, str)]
    return next((_FAMILIES[name] for name in names if name in _FAMILIES), None)


class DeepseekFormat:
    """The way of DeepSeek-V4.1 or V4 models. Safe to use from several threads at once."""

    is_known: Final = True

    def __init__(self, family: Family, tokenizer: Path) -> None:
        """Reads a tokenizer.json, and what the tokenizer_config.json beside it says of `thinking`: false is for a model
        that was never taught to, and does so only where a request asks for it.

        Raises `ModelError`, for want of the recipe or of a special token as well.
        """
        self._recipe = recipe = import_recipe()
        self.family: Final = family
        self._model = _MODEL[family]
        encoding = recipe.DeepseekV41Encoding() if family == "v4.1" else recipe.DeepseekV4Encoding()
        try:
            self.tokenizer: Tokenizer = recipe.Tokenizer.from_file(str(tokenizer))
            self._encoding = encoding.with_tokenizer(self.tokenizer)
            self._encoding.encode(self._convert(_SOUND, ChatOptions(thinking=True)))
        except RuntimeError as error:
            raise ModelFileError(str(tokenizer), f"not a tokenizer of {self._model}: {error}") from None
        self.thinks = _thinks(tokenizer.with_name("tokenizer_config.json"))

    def render(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> ChatPrompt:
        """The prompt for `messages`, ready for an answer. Raises `InvalidRequest`, which names the field."""
        _check_messages(messages)
        if not self.thinks and options.thinking is None and options.reasoning_effort is None:
            options = options._replace(thinking=False)
        _check_options(options)
        body = as_json("messages", messages)
        try:
            conversation = self._convert(body, options)
        except (self._recipe.ConversionError, ValueError) as error:
            raise InvalidRequest(self._field_at_fault(options), str(error)) from None
        text = self._encoding.render_conversation(conversation).prompt
        return ChatPrompt(text, lambda: self._encoding.encode(conversation))

    def rendered(self, conversation: Conversation) -> RenderedPrompt:
        """The prompt of a conversation that the recipe made of a request, as text, and the images in it."""
        prompt: RenderedPrompt = self._encoding.render_conversation(conversation)
        return prompt

    def encode(self, conversation: Conversation) -> list[int]:
        """The token ids of the same."""
        ids: list[int] = self._encoding.encode(conversation)
        return ids

    def _convert(self, messages: bytes, options: ChatOptions) -> Conversation:
        """Raises `ConversionError` and `ValueError`."""
        body: dict[str, Any] = {"model": self._model, "messages": msgspec.Raw(messages)}
        if options.thinking is not None:
            body["thinking"] = {"type": "enabled" if options.thinking else "disabled"}
        if options.reasoning_effort is not None:
            body["reasoning_effort"] = options.reasoning_effort
        if options.tools is not None:
            body["tools"] = msgspec.Raw(options.tools)
        if options.tool_choice is not None:
            body["tool_choice"] = msgspec.Raw(options.tool_choice)
        request = self._recipe.ChatCompletionRequest(msgspec.json.encode(body))
        conversation: Conversation = request.convert(self._recipe.ConversionOptions()).conversation
        return conversation

    def _field_at_fault(self, options: ChatOptions) -> str:
        """The recipe names none: the first that is refused beside messages that are sound."""
        for field, fewer in (("tools", options._replace(tool_choice=None)), ("tool_choice", options)):
            try:
                self._convert(_SOUND, fewer)
            except (self._recipe.ConversionError, ValueError):
                return field
        return "messages"


class _TokenizerConfig(msgspec.Struct):
    thinking: Any = None


def _thinks(file: Path) -> bool:
    """Does the model think where nobody says anything of it? Raises `ModelFileError`."""
    content = read_model_file(file)
    if content is None:
        return True
    try:
        return msgspec.json.decode(content, type=_TokenizerConfig).thinking is not False
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelFileError(str(file), f"cannot be read: {error}") from None


def import_recipe() -> ModuleType:
    """Raises `ModelError` where it is not installed."""
    try:
        import deepseek_recipe
    except ImportError as error:
        raise ModelError(
            "DeepSeek's models need deepseek-recipe for their prompts: pip install 'deepinfer-runtime[deepseek]'"
            f" ({error})"
        ) from None
    return deepseek_recipe


def _check_messages(messages: object) -> None:
    """What the recipe would not name, or would serve otherwise than we can. It checks the rest."""
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequest("messages", "expected a list of at least one message")
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}]", message)


def _check_message(name: str, message: object) -> None:
    if not isinstance(message, Mapping):
        raise InvalidRequest(name, f"expected an object, not {type(message).__name__}")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise InvalidRequest(f"{name}.role", _unknown(role, ROLES))
    if content is None and role == "assistant":
        return  # beside tool calls, which the recipe looks for
    if not isinstance(content, str | list | tuple):
        raise InvalidRequest(f"{name}.content", f"expected a string or a list, not {type(content).__name__}")
    for index, part in enumerate(content if not isinstance(content, str) else ()):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "image_url":
            raise InvalidRequest(f"{name}.content[{index}]", "unsupported: image")
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{name}.content[{index}]", 'expected {"type": "text", "text": "..."}')


def _check_options(options: ChatOptions) -> None:
    effort = options.reasoning_effort
    if effort is not None and effort not in EFFORTS:
        raise InvalidRequest("reasoning_effort", _unknown(effort, EFFORTS))
    if options.tool_choice in (None, b'"auto"', b'"none"'):
        return
    if options.tools is None:
        raise InvalidRequest("tool_choice", "there are no tools to choose from")
    thinks = options.thinking if options.thinking is not None else effort != "none"
    if thinks:
        raise InvalidRequest("tool_choice", 'a model that thinks takes "auto" or "none": thinking=False takes others')


def _unknown(value: object, known: Sequence[str]) -> str:
    came = repr(value[:40]) if isinstance(value, str) else type(value).__name__
    return f"{came}: expected one of {', '.join(known)}"

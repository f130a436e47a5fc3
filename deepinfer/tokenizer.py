"""Text to token ids and back, read from a GGUF file or from a model folder, with the ids that end a text.

Knows nothing of streaming (see `detokenizer`), of prompts and roles (see `chat`), or of the model that gives the ids
their meaning.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from deepinfer.errors import InvalidRequest, ModelFileError, UnsupportedModel
from deepinfer.model_files import read_model_file

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3: Final = (_WORDS % r"\p{N}{1,3}",)
_QWEN2: Final = (_WORDS % r"\p{N}",)

# GGUF names the pre-tokenizer instead of holding it: each pattern in turn splits what the ones before it left.
PRE_TOKENIZERS: Final[dict[str, tuple[str, ...]]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "deepseek-v3": (
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        (
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
    ),
}
_GGUF_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_GGUF_STRING, _GGUF_ARRAY = 8, 9
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # GGUF token types


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads at once."""

    def __init__(
        self,
        backend: Backend,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
        add_bos: bool = False,
    ) -> None:
        # A tokenizer.json may carry the truncation and padding of its training; a prompt must be encoded whole.
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.chat_template = chat_template
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), 1 + max(added, default=-1))
        self._bos_ids = [bos_token_id] if add_bos and bos_token_id is not None else []

    @classmethod
    def from_model(cls, path: Path) -> Tokenizer:
        """Read the tokenizer of the model at `path`: a GGUF file, or a folder that holds a tokenizer.json."""
        if path.is_dir():
            return cls(**_read_folder(path))
        return cls(**_gguf_arguments(path, _read_gguf(path)))

    @property
    def is_byte_level(self) -> bool:
        """Whether each token stands for bytes, whatever its neighbours are."""
        return isinstance(self._backend.decoder, decoders.ByteLevel)

    @property
    def reasoning_ids(self) -> tuple[int, int] | None:
        """The tokens between which a model thinks, if its vocabulary has such."""
        ids = {token.content: token_id for token_id, token in self._backend.get_added_tokens_decoder().items()}
        return (ids["<think>"], ids["</think>"]) if {"<think>", "</think>"} <= ids.keys() else None

    def to_json(self) -> str:
        """As a tokenizer.json."""
        return self._backend.to_str()

    @property
    def bos_token(self) -> str:
        return self._text_of(self.bos_token_id)

    @property
    def eos_token(self) -> str:
        return self._text_of(next(iter(self.eos_token_ids), None))

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id out of the vocabulary."""
        return self._backend.id_to_token(token_id)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Special tokens spelt out in `text` become their ids; `add_special_tokens` puts BOS and the like around it."""
        try:
            # `encode` holds the GIL throughout; a batch, even of one, does not, so the event loop runs meanwhile.
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError:
            raise InvalidRequest("prompt", "expected text that is valid Unicode, without lone surrogates") from None
        ids = encoding.ids
        if add_special_tokens and self._bos_ids and ids[:1] != self._bos_ids:
            return self._bos_ids + ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Bytes that are no valid UTF-8 become U+FFFD; ids out of the vocabulary are left out."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def _text_of(self, token_id: int | None) -> str:
        return "" if token_id is None else self.token(token_id) or ""


# A model folder, as Hugging Face lays it out


def _read_folder(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer.json"
    text = _read_text(file)
    if text is None:
        raise ModelFileError(str(file), "no such file")
    try:
        backend = Backend.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(str(file), f"not a tokenizer: {error}") from None
    return {"backend": backend, **_read_settings(folder, backend)}


def _read_settings(folder: Path, backend: Backend) -> dict[str, Any]:
    settings = _read_json(folder / "tokenizer_config.json")
    generation, model = _read_json(folder / "generation_config.json"), _read_json(folder / "config.json")
    named = [_named_id(backend, settings.get(key)) for key in ("bos_token", "eos_token")]
    bos, eos = (
        [*own, *_listed(generation.get(key)), *_listed(model.get(key))]
        for own, key in zip(named, ("bos_token_id", "eos_token_id"), strict=True)
    )
    return {
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": eos,
        "chat_template": _read_text(folder / "chat_template.jinja") or _default_template(settings.get("chat_template")),
        "add_bos": settings.get("add_bos_token") is True,
    }


def _read_text(file: Path) -> str | None:
    content = read_model_file(file)
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError as error:
        raise ModelFileError(str(file), str(error)) from None


def _read_json(file: Path) -> dict[str, Any]:
    text = _read_text(file)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(str(file), f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFileError(str(file), f"expected a JSON object, not {type(value).__name__}")
    return value


def _named_id(backend: Backend, token: object) -> list[int]:
    """A token is written as its text, or as an object with its text under `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    token_id = backend.token_to_id(content) if isinstance(content, str) else None
    return [] if token_id is None else [token_id]


def _listed(value: object) -> list[int]:
    """One id, several ids, or null."""
    return [item for item in (value if isinstance(value, list) else [value]) if type(item) is int]


def _default_template(value: object) -> str | None:
    if isinstance(value, list):  # several templates, each with a name
        value = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}.get("default")
    return value if isinstance(value, str) else None


# GGUF


class _GgufHeader:
    """Reads the fields at the head of a GGUF file, and nothing behind them."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = 0

    def fields(self) -> dict[str, Any]:
        magic, version, _num_tensors, num_fields = self._take("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"expected GGUF version 2 or 3, not {magic!r} version {version}")
        return {self._string(): self._value(*self._take("I")) for _ in range(num_fields)}

    def _take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{layout}", self._data, self._position)
        self._position += struct.calcsize(f"<{layout}")
        return values

    def _string(self) -> str:
        [size_bytes] = self._take("Q")
        [raw] = self._take(f"{size_bytes}s")
        return str(raw, "utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _GGUF_STRING:
            return self._string()
        if kind != _GGUF_ARRAY:
            return self._take(_GGUF_SCALARS[kind])[0]
        item_kind, num_items = self._take("IQ")
        if item_kind in _GGUF_SCALARS:
            return self._take(f"{num_items}{_GGUF_SCALARS[item_kind]}")
        return [self._value(item_kind) for _ in range(num_items)]


def _read_gguf(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _GgufHeader(data).fields()
    except OSError as error:
        raise ModelFileError(str(file), error.strerror or str(error)) from None
    except (struct.error, ValueError, KeyError, RecursionError) as error:
        raise ModelFileError(str(file), f"no readable GGUF header: {error}") from None


def _gguf_arguments(file: Path, fields: dict[str, Any]) -> dict[str, Any]:
    def field(name: str, default: Any = None) -> Any:
        return fields.get(f"tokenizer.ggml.{name}", default)

    missing = [name for name in ("model", "tokens", "token_type", "merges") if field(name) is None]
    if "model" not in missing and field("model") != "gpt2":
        raise UnsupportedModel(f"the GGUF tokenizer model {field('model')!r} is not supported, only 'gpt2' (BPE)")
    if missing:
        raise ModelFileError(str(file), f"no tokenizer.ggml.{missing[0]} in it")
    pre = field("pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise UnsupportedModel(f"the GGUF pre-tokenizer {pre!r} is not supported, only {', '.join(PRE_TOKENIZERS)}")
    try:
        backend = _byte_level_bpe(PRE_TOKENIZERS[pre], field("tokens"), field("token_type"), field("merges"))
    except (ValueError, TypeError) as error:
        raise ModelFileError(str(file), f"no usable tokenizer: {error}") from None
    return {
        "backend": backend,
        "bos_token_id": field("bos_token_id"),
        "eos_token_ids": _listed([field(name) for name in ("eos_token_id", "eot_token_id", "eom_token_id")]),
        "chat_template": fields.get("tokenizer.chat_template"),
        "add_bos": field("add_bos_token", PRE_TOKENIZERS[pre] is _LLAMA3),
    }


def _byte_level_bpe(patterns: tuple[str, ...], tokens: list[str], kinds: Sequence[int], merges: list[str]) -> Backend:
    backend = Backend(_bpe(tokens, merges, ignore_merges=patterns is _LLAMA3))
    if patterns is _QWEN2:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    typed = list(zip(tokens, kinds, strict=True))
    backend.add_special_tokens([_added(token) for token, kind in typed if kind in (_UNKNOWN, _CONTROL)])
    backend.add_tokens([_added(token) for token, kind in typed if kind == _USER_DEFINED])
    return backend


def _bpe(tokens: list[str], merges: list[str], *, ignore_merges: bool) -> models.BPE:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        return models.BPE(vocab, pairs, ignore_merges=ignore_merges)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"tokens and merges disagree: {error}") from None


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)

"""Token ids to text, piece by piece: whole characters only, each once, and none of the prompt.

The text of an output is what `decode(prompt + output)` has beyond its common start with `decode(prompt)`. So a
SentencePiece space at the start of an output is kept when the prompt has text before it, and stripped when it has none;
a character that the prompt began and the output completes comes whole, with the output.

Knows nothing of stop strings or of how tokens come about.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from codecs import utf_8_decode
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from deepinfer.tokenizer import Tokenizer

_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_MAX_PENDING_BYTES: Final = 3  # of a UTF-8 character that is not complete


class IncrementalDetokenizer(ABC):
    """The text of one growing output. Made by a `DetokenizerFactory`."""

    __slots__ = ()

    @abstractmethod
    def push_one(self, token_id: int) -> str:
        """Return the text that `token_id` completes."""

    @abstractmethod
    def flush(self) -> str:
        """Return what is still held; bytes that never became a character come as U+FFFD."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that `token_ids` complete."""
        return "".join(map(self.push_one, token_ids))


class DetokenizerFactory:
    """Makes the detokenizers of one tokenizer; what they share is computed here, once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        if tokenizer.is_byte_level:
            self._texts, self._fragments = _byte_level_tables(tokenizer)
            self._texts_without_special = self._texts | dict.fromkeys(tokenizer.special_ids, "")

    def create(self, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """A detokenizer for what follows `prompt_ids`, of which it reads only the end."""
        if not self._tokenizer.is_byte_level:
            return ContextDetokenizer(self._tokenizer, prompt_ids, skip_special_tokens)
        texts = self._texts_without_special if skip_special_tokens else self._texts
        return ByteLevelDetokenizer(texts, self._fragments, prompt_ids)


class ByteLevelDetokenizer(IncrementalDetokenizer):
    """Each token is a run of bytes: almost always whole characters, which one look-up gives."""

    __slots__ = ("_fragments", "_pending", "_starts_in_prompt", "_texts")

    def __init__(self, texts: dict[int, str], fragments: dict[int, bytes], prompt_ids: Sequence[int]) -> None:
        self._texts = texts  # tokens of whole characters
        self._fragments = fragments  # all other tokens
        self._pending = b""  # the start of a character
        self._starts_in_prompt = False
        if prompt_ids and not texts.get(prompt_ids[-1]):
            self._pending = _unfinished(self._end_of(prompt_ids))
            self._starts_in_prompt = bool(self._pending)

    def push_one(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is not None and not self._pending:
            return text
        return self._decode(self._bytes_of(token_id), final=False)

    def flush(self) -> str:
        return self._decode(b"", final=True)

    def _end_of(self, prompt_ids: Sequence[int]) -> bytes:
        """As many bytes from the end as can matter: to the last whole character, or more than a character has."""
        end = b""
        for token_id in reversed(prompt_ids):
            end = self._bytes_of(token_id) + end
            if self._texts.get(token_id) or len(end) > _MAX_PENDING_BYTES:
                break
        return end

    def _bytes_of(self, token_id: int) -> bytes:
        text = self._texts.get(token_id)
        # Ids out of the vocabulary have no text: a model's logits may be padded beyond its tokenizer.
        return self._fragments.get(token_id, b"") if text is None else text.encode()

    def _decode(self, more: bytes, *, final: bool) -> str:
        raw = self._pending + more
        text, num_bytes = utf_8_decode(raw, "replace", final)
        self._pending = raw[num_bytes:]
        if self._starts_in_prompt and text:
            self._starts_in_prompt = False
            return text.removeprefix("\ufffd")  # stands for bytes of the prompt that nothing completed
        return text


class ContextDetokenizer(IncrementalDetokenizer):
    """Any other decoder: a token's text may depend on the token before it, so the two are decoded together.

    A run of byte tokens is held until it ends, since such decoders judge the run as a whole: one invalid byte turns
    each byte of it into U+FFFD. `tokenizers.DecodeStream` releases parts of a run, which can differ from `decode`.
    """

    __slots__ = ("_context", "_held", "_known", "_skipped", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        visible = (token_id for token_id in reversed(prompt_ids) if self._is_visible(token_id))
        self._context = _last_run(tokenizer, visible)  # the ids before those held
        self._known = tokenizer.decode(self._context, skip_special_tokens=False)
        self._held: list[int] = []

    def push_one(self, token_id: int) -> str:
        if not self._is_visible(token_id):
            return ""
        self._held.append(token_id)
        return "" if _is_byte(self._tokenizer, token_id) else self.flush()

    def flush(self) -> str:
        if not self._held:
            return ""
        text = self._tokenizer.decode(self._context + self._held, skip_special_tokens=False)
        new_text = _beyond_common_start(text, self._known)
        self._context = _last_run(self._tokenizer, reversed(self._held))
        self._known = self._tokenizer.decode(self._context, skip_special_tokens=False)
        self._held = []
        return new_text

    def _is_visible(self, token_id: int) -> bool:
        return token_id not in self._skipped and self._tokenizer.token(token_id) is not None


def _byte_level_tables(tokenizer: Tokenizer) -> tuple[dict[int, str], dict[int, bytes]]:
    """The text of each token that is whole characters, and the bytes of each other one."""
    char_to_byte = _byte_alphabet()
    texts: dict[int, str] = {}
    fragments: dict[int, bytes] = {}
    for token_id, token in _vocabulary(tokenizer):
        try:
            raw = bytes(map(char_to_byte.__getitem__, token))
        except KeyError:  # an added token, spelt as it is
            raw = token.encode()
        try:
            texts[token_id] = raw.decode()
        except UnicodeDecodeError:
            fragments[token_id] = raw
    return texts, fragments


def _vocabulary(tokenizer: Tokenizer) -> Iterator[tuple[int, str]]:
    tokens = ((token_id, tokenizer.token(token_id)) for token_id in range(tokenizer.vocab_size))
    return ((token_id, token) for token_id, token in tokens if token is not None)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the rest follows from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _beyond_common_start(text: str, known: str) -> str:
    for index, (char, known_char) in enumerate(zip(text, known, strict=False)):
        if char != known_char:
            return text[index:]
    return text[len(known) :]


def _unfinished(raw: bytes) -> bytes:
    """The start of a character at the end of `raw`."""
    _, num_bytes = utf_8_decode(raw, "replace", False)
    end = raw[num_bytes:]
    # The codec waits for a third byte of a surrogate, though none makes it valid: two characters of the prompt already.
    return end if end.decode(errors="replace") == "\ufffd" else b""


def _is_byte(tokenizer: Tokenizer, token_id: int) -> bool:
    return _BYTE_TOKEN.fullmatch(tokenizer.token(token_id) or "") is not None


def _last_run(tokenizer: Tokenizer, latest_first: Iterator[int]) -> list[int]:
    """The byte tokens at the end, if any, and the token before them."""
    run: list[int] = []
    for token_id in latest_first:
        run.append(token_id)
        if not _is_byte(tokenizer, token_id):
            break
    return run[::-1]

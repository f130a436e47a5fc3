"""From the text of a grammar to matchers, by llguidance, which refuses what it cannot enforce.

Compiling is bounded: text has a limit (see `grammar`), and the library counts what it does and gives up. Runs in one
thread, with a deep stack: the library recurses along the references of a grammar.
The library is imported when the first grammar comes; without it, grammars alone are refused.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from deepinfer.errors import GrammarError
from deepinfer.grammar import JSON_OPTIONS, GrammarSource
from deepinfer.matcher import Beginning, Matcher, TokenBits, readable_reason
from deepinfer_protocol import SlotSampling

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_CACHE_BYTES: Final = 256 << 20
GRAMMAR_BYTES: Final = 256 << 10
"""What a grammar takes at least, in bytes, with the states that outputs make it find."""
BYTES_PER_CHARACTER: Final = 512
"""What each character of its text adds: real schemas were seen to take half as much."""
LIMITS: Final[dict[str, Any]] = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
}
"""Of one grammar, in the library's own units: to compile it some tens of milliseconds, for a mask about ten; some
tens of megabytes."""


class Grammar(NamedTuple):
    """A compiled one, at its beginning."""

    field: str
    beginning: Beginning
    bits: TokenBits
    eos_ids: Sequence[int]

    def matcher(self, sampling: SlotSampling, opening_id: int | None) -> Matcher:
        """For one sample; see `Matcher`."""
        return Matcher(self.beginning, self.field, self.bits, sampling, eos_ids=self.eos_ids, opening_id=opening_id)


class GrammarCompiler:
    """Compiles for one model, and remembers what was asked of late. For one thread at a time."""

    def __init__(
        self,
        read_tokenizer: Callable[[], str] | None,
        vocab_size: int,
        eos_ids: Sequence[int],
        *,
        max_cache_bytes: int = MAX_CACHE_BYTES,
    ) -> None:
        """`read_tokenizer`: a tokenizer.json as text, when the first grammar comes. `None`: there is none."""
        self._read_tokenizer = read_tokenizer
        self._vocab_size = vocab_size
        self._bits = TokenBits(vocab_size)
        self._eos_ids = tuple(eos_ids)
        self._max_cache_bytes = max_cache_bytes
        self._cache: OrderedDict[GrammarSource, tuple[Grammar, int]] = OrderedDict()
        self.num_cached_bytes = 0
        """An estimate: the library does not say."""
        self._refusal = ""
        self._library: ModuleType | None = None

    def prepare(self) -> None:
        """What the first grammar has to wait for: about a second, with the interpreter held, for a large vocabulary."""
        if self._library is not None or self._refusal:
            return
        if self._read_tokenizer is None:
            self._refusal = "this engine has no tokenizer"
        elif not self._eos_ids:
            self._refusal = "this model has no end-of-sequence token"
        else:
            self._open(self._read_tokenizer)

    def _open(self, read_tokenizer: Callable[[], str]) -> None:
        try:
            import llguidance
        except ImportError as error:
            self._refusal = f"grammars need llguidance: pip install 'deepinfer-runtime[structured]' ({error})"
            return
        try:
            self._tokenizer: LLTokenizer = llguidance.LLTokenizer(
                _only_special(read_tokenizer()), n_vocab=self._vocab_size, eos_token=list(self._eos_ids)
            )
            self._limits: LLParserLimits = llguidance.LLParserLimits(**LIMITS, verbose_errors=False)
        except Exception as error:  # the library raises what it likes
            self._refusal = f"this model's tokenizer is none that grammars can use: {error}"
            return
        self._library = llguidance

    def compile(self, source: GrammarSource) -> Grammar:
        """Raises `GrammarError`, which says what cannot be enforced."""
        found = self._cache.get(source)
        if found is not None:
            self._cache.move_to_end(source)
            return found[0]
        self.prepare()
        if self._library is None:
            raise GrammarError(source.field, self._refusal)
        beginning = Beginning(partial(self._compile, self._library, source))
        grammar = Grammar(source.field, beginning, self._bits, self._eos_ids)
        self._remember(source, grammar)
        return grammar

    def _compile(self, library: ModuleType, source: GrammarSource) -> LLMatcher:
        try:
            text = _to_library(library.LLMatcher, source)
        except GrammarError:
            raise
        except ValueError as error:
            raise GrammarError(source.field, readable_reason(str(error))) from None
        matcher: LLMatcher = library.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        warnings = [] if matcher.is_error() else matcher.get_grammar_warnings()
        first = matcher.deep_copy()
        if not matcher.is_error() and not warnings:
            first.compute_bitmask()  # can it begin at all?
        if first.is_error() or warnings:
            raise GrammarError(source.field, readable_reason(first.get_error() or "; ".join(warnings)))
        return matcher

    def _remember(self, source: GrammarSource, grammar: Grammar) -> None:
        num_bytes = GRAMMAR_BYTES + BYTES_PER_CHARACTER * len(source.text)
        self._cache[source] = grammar, num_bytes
        self.num_cached_bytes += num_bytes
        while self.num_cached_bytes > self._max_cache_bytes:
            _, (_, freed) = self._cache.popitem(last=False)
            self.num_cached_bytes -= freed


def _to_library(matcher: type[LLMatcher], source: GrammarSource) -> str:
    """Raises `ValueError` and `GrammarError`."""
    if source.field == "regex":
        return matcher.grammar_from_regex(source.text)
    if source.field == "grammar":
        return matcher.grammar_from_lark(source.text)
    if source.field == "choice":
        return matcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(source.text))))
    return matcher.grammar_from_json_schema(_checked_schema(source), overrides=JSON_OPTIONS)  # type: ignore[arg-type]


def _checked_schema(source: GrammarSource) -> str:
    """An object, as text. Raises `GrammarError`, also for one that would switch the library's checks off."""
    try:
        schema = msgspec.json.decode(source.text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(source.field, f"cannot be read as JSON: {error}") from None
    if schema is True:
        return "{}"
    if not isinstance(schema, dict):
        told = "no output satisfies it" if schema is False else "a JSON Schema is an object, true or false"
        raise GrammarError(source.field, told)
    if "x-guidance" in schema:
        raise GrammarError(source.field, "x-guidance is not a keyword of JSON Schema")
    return source.text


def _only_special(tokenizer: str) -> str:
    """A tokenizer.json in which every added token is special: none of them is text in a grammar's output."""
    content = json.loads(tokenizer)
    for token in content.get("added_tokens") or ():
        token["special"] = True
    return json.dumps(content)

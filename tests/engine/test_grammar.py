"""Grammars: what is refused and why, what compilers keep, and what matchers allow beside bans."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

from deepinfer import SamplingParams, grammar_compiler
from deepinfer.admission import ModelLimits, admit, check_params
from deepinfer.deep_thread import deep_thread
from deepinfer.errors import GrammarError, InvalidRequest
from deepinfer.grammar import MAX_GRAMMAR_BYTES, MAX_REGEX_BYTES, GrammarSource, grammar_source
from deepinfer.grammar_compiler import BYTES_PER_CHARACTER, GRAMMAR_BYTES, GrammarCompiler
from deepinfer.matcher import Beginning, Matcher
from doubles.byte_tokenizer import ANSWER, EOS, THINK, VOCAB_SIZE, save_byte_tokenizer

LIMITS: Final = ModelLimits(VOCAB_SIZE, 4096, 4096, (EOS,), has_tokenizer=True)


def asked(**fields: Any) -> GrammarSource:
    source = grammar_source(SamplingParams(**fields))
    assert source is not None
    return source


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return Path(save_byte_tokenizer(tmp_path_factory.mktemp("bytes")), "tokenizer.json").read_text()


@pytest.fixture
def compiler(tokenizer: str) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS])


# ---- what is asked


def test_nothing_asked_is_no_grammar() -> None:
    assert grammar_source(SamplingParams()) is None


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"regex": "a", "choice": ["a"]}, "choice", "regex came, too: at most one of"),
        ({"json_schema": {}, "grammar": "start: /a/"}, "grammar", "json_schema came, too"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos", "ends with an end-of-sequence token"),
        ({"regex": 3}, "regex", "a int came, a string is expected"),
        ({"regex": ""}, "regex", "is empty"),
        ({"regex": "\ud800"}, "regex", "lone surrogates"),
        ({"regex": "a" * (MAX_REGEX_BYTES + 1)}, "regex", f"{MAX_REGEX_BYTES + 1} bytes, at most"),
        ({"grammar": "ä" * MAX_GRAMMAR_BYTES}, "grammar", f"{2 * MAX_GRAMMAR_BYTES} bytes, at most"),
        ({"json_schema": 3}, "json_schema", "a int came, a JSON Schema"),
        ({"json_schema": {"enum": [object()]}}, "json_schema", "cannot be written as JSON"),
        ({"choice": "yes"}, "choice", "a list of strings is expected"),
        ({"choice": []}, "choice", "0 strings, 1 to"),
        ({"choice": [3]}, "choice", "a list of strings is expected"),
        ({"choice": ["a"] * 5000}, "choice", "5000 strings, 1 to"),
        ({"choice": ["\udfff"]}, "choice", "lone surrogates"),
    ],
)
def test_what_can_be_no_grammar_is_refused_by_its_field(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        grammar_source(SamplingParams(**fields))
    assert caught.value.field == field


def test_what_is_asked_becomes_text_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large schema takes its time, and the loop waits for it."""
    monkeypatch.setattr("deepinfer.grammar.as_json", lambda *_: pytest.fail("written"))
    assert check_params(SamplingParams(json_schema={"type": "object"}), LIMITS).n == 1


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def chain(num_links: int) -> str:
    """Definitions that refer to each other, one behind another."""
    links = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"type": "null"}]} for i in range(num_links)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**links, f"d{num_links}": {"type": "string"}}})


REFUSED: Final[list[tuple[dict[str, Any], str]]] = [
    ({"json_schema": {"not": {"type": "string"}}}, 'Unimplemented keys: ["not"]'),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, 'Unimplemented keys: ["uniqueItems"]'),
    ({"json_schema": {"if": {}, "then": {}}}, "Unimplemented keys"),
    ({"json_schema": {"type": "strin"}}, "Invalid type: strin"),
    ({"json_schema": {"type": "string", "format": "no-such"}}, "Unknown format: no-such"),
    ({"json_schema": {"$ref": "#/nowhere"}}, "Pointer '/nowhere' does not exist"),
    ({"json_schema": {"$ref": "https://example.com/schema"}}, "does not fetch resources"),
    ({"json_schema": {"$ref": "#"}}, "no output satisfies it"),
    ({"json_schema": False}, "no output satisfies it"),
    ({"json_schema": {"type": "string", "pattern": "("}}, "regex"),
    ({"json_schema": "{"}, "cannot be read as JSON"),
    ({"json_schema": "[]"}, "a JSON Schema is an object, true or false"),
    ({"json_schema": '{"\\u0078-guidance": {"lenient": true}, "not": {}}'}, "x-guidance is not a keyword"),
    ({"json_schema": nested(200)}, "recursion limit exceeded"),
    ({"json_schema": '{"items":' * 10_000 + "{}" + "}" * 10_000}, "cannot be read as JSON"),
    ({"regex": "("}, "unclosed group"),
    ({"regex": "(?=a)b"}, "look-ahead and look-behind, is not supported"),
    ({"regex": r"(a)\1"}, "backreferences are not supported"),
    ({"regex": "(" * 4000 + ")" * 4000}, "invalid regex"),
    ({"grammar": "start: nowhere"}, 'unknown name: "nowhere"'),
    ({"grammar": "start: start"}, "no output satisfies it"),
    ({"grammar": "start: " + "(" * 50_000}, "too deeply nested"),
    ({"grammar": 'start: %json {"not": {}}'}, 'Unimplemented keys: ["not"]'),
    (
        {"grammar": "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(40)) + '\nT40: "a"\nstart: T0'},
        "initial lexer configuration (grammar) too big",
    ),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_enforced_is_refused_with_its_reason(
    compiler: GrammarCompiler, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(GrammarError, match=re.escape(words)) as caught:
        compiler.compile(asked(**fields))
    assert caught.value.field in fields and caught.value.code == "grammar"
    assert len(str(caught.value)) < 500 and compiler.num_cached_bytes == 0


def test_references_go_as_deep_as_the_text_lets_them(compiler: GrammarCompiler) -> None:
    """On a usual stack the library would take the process with it."""
    thread = deep_thread("deep")
    try:
        rules = "".join(f"a{i}:a{i + 1}\n" for i in range(10_800)) + 'a10800:"x"\nstart:a0'
        assert 0.9 * MAX_GRAMMAR_BYTES < len(rules) <= MAX_GRAMMAR_BYTES
        for source in (asked(grammar=rules), asked(json_schema=chain(1500))):
            thread.submit(compiler.compile, source).result(60)
    finally:
        thread.shutdown()


def test_without_the_library_grammars_alone_are_refused(tokenizer: str) -> None:
    program = """
import sys
sys.modules["llguidance"] = None
from deepinfer.grammar import GrammarSource
from deepinfer.grammar_compiler import GrammarCompiler
try:
    GrammarCompiler(lambda: "{}", 259, [256]).compile(GrammarSource("regex", "a"))
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "regex: grammars need llguidance: pip install 'deepinfer-runtime[structured]'" in done.stdout


def test_models_that_cannot_have_grammars_say_so(tokenizer: str) -> None:
    words = {"w0": 0}
    plain = {"version": "1.0", "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"}, "added_tokens": []}
    for compiler, told in (
        (GrammarCompiler(None, VOCAB_SIZE, [EOS]), "this engine has no tokenizer"),
        (GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, []), "no end-of-sequence token"),
        (GrammarCompiler(lambda: json.dumps(plain), VOCAB_SIZE, [EOS]), "tokenizer is none that grammars can use"),
    ):
        with pytest.raises(GrammarError, match=told):
            compiler.compile(asked(regex="a"))


def test_nothing_is_read_before_the_first_grammar_and_once_for_all(tokenizer: str) -> None:
    reads: list[None] = []

    def read() -> str:
        reads.append(None)
        return tokenizer

    compiler = GrammarCompiler(read, VOCAB_SIZE, [EOS])
    assert not reads
    for _ in range(2):
        compiler.prepare()
        compiler.compile(asked(regex=f"a{len(reads)}"))
    assert len(reads) == 1


def test_threads_made_at_once_leave_the_process_its_stack_size(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.stack_size()
    is_second_there, is_first_done = threading.Event(), threading.Event()

    class Slow(ThreadPoolExecutor):
        """The first thread starts while the second is made, and the other way round."""

        def submit(self, *_: Any, **__: Any) -> Any:
            if threading.current_thread() is second:
                is_second_there.set()
                is_first_done.wait(10)
            else:
                second.start()
                is_second_there.wait(0.2)

    second = threading.Thread(target=deep_thread, args=("second",))
    monkeypatch.setattr("deepinfer.deep_thread.ThreadPoolExecutor", Slow)
    deep_thread("first")
    is_first_done.set()
    second.join()
    assert threading.stack_size(before) == before


# ---- what is kept


def test_equal_grammars_are_compiled_once_and_the_oldest_go_first(tokenizer: str) -> None:
    each = GRAMMAR_BYTES + BYTES_PER_CHARACTER * 2
    compiler = GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS], max_cache_bytes=3 * each)
    first = compiler.compile(asked(regex="a0"))
    for index in (1, 2):
        compiler.compile(asked(regex=f"a{index}"))
    assert compiler.compile(asked(regex="a0")) is first and compiler.num_cached_bytes == 3 * each
    second = compiler.compile(asked(regex="a1"))
    for index in range(3, 200):
        compiler.compile(asked(regex=f"a{index % 9}"))
        compiler.compile(asked(regex="a0"))
        assert compiler.num_cached_bytes <= 3 * each
    assert compiler.compile(asked(regex="a0")) is first
    assert compiler.compile(asked(regex="a1")) is not second
    assert compiler.compile(asked(choice=["a0"])).field == "choice"


def test_one_that_is_larger_than_the_cache_is_not_kept(tokenizer: str) -> None:
    compiler = GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS], max_cache_bytes=1000)
    assert compiler.compile(asked(regex="a")).matcher is not None
    assert compiler.num_cached_bytes == 0


# ---- what may come next


def matcher(compiler: GrammarCompiler, opening_id: int | None = None, **fields: Any) -> Matcher:
    params = check_params(SamplingParams(**fields), LIMITS)
    bad_words: list[Any] = list(params.bad_words or ())
    source = grammar_source(params)
    assert source is not None
    return compiler.compile(source).matcher(admit(params, 3, LIMITS, bad_words).sampling[0], opening_id)


def ids(text: str) -> list[int]:
    """Bytes have the place of their character in the alphabet."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [alphabet.index(character) for character in text]


def allowed(mask: bytes) -> set[int]:
    bits = int.from_bytes(mask, "little")
    assert len(mask) == 4 * -(-VOCAB_SIZE // 32) and bits >> VOCAB_SIZE == 0
    return {token for token in range(VOCAB_SIZE) if bits >> token & 1}


def test_a_matcher_allows_what_its_grammar_does_and_the_end_where_it_may(compiler: GrammarCompiler) -> None:
    ab = matcher(compiler, regex="ab?")
    assert allowed(ab.next_mask([])) == set(ids("a"))
    assert allowed(ab.next_mask(ids("a"))) == {*ids("b"), EOS}
    assert allowed(ab.next_mask(ids("b"))) == {EOS}


def test_matchers_of_one_grammar_know_nothing_of_each_other(compiler: GrammarCompiler) -> None:
    first, second = (matcher(compiler, choice=["yes", "no"]) for _ in range(2))
    assert allowed(first.next_mask(ids("y"))) == set(ids("e"))
    assert allowed(second.next_mask([])) == set(ids("yn"))
    assert allowed(second.next_mask(ids("n"))) == set(ids("o"))


def test_a_choice_may_have_any_characters(compiler: GrammarCompiler) -> None:
    for text in ('qu"ote', "back\\slash", "new\nline", "{x} | /y/", "~!*+?", " "):
        found = matcher(compiler, choice=[text, text + "!"])
        output = b""
        alphabet = {}
        for byte in text.encode():
            character = _character_of(byte)
            alphabet[byte] = ids(character)[0]
            assert alphabet[byte] in allowed(found.next_mask([])), (text, output)
            found.next_mask([alphabet[byte]])
            output += bytes([byte])
        assert allowed(found.next_mask([])) == {EOS, *ids("!")}


def _character_of(byte: int) -> str:
    """The character by which byte-level vocabularies spell a byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in printable else chr(256 + [b for b in range(256) if b not in printable].index(byte))


def test_the_grammar_begins_behind_the_opening_and_nothing_ends_before(compiler: GrammarCompiler) -> None:
    thinking = matcher(compiler, ANSWER, regex="ab")
    assert allowed(thinking.next_mask([])) == set(range(VOCAB_SIZE)) - {EOS}
    assert allowed(thinking.next_mask(ids("xyz"))) == set(range(VOCAB_SIZE)) - {EOS}
    assert allowed(thinking.next_mask([*ids("q"), ANSWER, *ids("a")])) == set(ids("b"))
    assert allowed(thinking.next_mask(ids("b"))) == {EOS}


def test_marks_of_thinking_are_no_text_of_a_grammar(compiler: GrammarCompiler) -> None:
    found = matcher(compiler, regex=".*")
    assert not allowed(found.next_mask([])) & {THINK, ANSWER}


@pytest.mark.parametrize(
    ("fields", "after", "left"),
    [
        ({"min_tokens": 2}, "", "a"),
        ({"min_tokens": 2}, "a", "ab"),
        ({"banned_token_ids": ids("b")}, "a", "a."),
        ({"allowed_token_ids": [*ids("a"), EOS]}, "a", "a."),
        ({"bad_words": [ids("aab")]}, "aa", "a."),
        ({"bad_words": [ids("aab")]}, "a", "ab."),
        ({"logit_bias": {0: -100.0}}, "a", "ab."),
    ],
)
def test_bans_are_taken_out(compiler: GrammarCompiler, fields: dict[str, Any], after: str, left: str) -> None:
    found = matcher(compiler, regex="a[ab]*", **fields)
    assert allowed(found.next_mask(ids(after))) == {EOS if mark == "." else ids(mark)[0] for mark in left}


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 2},
        {"banned_token_ids": ids("a")},
        {"allowed_token_ids": ids("bc")},
        {"bad_words": [ids("a")]},
        {"banned_token_ids": [EOS]},
    ],
)
def test_what_leaves_nothing_is_an_error_that_says_so(compiler: GrammarCompiler, fields: dict[str, Any]) -> None:
    found = matcher(compiler, choice=["a"], **fields)
    with pytest.raises(GrammarError, match="choice: what it allows next is taken out by min_tokens, bad_words"):
        found.next_mask([])
        found.next_mask(ids("a"))


def test_a_sample_that_waits_has_no_copy_of_its_grammar_yet(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[Any] = []
    copy = Beginning.copy

    def note(self: Beginning) -> Any:
        copies.append(copy(self))
        return copies[-1]

    monkeypatch.setattr(Beginning, "copy", note)
    found = matcher(compiler, ANSWER, regex="ab")
    found.next_masks([], ids("xy"))
    assert not copies
    assert len(found.next_masks(ids("x"), [ANSWER, *ids("a")])) == 3
    assert allowed(found.next_mask([ANSWER])) == set(ids("a")) and len(copies) == 1


def test_a_limit_that_is_met_on_the_way_is_an_error(compiler: GrammarCompiler) -> None:
    found = matcher(compiler, regex="(?:a{1,1000}){1,1000}")
    with pytest.raises(GrammarError, match="regex: "):
        found.next_mask([])
        for _ in range(4000):
            found.next_mask(ids("a"))


def test_a_token_that_was_not_allowed_is_an_error(compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError, match="the output left it"):
        matcher(compiler, regex="ab").next_mask(ids("b"))


# ---- where drafts would lead

LIST: Final = {"type": "array", "items": {"enum": ["a", "bc", 1, None]}, "maxItems": 4}


@pytest.mark.parametrize(
    ("fields", "opening_id"),
    [
        ({"json_schema": LIST}, None),
        ({"regex": "a(b|cd?)*e{0,3}"}, None),
        ({"regex": "[a-d]{2,9}", "bad_words": [ids("ab"), ids("cc")], "min_tokens": 4}, None),
        ({"choice": ["abc", "abd", "b"]}, None),
        ({"regex": "[ab]{0,6}"}, ANSWER),
    ],
)
def test_masks_behind_drafts_are_those_that_come_when_they_are_taken(
    compiler: GrammarCompiler, fields: dict[str, Any], opening_id: int | None
) -> None:
    """Drafts good and bad, of which any number is taken."""
    num_places = num_refused = 0
    for seed in range(60):
        random = Random(seed)
        ahead, plain = matcher(compiler, opening_id, **fields), matcher(compiler, opening_id, **fields)
        taken: list[int] = []
        for _ in range(12):
            scout = matcher(compiler, opening_id, **fields)
            drafts, behind = [], scout.next_mask(ahead._output + taken)
            for _ in range(random.randrange(6)):
                known = sorted(allowed(behind) - {EOS} if random.random() < 0.9 else set(range(VOCAB_SIZE)))
                if not known:
                    break
                opens = opening_id is not None and random.random() < 0.2
                drafts.append(ANSWER if opens else random.choice(known))
                if drafts[-1] not in allowed(behind):
                    break
                behind = scout.next_mask(drafts[-1:])
            masks = ahead.next_masks(taken, drafts)
            assert masks[0] == plain.next_mask(taken)
            assert 1 <= len(masks) <= 1 + len(drafts)
            places = list(zip(masks, drafts, strict=False))
            assert all(draft in allowed(mask) for mask, draft in places[: len(masks) - 1])
            assert len(masks) == 1 + len(drafts) or drafts[len(masks) - 1] not in allowed(masks[-1]) - {EOS}
            num_places += len(masks) - 1
            num_refused += len(masks) <= len(drafts)
            num_taken = random.randrange(len(masks))
            follows = sorted(allowed(masks[num_taken]) - {EOS})
            if not follows:
                break
            taken = [*drafts[:num_taken], random.choice(follows)]
            for index, mask in enumerate(masks[1 : 1 + num_taken], 1):
                check = matcher(compiler, opening_id, **fields)
                assert check.next_mask(ahead._output + drafts[:index]) == mask
    assert num_places > 100 and num_refused > 10


def test_a_draft_that_goes_beyond_a_limit_ends_the_masks_and_harms_nothing(
    monkeypatch: pytest.MonkeyPatch, tokenizer: str
) -> None:
    monkeypatch.setitem(grammar_compiler.LIMITS, "step_max_items", 60)
    rules = [f'r{index}: r{index + 1} "z"? | "y" r{index + 1}' for index in range(99)]
    grammar = "\n".join(['start: "q" "abc" | "ax" r0', *rules, 'r99: "c" | "d" r0'])
    found = matcher(GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS]), grammar=grammar)
    assert len(found.next_masks([], ids("axy"))) == 2
    assert len(found.next_masks(ids("q"), ids("abx"))) == 3
    assert allowed(found.next_mask(ids("ab"))) == set(ids("c"))
    taken = matcher(GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS]), grammar=grammar)
    assert len(taken.next_masks([], ids("axy"))) == 2
    assert len(taken.next_masks(ids("a"), ids("xy"))) == 1
    with pytest.raises(GrammarError, match="Too many items"):
        taken.next_masks(ids("x"))


def test_states_that_drafts_or_others_made_it_find_end_no_sample(
    monkeypatch: pytest.MonkeyPatch, tokenizer: str
) -> None:
    """All copies of a grammar share them, and their limit."""
    monkeypatch.setitem(grammar_compiler.LIMITS, "max_lexer_states", 40)
    compiler, random = GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS]), Random(1)
    drafting, *others = (matcher(compiler, regex="[ab]*a[ab]{8}c") for _ in range(4))
    plain = matcher(GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS]), regex="[ab]*a[ab]{8}c")
    num_places = 0
    for _ in range(60):
        masks = drafting.next_masks(ids("a"), ids("".join(random.choices("ab", k=5))))
        assert masks[0] == plain.next_mask(ids("a"))
        num_places += len(masks) - 1
        for other in others:
            drafts = ids("".join(random.choices("ab", k=5)))
            assert allowed(other.next_masks(ids("b"), drafts)[0]) == set(ids("ab"))
    assert num_places > 60
    assert drafting._beginning.num_renewed > 5 and plain._beginning.num_renewed == 0


def test_what_its_bans_leave_nothing_of_is_not_tried_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Beginning, "renew", lambda *_: pytest.fail("tried again"))
    with pytest.raises(GrammarError, match="taken out by min_tokens"):
        matcher(compiler, choice=["a"], banned_token_ids=ids("a")).next_masks([])


def test_an_end_and_what_leaves_nothing_end_the_masks(compiler: GrammarCompiler) -> None:
    found = matcher(compiler, regex="ab?")
    assert len(found.next_masks([], [*ids("a"), EOS, *ids("b")])) == 2
    assert allowed(found.next_mask(ids("a"))) == {*ids("b"), EOS}
    banned = matcher(compiler, regex="a|bc", banned_token_ids=ids("c"))
    assert len(banned.next_masks([], ids("bc"))) == 1
    assert allowed(banned.next_mask(ids("a"))) == {EOS}
    with pytest.raises(GrammarError, match="taken out by min_tokens"):
        matcher(compiler, regex="a|bc", banned_token_ids=ids("c")).next_masks(ids("b"))

from __future__ import annotations

from functools import cache
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from deepinfer.detokenizer import DetokenizerFactory
from deepinfer.tokenizer import Tokenizer

TEXT = "The CPU's cache: naïve café, 你好世界。ひらがな 한국어 👩‍👩‍👧 e\u0301 🇫🇷\r\n\ttabs  and   spaces"


@cache
def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([TEXT] * 3, trainer)
    backend.add_special_tokens(["<|end|>", "<｜结束｜>"])
    backend.add_tokens([AddedToken("<tool>", normalized=False), "añadido", "with space"])
    return Tokenizer(backend)


@cache
def byte_fallback(decoder: str) -> Tokenizer:
    """A vocabulary as SentencePiece makes them: U+2581 for a space, and a token for each byte."""
    words = ["▁", "▁▁", "a", "b", "ab", "▁a", "▁ab", "##b", "b</w>", ".", "'s", "中"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab, [("a", "b"), ("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    if decoder != "none":
        backend.decoder = DECODERS[decoder]
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend)


DECODERS = {
    "llama": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "metaspace": decoders.Metaspace(),
    "metaspace, bytes": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "wordpiece": decoders.WordPiece(),
    "bpe": decoders.BPEDecoder(),
}
TOKENIZERS = ["byte level", "none", *DECODERS]
BYTES_OF_TEXT = [f"<0x{byte:02X}>" for byte in "中👩‍👧é".encode()]


def tokenizer_of(name: str) -> Tokenizer:
    return byte_level() if name == "byte level" else byte_fallback(name)


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    vocabulary = {tokenizer.token(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    return [vocabulary[token] for token in tokens]


def num_common(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@st.composite
def runs_of_ids(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Any ids, some out of the vocabulary, among ids that make sense."""
    sense = tokenizer.encode(TEXT, add_special_tokens=False)
    if not tokenizer.is_byte_level:
        sense += ids_of(tokenizer, *BYTES_OF_TEXT)
    some = st.builds(lambda at, size: sense[at : at + size], st.integers(0, len(sense)), st.integers(1, 8))
    noise = st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=8)
    special = st.lists(st.sampled_from(sorted(tokenizer.special_ids)), max_size=2)
    return [token_id for run in draw(st.lists(some | noise | special, max_size=5)) for token_id in run]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), skip=st.booleans())
def test_the_pieces_make_the_text_of_all_ids(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = tokenizer_of(name)
    ids = data.draw(runs_of_ids(tokenizer))
    detokenizer = DetokenizerFactory(tokenizer).create(skip_special_tokens=skip)
    pieces = [detokenizer.push_one(token_id) for token_id in ids]
    text = "".join(pieces) + detokenizer.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=skip), ids


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), skip=st.booleans(), num_at_once=st.integers(1, 9))
def test_an_output_has_what_the_prompt_has_not(name: str, data: st.DataObject, skip: bool, num_at_once: int) -> None:
    tokenizer = tokenizer_of(name)
    prompt_ids, ids = data.draw(runs_of_ids(tokenizer)), data.draw(runs_of_ids(tokenizer))
    detokenizer = DetokenizerFactory(tokenizer).create(prompt_ids, skip_special_tokens=skip)
    text = "".join(detokenizer.push(ids[at : at + num_at_once]) for at in range(0, len(ids), num_at_once))
    whole, prompt = (tokenizer.decode(some, skip_special_tokens=skip) for some in (prompt_ids + ids, prompt_ids))
    assert text + detokenizer.flush() == whole[num_common(whole, prompt) :], (prompt_ids, ids)


@pytest.mark.parametrize("name", ["byte level", "llama"])
def test_a_character_comes_once_and_whole(name: str) -> None:
    tokenizer = tokenizer_of(name)
    spelling = "ðŁĺĢ" if name == "byte level" else ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    ids = ids_of(tokenizer, *spelling, "a")
    detokenizer = DetokenizerFactory(tokenizer).create()
    pieces = [detokenizer.push_one(token_id) for token_id in ids]
    assert "".join(pieces) == "😀a"
    assert pieces[:3] == ["", "", ""]


@pytest.mark.parametrize("name", ["byte level", "llama"])
def test_a_character_that_the_prompt_began_comes_with_the_output(name: str) -> None:
    tokenizer = tokenizer_of(name)
    spelling = "aä¸Ń" if name == "byte level" else ["a", "<0xE4>", "<0xB8>", "<0xAD>"]
    begun, rest = ids_of(tokenizer, *spelling[:3]), ids_of(tokenizer, *spelling[3:])
    completed = DetokenizerFactory(tokenizer).create(begun)
    assert completed.push([*rest, *ids_of(tokenizer, "b")]) == "中b"
    abandoned = DetokenizerFactory(tokenizer).create(begun)
    assert abandoned.push(ids_of(tokenizer, "b")) == "b", "the prompt's own bytes are not shown"
    assert DetokenizerFactory(tokenizer).create(begun).flush() == ""


def test_the_start_of_a_surrogate_in_a_prompt_is_no_character() -> None:
    detokenizer = DetokenizerFactory(byte_level()).create(ids_of(byte_level(), "í", "³"))
    assert detokenizer.push(ids_of(byte_level(), "¾", "a")) == "\ufffda"


def test_bytes_that_nothing_completes_end_as_a_replacement_character() -> None:
    detokenizer = DetokenizerFactory(byte_level()).create()
    assert detokenizer.push(ids_of(byte_level(), "a", "ð", "Ł")) == "a"
    assert (detokenizer.flush(), detokenizer.flush()) == ("\ufffd", "")


def test_a_space_at_the_start_is_stripped_only_where_the_text_starts() -> None:
    tokenizer = byte_fallback("llama")
    factory = DetokenizerFactory(tokenizer)
    [word, bos] = ids_of(tokenizer, "▁a", "<s>")
    assert factory.create().push_one(word) == "a"
    assert factory.create([bos]).push_one(word) == "a"
    assert factory.create([bos, word]).push_one(word) == " a"
    assert factory.create([word, bos]).push_one(word) == " a"


@pytest.mark.parametrize("name", ["byte level", "llama"])
def test_special_tokens_are_skipped_or_spelt_whole(name: str) -> None:
    tokenizer = tokenizer_of(name)
    special = min(tokenizer.special_ids)
    factory = DetokenizerFactory(tokenizer)
    assert factory.create(skip_special_tokens=True).push_one(special) == ""
    assert factory.create(skip_special_tokens=False).push_one(special) == tokenizer.token(special)


def test_samples_of_one_prompt_do_not_mix() -> None:
    factory = DetokenizerFactory(byte_level())
    one, other = factory.create(), factory.create()
    [first, second, third] = ids_of(byte_level(), *"ä¸Ń")
    assert (one.push([first, second]), other.push_one(first)) == ("", "")
    assert one.push_one(third) == "中"
    assert other.flush() == "\ufffd"

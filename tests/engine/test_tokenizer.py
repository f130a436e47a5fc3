from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from deepinfer.errors import InvalidRequest, ModelFileError, UnsupportedModel
from deepinfer.tokenizer import PRE_TOKENIZERS, Tokenizer
from doubles.smollm2 import model_path

TEXT = "The CPU's cache 12345: naïve café, 你好世界 👩‍👩‍👧\r\n\t  spaces   here"


@pytest.fixture(scope="module")
def backend() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([TEXT] * 3, trainer)
    backend.add_special_tokens(["<s>", "</s>", "<|end|>"])
    return backend


@pytest.fixture
def folder(backend: Backend, tmp_path: Path) -> Path:
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.from_model(model_path())


def write_json(folder: Path, **files: Any) -> None:
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


def write_gguf(file: Path, backend: Backend, *, model: str = "gpt2", pre: str = "gpt-2") -> Path:
    """A GGUF file with the vocabulary of `backend`, and nothing of a model."""
    size = backend.get_vocab_size()
    state = json.loads(backend.to_str())["model"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([backend.id_to_token(token_id) or "" for token_id in range(size)])
    writer.add_token_types([1] * (size - 3) + [3] * 3)
    writer.add_token_merges([" ".join(pair) for pair in state["merges"]])
    writer.add_bos_token_id(size - 3)
    writer.add_eos_token_id(size - 2)
    writer.add_eot_token_id(size - 1)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def test_a_folder_gives_all_ends_of_text_and_the_template(folder: Path, backend: Backend) -> None:
    bos, eos, end = (backend.token_to_id(token) for token in ("<s>", "</s>", "<|end|>"))
    write_json(
        folder,
        tokenizer_config={"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ messages }}"},
        generation_config={"eos_token_id": [end, eos]},
        config={"eos_token_id": eos, "bos_token_id": None},
    )
    tokenizer = Tokenizer.from_model(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (bos, (eos, end))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.special_ids == {bos, eos, end}
    assert tokenizer.vocab_size == 303
    assert tokenizer.chat_template == "{{ messages }}"


def test_a_template_of_its_own_file_goes_first(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    write_json(folder, tokenizer_config={"chat_template": named})
    assert Tokenizer.from_model(folder).chat_template == "plain"
    (folder / "chat_template.jinja").write_text("its own")
    assert Tokenizer.from_model(folder).chat_template == "its own"


def test_a_folder_with_a_tokenizer_only(folder: Path) -> None:
    tokenizer = Tokenizer.from_model(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.chat_template) == (None, (), None)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("", "")


def test_truncation_left_over_from_training_is_off(backend: Backend, tmp_path: Path) -> None:
    truncating = Backend.from_str(backend.to_str())
    truncating.enable_truncation(4)
    truncating.enable_padding(length=8)
    truncating.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_model(tmp_path)
    assert tokenizer.decode(tokenizer.encode(TEXT, add_special_tokens=False)) == TEXT
    assert len(tokenizer.encode("a", add_special_tokens=False)) == 1


def test_bos_is_put_first_when_the_settings_ask_for_it(folder: Path, backend: Backend) -> None:
    write_json(folder, tokenizer_config={"bos_token": "<s>", "add_bos_token": True})
    tokenizer = Tokenizer.from_model(folder)
    bos, plain = backend.token_to_id("<s>"), tokenizer.encode("cache", add_special_tokens=False)
    assert tokenizer.encode("cache", add_special_tokens=True) == [bos, *plain]
    assert tokenizer.encode("<s>cache", add_special_tokens=True) == [bos, *plain], "never twice"


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_config", "generation_config", "config"])
@pytest.mark.parametrize("damage", [b"", b'{"model": {', b"[1]", b"\xff\xfe"])
def test_a_damaged_file_is_named(folder: Path, name: str, damage: bytes) -> None:
    (folder / f"{name}.json").write_bytes(damage)
    with pytest.raises(ModelFileError) as caught:
        Tokenizer.from_model(folder)
    assert caught.value.file == str(folder / f"{name}.json")


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_model(tmp_path)
    with pytest.raises(ModelFileError, match=r"m\.gguf: No such file"):
        Tokenizer.from_model(tmp_path / "m.gguf")


def test_gguf_and_tokenizer_json_agree(backend: Backend, folder: Path) -> None:
    ours, theirs = Tokenizer.from_model(write_gguf(folder / "m.gguf", backend)), Tokenizer.from_model(folder)
    for text in (TEXT, "a <s>b</s>", "", " ", "it's 9½\n\n  x"):
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.encode(text, add_special_tokens=True) == [300, *ids]
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert (ours.bos_token_id, ours.eos_token_ids) == (300, (301, 302))
    assert ours.special_ids == {300, 301, 302}
    assert (ours.vocab_size, ours.chat_template) == (303, "{{ messages }}")


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_each_known_pre_tokenizer_loses_nothing(backend: Backend, tmp_path: Path, pre: str) -> None:
    tokenizer = Tokenizer.from_model(write_gguf(tmp_path / "m.gguf", backend, pre=pre))
    assert tokenizer.decode(tokenizer.encode(TEXT, add_special_tokens=False)) == TEXT


def test_what_is_not_supported_is_named(backend: Backend, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="'tekken'"):
        Tokenizer.from_model(write_gguf(tmp_path / "a.gguf", backend, pre="tekken"))
    with pytest.raises(UnsupportedModel, match="'t5'"):
        Tokenizer.from_model(write_gguf(tmp_path / "b.gguf", backend, model="t5"))


@given(data=st.data())
def test_a_damaged_gguf_is_named(
    backend: Backend, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    file = tmp_path_factory.getbasetemp() / "damaged.gguf"
    whole = write_gguf(file, backend).read_bytes()
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 20), label="cut")])
    with pytest.raises(ModelFileError) as caught:
        Tokenizer.from_model(file)
    assert caught.value.file == str(file)


@pytest.mark.parametrize("head", [b"PK\x03\x04" * 9, b"GGUF\x09\0\0\0" + bytes(16), b"GGUF\x03\0\0\0" + b"\xff" * 40])
def test_a_file_that_is_no_gguf_is_named(tmp_path: Path, head: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(head)
    with pytest.raises(ModelFileError, match="no readable GGUF header"):
        Tokenizer.from_model(tmp_path / "m.gguf")


def test_a_gguf_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF\x03\0\0\0" + bytes(16))
    with pytest.raises(ModelFileError, match=r"no tokenizer\.ggml\.model"):
        Tokenizer.from_model(tmp_path / "m.gguf")


def test_lone_surrogates_are_refused(backend: Backend) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt: .*surrogates"):
        Tokenizer(backend).encode("a\ud800", add_special_tokens=False)


def test_a_long_text_does_not_keep_other_threads_waiting(backend: Backend) -> None:
    tokenizer, text = Tokenizer(backend), TEXT * 5_000
    worker = threading.Thread(target=tokenizer.encode, args=(text,), kwargs={"add_special_tokens": True})
    worker.start()
    num_turns = 0
    while worker.is_alive():
        worker.join(0.001)
        num_turns += 1
    assert num_turns > 10, "encoding holds the GIL"


@pytest.mark.model
@pytest.mark.parametrize(
    ("question", "num_tokens"),
    [("What is the capital of France?", 37), ("Explain in two sentences what a CPU cache is.", 40)],
)
def test_smollm2_counts_as_its_makers_do(smollm2: Tokenizer, question: str, num_tokens: int) -> None:
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    turns = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    ids = smollm2.encode(turns, add_special_tokens=True)
    assert len(ids) == num_tokens
    assert smollm2.decode(ids, skip_special_tokens=False) == turns
    assert (smollm2.bos_token_id, smollm2.eos_token_ids, smollm2.vocab_size) == (1, (2,), 49_152)


@pytest.mark.model
@given(text=st.text(st.sampled_from("aZ 09½\n\r\t.,'…—é\u0301你好。ひ한ا\u200d👩👧🇫🇷"), max_size=80))
def test_smollm2_loses_no_text(smollm2: Tokenizer, text: str) -> None:
    # Not any text at all: its vocabulary has no tokens for some bytes that only rare planes need.
    assert smollm2.decode(smollm2.encode(text, add_special_tokens=False), skip_special_tokens=False) == text

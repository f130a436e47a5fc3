from __future__ import annotations

from typing import Any

import pytest

from deepinfer.chat import MAX_STEPS, ChatTemplate
from deepinfer.errors import InvalidRequest, UnsupportedModel
from deepinfer.tokenizer import Tokenizer
from doubles.smollm2 import model_path

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
CHATML = (
    "{% for m in messages %}\n"
    "    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_messages_become_the_prompt_that_the_template_spells() -> None:
    prompt = ChatTemplate(CHATML).render([{"role": "system", "content": "Be brief."}, *HELLO])
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not ChatTemplate(CHATML).render(HELLO, add_generation_prompt=False).endswith("assistant\n")


@pytest.mark.model
def test_smollm2_gets_its_default_system_line() -> None:
    tokenizer = Tokenizer.from_model(model_path())
    template = ChatTemplate(tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    prompt = template.render([{"role": "user", "content": "What is the capital of France?"}])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(tokenizer.encode(prompt, add_special_tokens=False)) == 37


def test_the_helpers_that_templates_rely_on() -> None:
    source = (
        "{{ bos_token }}{{ eos_token }}|{{ tools is none }}|{{ messages | tojson }}|{{ strftime_now('%Y') | length }}|"
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    )
    rendered = ChatTemplate(source, bos_token="<s>", eos_token="</s>").render([{"role": "user", "content": "<é>"}] * 2)
    message = '{"role": "user", "content": "<é>"}'
    assert rendered == f"<s></s>|True|[{message}, {message}]|4|<é>"


def test_text_parts_are_joined_and_other_keys_reach_the_template() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    message = {"role": "user", "content": parts, "name": "Ada"}
    assert ChatTemplate("{{ messages[0].name }}: {{ messages[0].content }}").render([message]) == "Ada: Hello"
    assert message["content"] is parts, "the caller's message is left as it was"


def test_a_template_in_a_message_is_only_text() -> None:
    prompt = ChatTemplate(CHATML).render([{"role": "user", "content": "{{ 7 * 7 }}{% raw %}"}])
    assert "{{ 7 * 7 }}{% raw %}" in prompt


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("Hello", "messages"),
        (None, "messages"),
        (["Hello"], "messages[0]"),
        ([*HELLO, {"content": "x"}], "messages[1].role"),
        ([{"role": 1, "content": "x"}], "messages[0].role"),
        ([*HELLO, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
    ],
)
def test_malformed_messages_are_refused_by_name(messages: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(CHATML).render(messages)
    assert caught.value.field == field


def test_a_template_may_refuse_the_messages() -> None:
    template = ChatTemplate("{% if messages[0].role != 'system' %}{{ raise_exception('no system role') }}{% endif %}")
    with pytest.raises(InvalidRequest, match="messages: no system role"):
        template.render(HELLO)


def test_a_model_without_a_template() -> None:
    with pytest.raises(InvalidRequest, match="messages: this model has no chat template"):
        ChatTemplate(None).render(HELLO)


def test_a_template_that_does_not_compile() -> None:
    with pytest.raises(UnsupportedModel, match="does not compile"):
        ChatTemplate("{% if %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ ''|attr('__class__') }}",
        "{{ ''|attr('__cla' ~ 'ss__') }}",
        "{{ messages[0].__class__.__mro__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace.__init__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ dict.mro() }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '{0.__class__}'|format }}{{ [1]|map(attribute='__class__')|list }}",
        "{{ messages|map('attr', '__class__')|list }}",
        "{% if ''.__class__ %}{% endif %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
    ],
)
def test_a_template_reaches_no_internals(source: str) -> None:
    with pytest.raises(UnsupportedModel, match="stopped"):
        ChatTemplate(source).render(HELLO)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% set r = range(90000)|list %}{% for i in r %}{% for j in r %}{% continue %}{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for i in [1] recursive %}{{ loop([1, 2]) }}{% endfor %}",
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * [0] }}",
        "{{ 10 ** 1000000000 }}",
    ],
)
def test_the_work_of_a_template_is_bounded(source: str) -> None:
    with pytest.raises(UnsupportedModel, match="stopped"):
        ChatTemplate(source).render(HELLO)


def test_the_bound_on_loops_is_for_each_rendering() -> None:
    template = ChatTemplate("{% for m in messages %}{% for i in range(20000) %}{% endfor %}{% endfor %}ok")
    assert 2 * (2 * 20_000 + 2) > MAX_STEPS > 2 * 20_000 + 2
    assert [template.render(HELLO * 2) for _ in range(2)] == ["ok", "ok"]


def test_a_prompt_beyond_all_bounds_is_refused() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(InvalidRequest, match="longer than"):
        template.render([{"role": "user", "content": "x" * 1_000_000}] * 17)

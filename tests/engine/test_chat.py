from __future__ import annotations

import time
from typing import Any

import pytest

from deepinfer.chat import ChatTemplate
from deepinfer.errors import InvalidRequest, UnsupportedModel
from deepinfer.sandbox import MAX_STEPS
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


def test_an_assistant_that_calls_tools_may_say_nothing() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    source = "{% for m in messages %}{{ m.content is none }} {{ m.tool_calls[0].function.name }}{% endfor %}"
    assert ChatTemplate(source).render([call]) == "True add"


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
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content"),
        ([{"role": "user", "content": None, "tool_calls": [{}]}], "messages[0].content"),
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
    with pytest.raises(UnsupportedModel, match="does not compile: blocks are not available"):
        ChatTemplate("{% if messages %}{% block a %}{{ self.a() }}{% endblock %}{% endif %}")


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


BIG = "{% set n = namespace(s='aab ' * 4000, l=[], i=9) %}{% for i in range(9) %}{% set n.s = n.s + n.s %}{% endfor %}"
LARGE_VALUES = [
    "{{ 'x'|center(300000000) }}",
    "{{ 'x'.center(300000000) }}{{ 'x'.ljust(9) }}",
    "{{ 'x'.ljust(300000000) }}",
    "{{ 'x'.rjust(300000000) }}",
    "{{ 'x'.zfill(300000000) }}",
    "{{ '\t'.expandtabs(300000000) }}",
    "{{ ['x']|map('center', 300000000)|list }}",
    "{{ (['x']|map(attribute='center')|first)(300000000) }}",
    "{{ ('x'|attr('center'))(300000000) }}",
    "{{ 'x'['center'](300000000) }}",
    "{{ '%200000000d' % 1 }}",
    "{{ '%*d' % (200000000, 1) }}",
    "{{ '%200000000d'|format(1) }}",
    "{{ '{:200000000}'.format(1) }}",
    "{{ '{x:200000000}'.format_map({'x': 1}) }}",
    "{{ 'x\ny'|indent(1000000000) }}",
    "{{ 'x y'|wordwrap(1, wrapstring='z' * 50000) }}",
    "{{ [1]|batch(1000000000, 0)|list }}",
    "{{ [1]|slice(1000000000)|list }}",
    "{{ 5|round(-1000000000) }}",
    "{{ (1).to_bytes(1000000000, 'big') }}",
    "{{ [[1]]|tojson(indent=1000000000) }}",
    "{{ [1, 2]|tojson(separators=('x' * 50000, 'y')) }}",
    "{{ strftime_now('%Y' * 20000) }}",
    "{{ ('a' * 50000)|replace('a', 'b' * 50000) }}",
    "{{ ('a' * 50000)|replace(new='b' * 50000, old='a') }}",
    "{{ ('a' * 50000).replace('', 'b' * 50000) }}",
    "{{ ('b' * 50000).join('a' * 50000) }}",
    "{{ ('b' * 50000).join(['a'] * 50000) }}",
    "{{ (['a'] * 50000)|join('b' * 50000) }}",
    "{{ range(90000)|join(d='b' * 50000) }}",
    "{{ ('b' * 50000).join(range(90000)|map('string')) }}",
    "{{ [['a' * 50000] * 50000] }}",
    "{{ [['a' * 50000] * 50000]|string }}",
    "{{ [['a' * 50000] * 50000]|tojson }}",
    "{{ [['a' * 50000] * 50000] ~ '' }}",
    "{% set x %}{{ ['a' * 50000] * 50000 }}{% endset %}",
    "{% filter upper %}{{ ['a' * 50000] * 50000 }}{% endfilter %}",
    "{{ (['a' * 50000] * 50000)|sort }}",
    "{{ (['a' * 50000] * 50000)|unique|list }}",
    "{{ (['a' * 50000] * 50000)|map('upper')|list }}",
    "{{ (['a' * 50000] * 50000) == (['a' * 49999 ~ 'b'] * 50000) }}",
    "{{ ('a' * 49999 ~ 'b') in ['a' * 50000] * 50000 }}",
    "{{ (['a' * 50000] * 50000)|select('in', ['a' * 49999 ~ 'b'] * 50000)|list }}",
    "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = [n.s, n.s]|join %}{% endfor %}",
    "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s|replace('a', 'aa') %}{% endfor %}",
    (
        "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set x %}{{n.s}}{{n.s}}{% endset %}"
        "{% set n.s = x %}{% endfor %}"
    ),
    (
        "{% macro twice(s) %}{{ s }}{{ s }}{% endmacro %}"
        "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = twice(n.s) %}{% endfor %}"
    ),
    "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
    "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s|tojson }}",
    "{% set n = namespace(i=9) %}{% for i in range(40000) %}{% set n.i = n.i * n.i %}{% endfor %}",
    "{% for i in range(40000) %}{% for j in range(90000) if false %}{% endfor %}{% endfor %}",
    "{% for i in range(40000) %}{{ range(90000)|select|first }}{% endfor %}",
    "{% for i in range(40000) %}{{ range(90000)|list|length }}{% endfor %}",
    "{% for i in range(40000) %}{{ range(90000)|reverse|select('eq', -1)|list }}{% endfor %}",
    "{% macro m() %}{{ varargs|length }}{% endmacro %}{% for i in range(20000) %}{{ m(*range(90000)) }}{% endfor %}",
    "{% set x %}{% for i in range(49000) %}" + "x" * 5000 + "{% endfor %}{% endset %}",
    (
        "{% set n = namespace(s=[1] * 9000) %}{% for i in range(200) %}{% set n.s = [n.s] %}{% endfor %}"
        "{{ n.s|tojson(indent=16) }}"
    ),
    "{% for i in range(49000) %}" + "{% set x = i %}" * 2000 + "{% endfor %}",
    BIG + "{% for i in range(40000) %}{% set n.l = n.l + [n.s[1:]] %}{% endfor %}",
    BIG + "{% for i in range(40000) %}{% set n.i = n.s|upper|length %}{% endfor %}",
    BIG + "{% for i in range(40000) %}{% set n.i = n.s.find('b' ~ i) %}{% endfor %}",
    BIG + "{% for i in range(40000) %}{% set n.i = 'z' in n.s %}{% endfor %}",
    BIG + "{% for i in range(40000) %}{% set n.i = n.s.split('b')|length %}{% endfor %}",
    BIG + "{% for i in range(40000) %}{% set n.l = n.l + [n.s.split()] %}{% endfor %}",
    BIG + "{% for i in range(40000) %}{% set n.l = n.s|list %}{% endfor %}",
    BIG + "{{ n.s.strip(n.s + 'z') }}",
    BIG + "{{ n.s|trim('z' + n.s) }}",
    BIG + "{{ n.s.rfind('b' + n.s[9:90000]) }}",
]


@pytest.mark.parametrize("source", LARGE_VALUES)
def test_no_expression_builds_or_walks_large_values(source: str) -> None:
    template = ChatTemplate(source)
    assert any(stopped_after_s(template) < 0.5 for _ in range(3))  # this machine may be busy


def stopped_after_s(template: ChatTemplate) -> float:
    started_s = time.process_time()
    with pytest.raises(UnsupportedModel, match="stopped"):
        template.render(HELLO)
    return time.process_time() - started_s


def test_what_chat_templates_use_is_there() -> None:
    source = (
        "{% set n = namespace(s='') %}{% for m in messages[1:] if m.role != 'system' %}"
        "{% set n.s = n.s ~ m.role|upper + ': ' + m['content'].strip().split('</think>')[-1].lstrip('\n')|trim %}"
        "{% if loop.last and m.content.startswith('H') and 'ell' in m.content %}{% set n.s = n.s + '!' %}{% endif %}"
        "{% endfor %}{{ n.s.replace('Hello', 'Hi')|replace('USER', 'User') }};"
        "{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|map('lower')|unique|join(', ') }};"
        "{{ messages|rejectattr('role', 'in', ['user'])|list|length }}{{ (messages|last).get('x', 'none')|title }};"
        "{% for k, v in {'b': 1, 'a': [1, 2]}|dictsort %}{{ k }}={{ v|tojson }};{% endfor %}"
        "{% for k, v in {'c': 2.0}.items() %}{{ k|capitalize }}{{ v|int|string + '%' }}{% endfor %}"
        "{{ [3, 1]|sort|first }}{{ [3, 1]|reverse|list }}{{ {}|default({'a': 1}, true)|tojson(indent=2) }}"
        "{{ ', '.join(['x', 'y']) }}{{ 7 % 4 }}{{ 2 * 3 - 1 }}{{ '-' * 3 }}{{ [1] + [2] }}"
        "{% macro m(a, b=2) %}<{{ a }}{{ b }}{{ caller() if caller else '' }}>{% endmacro %}"
        "{{ m(1)|safe }}{% call m(3) %}c{% endcall %}{% filter upper %}f{% endfilter %}"
        "{% for i in [1, [2]] recursive %}{{ i if i is number else loop(i) }}{% endfor %}{{ nothing is defined }}"
    )
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "<think>x</think>\n Hello"}]
    assert ChatTemplate(source).render([*messages, *HELLO]) == (
        "User: HiUser: Hi!;<think>x</think>\n hello, hello;1None;a=[1, 2];b=1;C2%1[1, 3]{\n"
        '  "a": 1\n}x, y35---[1, 2]<12><32c>F12False'
    )


def test_long_conversations_fit() -> None:
    source = CHATML.replace("m.content", "m.content.split('</think>')[-1].strip()|trim").replace(
        "{{-", "X" * 3000 + "{{-"
    )
    few, many = [*HELLO] * 2, [{"role": "user", "content": "Hello " * 20}] * 20_000
    assert ChatTemplate(CHATML).render(few).count("Hello") == 2
    assert ChatTemplate(source.replace("X" * 3000, "")).render(many).count("Hello") == 400_000
    assert ChatTemplate(source).render(many[:2000]).count("Hello") == 40_000


def test_the_bound_on_loops_is_for_each_rendering() -> None:
    template = ChatTemplate("{% for m in messages %}{% for i in range(20000) %}{% endfor %}{% endfor %}ok")
    assert 2 * (2 * 20_000 + 2) > MAX_STEPS > 2 * 20_000 + 2
    assert [template.render(HELLO * 2) for _ in range(2)] == ["ok", "ok"]


def test_a_prompt_beyond_all_bounds_is_refused() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(InvalidRequest, match="longer than"):
        template.render([{"role": "user", "content": "x" * 1_000_000}] * 17)

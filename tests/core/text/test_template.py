"""Chat templates render as transformers renders them, and cannot hurt the server."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polymux.core.errors import InvalidRequest, ModelError
from polymux.core.models import ModelFiles
from polymux.core.testing import tokenizers as small
from polymux.core.text.template import ChatTemplate

CHATML = """{% for message in messages %}
{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

HEADERS = """{{- bos_token }}
{%- if date_string is not defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0].role == "system" %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<head>system</head>\n\nToday: " + date_string + "\n" + system }}
{%- for message in messages %}
    {%- if message.role == "skip" %}{% continue %}{% endif %}
    {{- "<head>" ~ message.role ~ "</head>\n\n" ~ (message.content | trim) ~ loop.index }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<head>assistant</head>\n\n" }}{% endif %}"""

STRICT = """{{ bos_token }}{% for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}{{ '[ASK] %s [/ASK]' | format(message['content']) }}
    {%- else %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% endif %}
{%- endfor %}"""

TOOLS = """{% set ns = namespace(calls=0) %}
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{{ tools | tojson(indent=2) }}{% endif %}
{%- for message in messages %}
    {%- if message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {%- set ns.calls = ns.calls + 1 %}
            {{- '<call>' + call.function.name + call.function.arguments.items() | list | string + '</call>' }}
        {%- endfor %}
    {%- else %}{{- message.content.replace('<', '(').split('|') | join(', ') }}{% endif %}
{%- endfor %}{{ ns.calls }}{% if enable_thinking | default(true) %}<think>{% endif %}"""

TOOL = {"type": "function", "function": {"name": "météo", "parameters": {"q": "<b>&'\""}}}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CASES = {
    "chatml": (CHATML, [("system", "Be brief."), ("user", "Hi\n")], {}),
    "headers": (HEADERS, [("system", " s "), ("user", " a "), ("skip", "b"), ("assistant", "c ")], {}),
    "strict": (STRICT, [("user", "a"), ("assistant", "b"), ("user", "c")], {}),
    "tools": (TOOLS, [("user", "a|<b>|é"), ("user", "ünï")], {"tools": [TOOL]}),
    "no tools": (TOOLS, [("user", "plain")], {}),
}


def say(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


def render(source: str, messages: list[dict[str, Any]] | None = None, **kwargs: Any) -> str:
    return ChatTemplate({"default": source}, SPECIAL).render(messages or say(("user", "hi")), **kwargs)


def render_theirs(source: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=small.byte_level(), **SPECIAL)
    return tokenizer.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=True, **kwargs
    )


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_that_of_transformers(name: str):
    source, turns, kwargs = CASES[name]
    assert render(source, say(*turns), **kwargs) == render_theirs(source, say(*turns), **kwargs)


def test_options_and_tool_calls_reach_the_template_as_in_transformers():
    """OpenAI writes a call's arguments as JSON text; templates are written for the object."""
    call = {"id": "1", "type": "function", "function": {"name": "météo", "arguments": {"city": "Zürich"}}}
    theirs = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    written = {**call, "function": {"name": "météo", "arguments": json.dumps({"city": "Zürich"})}}
    ours = [{"role": "assistant", "content": None, "tool_calls": [written]}]
    expected = render_theirs(TOOLS, theirs, enable_thinking=False)
    assert render(TOOLS, ours, options={"enable_thinking": False}) == expected
    assert "Zürich" in expected and "<think>" not in expected


@given(st.text())
def test_what_users_write_is_never_run(text: str):
    for content in (text, "{{ 7 * 7 }}" + text, "{% raw %}" + text + "{% include 'x' %}"):
        assert render("{{ messages[0].content }}", say(("user", content))) == content


def test_text_parts_are_joined_and_others_named():
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": " this?"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "What is this?"
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with pytest.raises(InvalidRequest, match=r"messages\[1\]\.content\[2\] is of type 'image_url'") as caught:
        render(CHATML, [*say(("user", "a")), {"role": "user", "content": [*parts, picture]}])
    assert caught.value.status == 400 and caught.value.param == "messages[1].content[2]"


@pytest.mark.parametrize("part", ["text", None, 3, {}, {"type": "text"}, {"type": "text", "text": 4}])
def test_malformed_parts_are_refused(part: Any):
    with pytest.raises(InvalidRequest):
        render(CHATML, [{"role": "user", "content": [part]}])


def test_a_developer_is_the_system_where_a_template_knows_no_developer():
    assert render("{{ messages[0].role }}", say(("developer", "x"))) == "system"
    assert render("{{ messages[0].role }}{# developer #}", say(("developer", "x"))) == "developer"


def test_the_templates_own_refusal_is_told_to_the_user():
    with pytest.raises(InvalidRequest, match="must alternate"):
        render(STRICT, say(("user", "a"), ("user", "b")))


def test_tools_and_options_that_a_template_does_not_use_are_refused():
    """A field is honoured or refused, never ignored in silence."""
    with pytest.raises(InvalidRequest, match="tools"):
        render(CHATML, tools=[TOOL])
    for options in ({"enable_thinking": True}, {"messages": []}, {"bos_token": "x"}):
        with pytest.raises(InvalidRequest):
            render(CHATML, options=options)
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        render(TOOLS, [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}])


HOSTILE = {
    "endless loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a tree of calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(64) }}",
    "multiplied text": "{{ 'a' * 10000000000 }}",
    "multiplied list": "{{ ([0] * 10000000000) | length }}",
    "doubled text": "{% set n = namespace(s='aa') %}{% for i in range(64) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "added text": "{% set n = namespace(s='aa') %}{% for i in range(64) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "replaced text": "{% set n = namespace(s='aa') %}{% for i in range(64) %}"
    "{% set n.s = n.s.replace('a', 'aaaaaaaa') %}{% endfor %}",
    "replaced by filter": "{% set n = namespace(s='aa') %}{% for i in range(64) %}"
    "{% set n.s = n.s | replace('a', 'aaaaaaaa') %}{% endfor %}",
    "joined text": "{{ range(99999) | join('x' * 9999) }}",
    "joined by method": "{{ ('x' * 9999).join(range(99999) | map('string')) }}",
    "endless output": "{% for i in range(9999) %}{{ 'x' * 99999 }}{% endfor %}",
    "padded text": "{{ '%10000000000d' % 1 }}",
    "padded by format": "{{ '{:10000000000d}'.format(1) }}",
    "padded by an argument": "{{ '{:{}}'.format(1, 10000000000) }}",
    "padded by method": "{{ 'x'.ljust(10000000000) }}",
    "padded by filter": "{{ 'x' | indent(10000000000, first=true) }}",
    "padded JSON": "{{ messages | tojson(indent=10000000000) }}",
    "huge power": "{{ 10 ** 10 ** 10 }}",
    "private attributes": "{{ messages.__class__.__base__.__subclasses__() }}",
    "a private namespace": "{% set n = namespace(a=1) %}{% set n.__class__ = 1 %}",
    "changed messages": "{{ messages.append(1) }}",
    "files": "{% include '/etc/passwd' %}",
    "missing message": "{{ messages[9].content.x }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_only_fails_its_request(name: str):
    start = time.process_time()
    with pytest.raises(InvalidRequest):
        render(HOSTILE[name])
    assert time.process_time() - start < 5


def test_ordinary_patterns_are_no_attack():
    source = """{{ '{"year": 2024, "args": {%s}} %5.2f' % ('x', 1) }}{{ '{:>4} {}: {{y}}'.format(1, 'a') }}"""
    assert render(source) == '{"year": 2024, "args": {x}}  1.00   1 a: {y}'


def test_a_long_conversation_is_no_attack():
    messages = say(*[("user", "word " * 40), ("assistant", "yes")] * 2000)
    assert len(render(HEADERS, messages)) > 400_000


def test_a_template_that_is_none_is_a_model_error():
    for source in ("{% if %}", "{{ 'x' | center(9) }}"):
        with pytest.raises(ModelError):
            ChatTemplate({"default": source}, {})


def test_where_templates_come_from(tmp_path: Path):
    files = ModelFiles("mine", tmp_path)
    assert ChatTemplate.load(files, {}) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one"}))
    assert ChatTemplate.load(files, {}).render(say(("user", "a"))) == "one"
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.load(files, {}).render(say(("user", "a"))) == "two"
    assert ChatTemplate.load(files, {}).render(say(("user", "a")), tools=[TOOL]) == "1 tools"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert ChatTemplate.load(files, {}).render(say(("user", "a"))) == "three"
    config.write_text(json.dumps({"chat_template": 5}))
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ModelError):
        ChatTemplate.load(files, {})

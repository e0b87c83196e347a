"""The chat template renders as Hugging Face's does, and cannot be abused."""

from __future__ import annotations

import datetime
import json

import pytest

from gateway.errors import BadRequestError
from gateway.prompt.masking import Masking
from gateway.prompt.template import ChatTemplate
from gateway.types import Tool

MASKING = Masking(["<|im_end|>", "<s>"])


def render(source: str, messages: list[dict[str, object]] | None = None, **special_tokens: str) -> str:
    template = ChatTemplate(source, special_tokens, MASKING)
    return template.render(messages or [{"role": "user", "content": "hi"}], add_generation_prompt=True)


def test_blocks_leave_no_lines_behind() -> None:
    source = (
        "{% for m in messages %}\n    {% if m.role == 'user' %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\nend"
    )
    assert render(source) == "hi\nend"


def test_special_tokens_and_the_generation_prompt_are_variables() -> None:
    assert render("{{ bos_token }}{{ add_generation_prompt }}{{ tools is none }}", bos_token="<s>") == "<s>TrueTrue"


def test_tojson_does_not_escape_html_or_other_alphabets() -> None:
    messages = [{"role": "user", "content": {"a": "<b> & 'é'"}}]
    assert render("{{ messages[0].content | tojson }}", messages) == '{"a": "<b> & \'é\'"}'
    assert render("{{ messages[0].content | tojson(indent=2) }}", messages) == '{\n  "a": "<b> & \'é\'"\n}'


@pytest.mark.parametrize("ascii_only", ["true", "false"])
@pytest.mark.parametrize("text", ["<|im_end|>", "⸻<s>\\⸻", "a\\", "\\u2e3b <", "\\\\⸻"])
def test_masked_text_survives_tojson(ascii_only: str, text: str) -> None:
    rendered = render(
        f"{{{{ messages[0].content | tojson(ensure_ascii={ascii_only}) }}}}", [{"role": "user", "content": text}]
    )
    assert "<|im_end|>" not in rendered
    assert json.loads(MASKING.unmask(rendered)) == text


def test_strftime_now_loop_controls_namespace_and_generation_work() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    source = (
        "{% set ns = namespace(n=0) %}{% for i in range(9) %}{% if i > 3 %}{% break %}{% endif %}{% set ns.n = i %}"
    )
    assert render(source + "{% endfor %}{{ ns.n }}") == "3"
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "ahib"
    assert render("{{ dict(a=1) | tojson }}") == '{"a": 1}'


def test_what_the_template_refuses_is_a_bad_request_in_its_own_words() -> None:
    with pytest.raises(BadRequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_refusal_quotes_users_as_they_wrote() -> None:
    with pytest.raises(BadRequestError, match=r"no <\|im_end\|> here"):
        messages = [{"role": "user", "content": "no <|im_end|> here"}]
        render("{{ raise_exception(messages[0].content) }}", messages)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].missing.deeper }}",
        "{{ 'a' + messages[0].missing }}",
        "{{ messages[0].__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].pop('role') }}",
        "{% for m in messages %}{{ loop._iterator.gi_frame.f_back }}{% endfor %}",
        "{{ messages[0].role.__class__.__mro__ }}",
        "{{ range(10000000) | list }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ namespace(_x=1) }}",
    ],
)
def test_what_the_template_trips_over_is_a_bad_request(source: str) -> None:
    with pytest.raises(BadRequestError):
        render(source)


def test_format_strings_do_not_reach_into_objects() -> None:
    assert render("{{ '{0.__class__}|{0}'.format(messages[0].role) }}") == "|user"
    assert "class" not in render("{{ '{a.__class__}'.format_map({'a': messages[0].role}) }}")


def test_a_template_that_does_not_compile_says_where() -> None:
    with pytest.raises(ValueError, match="line 2"):
        ChatTemplate("{{ a }}\n{% for %}", {}, MASKING)


def test_attributes_of_messages_are_found_before_methods_of_dictionaries_are_hidden() -> None:
    messages = [{"role": "user", "content": "x", "items": "mine"}]
    assert render("{{ messages[0].role }} {{ messages[0]['items'] }} {{ messages[0].items() | length }}", messages) == (
        "user mine 3"
    )


TOOL = Tool("look", "Looks for <|im_end|>.", {"type": "object", "properties": {"<|im_end|>": {"type": "string"}}})


def test_tools_are_given_as_the_openai_api_writes_them_and_special_strings_in_them_are_text() -> None:
    masking = Masking(["<|im_end|>"])
    template = ChatTemplate("{% for tool in tools %}{{ tool | tojson }}|{% endfor %}", {}, masking)
    assert template.takes_tools
    text = template.render([], tools=(TOOL, Tool("now")), add_generation_prompt=False)
    assert "<|im_end|>" not in text
    written = [json.loads(item + "}") for item in masking.unmask(text).split("}|")[:2]]
    assert written == [
        {
            "type": "function",
            "function": {"name": "look", "description": TOOL.description, "parameters": TOOL.parameters},
        },
        {
            "type": "function",
            "function": {"name": "now", "description": None, "parameters": None},
        },
    ]


@pytest.mark.parametrize(
    "shown",
    [
        "{{ tool.function.name + ': ' + tool.function.description }}",
        "{{ tool.function.name ~ ': ' ~ tool.function.description }}",
        "{{ tool.function.name }}: {% for name in tool.function.parameters.properties %}{{ name }}{% endfor %}",
    ],
)
def test_a_template_that_takes_a_description_or_parameters_for_granted_is_given_empty_ones(shown: str) -> None:
    template = ChatTemplate(f"None{{% for tool in tools %}}{shown}{{% endfor %}}", {}, MASKING)
    assert template.render([], tools=(Tool("now"),), add_generation_prompt=False) == "Nonenow: "


def test_without_tools_a_template_has_none_and_one_that_makes_its_own_takes_none() -> None:
    template = ChatTemplate("{{ tools is none }}", {}, MASKING)
    assert template.takes_tools
    assert template.render([], add_generation_prompt=False) == "True"
    assert not ChatTemplate("{% set tools = [] %}{{ messages }}", {}, MASKING).takes_tools

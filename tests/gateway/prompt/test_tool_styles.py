"""Which style of tool calls a chat template has, and which have none."""

from __future__ import annotations

import pytest

from gateway.prompt.masking import Masking
from gateway.prompt.template import ChatTemplate
from gateway.prompt.tool_styles import HERMES, JSON, LLAMA3, MISTRAL, UNKNOWN, ToolStyle, find_style
from tests.fakes import tokenisers, tool_templates


def style_of(template: str) -> ToolStyle | str:
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    return find_style(ChatTemplate(template, names, Masking(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])))


@pytest.mark.parametrize(
    ("name", "style", "before", "single"),
    [
        ("qwen", HERMES, "\n", False),
        ("thinking", HERMES, "\n", False),
        ("hermes", HERMES, "\n", False),
        ("llama3", LLAMA3, "", True),
        ("mistral", MISTRAL, " ", False),
        ("tekken", MISTRAL, "", False),
        ("demo", JSON, "", False),
    ],
)
def test_a_template_shows_how_its_model_writes_calls(name: str, style: ToolStyle, before: str, single: bool) -> None:
    found = style_of(tool_templates.ALL[name]().chat_template or "")
    assert isinstance(found, ToolStyle)
    assert (found.name, found.before, found.single) == (style.name, before, single)


@pytest.mark.parametrize("name", tool_templates.UNKNOWN)
def test_a_way_to_write_calls_that_is_not_in_the_table_is_not_guessed_at(name: str) -> None:
    assert style_of(tool_templates.unknown(name)) == UNKNOWN


def test_a_template_that_does_not_look_at_tools_has_no_style() -> None:
    assert style_of(tokenisers.CHATML) == "its chat template takes no tools"
    assert style_of("{% set tools = [] %}{{ tools }}") == "its chat template takes no tools"


def test_a_template_that_refuses_every_call_has_no_style() -> None:
    refuses = (
        "{{ tools }}{% for message in messages %}{% if message.tool_calls %}{{ raise_exception('no') }}{% endif %}"
    )
    assert style_of(refuses + "{% endfor %}") == UNKNOWN

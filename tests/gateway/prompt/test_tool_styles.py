"""Which style of tool calls a chat template has, and which have none."""

from __future__ import annotations

import copy
from array import array
from typing import Any

import pytest
from tokenizers import Tokenizer as HfTokenizer

from engine.protocol import Sampling
from gateway.config import PromptSettings
from gateway.prompt.masking import Masking
from gateway.prompt.stage import PromptStage
from gateway.prompt.template import ChatTemplate
from gateway.prompt.tool_styles import (
    HERMES,
    JSON,
    LLAMA3,
    MISTRAL,
    SHORT_ID,
    UNKNOWN,
    ToolStyle,
    find_style,
    shorten_ids,
)
from gateway.types import ChatPrompt, Request, Tenant, Tool
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
    assert found.short_ids is (style is MISTRAL)


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


def test_ids_of_calls_are_shortened_alike_in_calls_and_results_and_nothing_else_is_changed() -> None:
    call = {"id": "call_0123456789", "type": "function", "function": {"name": "f", "arguments": {}}}
    kept = {**call, "id": "abcDEF123"}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call, kept]},
        {"role": "tool", "tool_call_id": "call_0123456789", "content": "y"},
        {"role": "tool", "tool_call_id": "abcDEF123", "content": "z"},
    ]
    before = copy.deepcopy(messages)
    short: list[Any] = list(shorten_ids(messages))
    assert messages == before
    assert short[0] == messages[0]
    made, other = short[1]["tool_calls"]
    assert made["id"] == short[2]["tool_call_id"] != "call_0123456789"
    assert len(made["id"]) == SHORT_ID
    assert made["id"].isalnum()
    assert {**made, "id": call["id"]} == call
    assert other["id"] == short[3]["tool_call_id"] == "abcDEF123"


@pytest.mark.parametrize("name", tool_templates.ALL)
async def test_a_conversation_with_a_call_renders_whatever_its_id_is(name: str) -> None:
    files = tool_templates.ALL[name]()
    stage, hello = PromptStage(PromptSettings()), tokenisers.hello(files)
    await stage.load(hello, files)
    call = {"id": "call_0123456789abcdef", "type": "function", "function": {"name": "now", "arguments": {}}}
    messages = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "Now."},
    ]
    prompt = ChatPrompt(messages, tools=(Tool("now"),))
    request = Request("r", Tenant("t"), "model", prompt, Sampling(max_tokens=1), received_s=0, deadline_s=0)
    encoded = await stage.encode(request, hello)
    text = HfTokenizer.from_str(files.tokenizer_json).decode(array("I", encoded.tokens).tolist())
    assert "Now." in text
    stage.close()

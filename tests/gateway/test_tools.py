"""Calls that a model chooses to make: all stages of the gateway, between the real openai SDK and an engine that says
what models of each family write."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from tests.fakes import tool_templates
from tests.fakes.whole import Whole, whole

ASK: Any = {"role": "user", "content": "How is it in Oslo, and what time is it?"}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    },
    {"type": "function", "function": {"name": "now"}},
]
OSLO = '{"city": "Øslo 🌧"}'
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {OSLO}}}, {{"name": "now", "arguments": {{}}}}]',
    "llama3": f'<|python_tag|>{{"name": "weather", "parameters": {OSLO}}}',
    "demo": f'{{"name": "weather", "arguments": {OSLO}}}\n{{"name": "now", "arguments": {{}}}}',
}
STYLES = {"qwen": "hermes", "hermes": "hermes", "mistral": "mistral", "tekken": "mistral"}


def tokens_of(name: str, text: str) -> tuple[int, ...]:
    hf = Tokenizer.from_str(tool_templates.ALL[name]().tokenizer_json)
    return tuple(hf.encode(text, add_special_tokens=False).ids)


async def answers(all_of_it: Whole, **options: Any) -> list[Any]:
    """The choice of the whole answer, and that of the same streamed."""
    create = all_of_it.client.chat.completions
    asking: Any = {"model": "demo", "messages": [ASK], "tools": TOOLS, **options}
    whole_answer = await create.create(**asking)
    async with create.stream(**asking) as stream:
        streamed = await stream.get_final_completion()
    return [whole_answer.choices[0], streamed.choices[0]]


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]


@pytest.mark.parametrize("step", [1, 3, 50])
@pytest.mark.parametrize("name", ["qwen", "hermes", "mistral", "tekken", "llama3", "demo"])
async def test_what_each_family_writes_is_text_and_calls_for_the_sdk(name: str, step: int) -> None:
    said = tokens_of(name, "Let me see.\n\n" + CALLS[STYLES.get(name, name)])
    behaviour: Any = {"answer": said, "tokens": len(said), "finish": "stop", "tokens_per_step": step}
    async with whole(files=tool_templates.ALL[name](), **behaviour) as all_of_it:
        for choice in await answers(all_of_it):
            assert (choice.message.content or "").strip() == "Let me see."
            assert choice.finish_reason == "tool_calls"
            one, *others = calls_of(choice)
            assert (one[0], json.loads(one[1])) == ("weather", json.loads(OSLO))
            assert others == ([] if name == "llama3" else [("now", "{}")])
        for choice in await answers(all_of_it, parallel_tool_calls=False):
            assert calls_of(choice) == [one]
        for choice in await answers(all_of_it, tool_choice="none"):
            assert '"weather"' in choice.message.content
            assert choice.message.tool_calls is None


async def test_a_tool_that_is_not_allowed_is_not_called() -> None:
    said = tokens_of("qwen", CALLS["hermes"])
    only: Any = [{"type": "function", "function": {"name": "now"}}]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": only}}
    async with whole(files=tool_templates.qwen(), answer=said, tokens=len(said), finish="stop") as all_of_it:
        for choice in await answers(all_of_it, tool_choice=allowed):
            assert calls_of(choice) == [("now", "{}")]
            assert choice.message.content.startswith('<tool_call>\n{"name": "weather"')


async def test_arguments_that_ran_out_of_tokens_are_told_as_far_as_they_came() -> None:
    said = tokens_of("qwen", CALLS["hermes"][:50])
    async with whole(files=tool_templates.qwen(), answer=said, tokens=len(said)) as all_of_it:
        create = all_of_it.client.chat.completions.create
        answer = await create(model="demo", messages=[ASK], tools=TOOLS, max_tokens=len(said))
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert calls_of(choice) == [("weather", OSLO[: len(calls_of(choice)[0][1])])]


async def test_log_probabilities_are_those_of_the_content() -> None:
    said = tokens_of("qwen", "Let me see.\n\n" + CALLS["hermes"])
    async with whole(files=tool_templates.qwen(), answer=said, tokens=len(said), finish="stop") as all_of_it:
        for choice in await answers(all_of_it, logprobs=True):
            told = b"".join(bytes(one.bytes or ()) for one in choice.logprobs.content)
            assert choice.message.content.encode().startswith(told)
            assert b"Let me see" in told


async def test_a_strict_tool_brings_a_grammar_and_a_loose_one_does_not() -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    strict: Any = {"type": "function", "function": {"name": "now", "parameters": schema, "strict": True}}
    async with whole(files=tool_templates.qwen()) as all_of_it:
        for tools in ([TOOLS[0]], [TOOLS[0], strict]):
            await all_of_it.ask(ASK, tools=tools)
        loose, held = (submit.grammar for submit in all_of_it.submits)
    assert loose is None
    assert held is not None
    assert held.kind == "lark_schemas"


async def test_a_model_whose_calls_are_not_read_is_named_as_the_reason() -> None:
    async with whole() as all_of_it:
        create = all_of_it.client.chat.completions.create
        with pytest.raises(openai.BadRequestError, match="its chat template takes no tools") as caught:
            await create(model="demo", messages=[ASK], tools=TOOLS)
    assert caught.value.param == "tools"

"""The memo of whole prompts: the same messages are not rendered again, and nothing else is taken for the same."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from engine.protocol import Namespace, Sampling
from gateway.config import PromptSettings
from gateway.prompt.segments import PromptMemo
from gateway.prompt.stage import PromptStage
from gateway.types import ChatPrompt, EncodedPrompt, Request, Tenant, Tool
from tests.fakes import tokenisers, tool_templates
from tests.fakes.tuned import tuned

NAMESPACE = Namespace(weights="w", dtype="float32", kv_dtype="float32", block_size=4)


def chat(*contents: Any, **more: Any) -> ChatPrompt:
    return ChatPrompt([{"role": "user", "content": content} for content in contents], **more)


def remember(memo: PromptMemo, prompt: ChatPrompt, tokens: bytes, namespace: Namespace = NAMESPACE) -> None:
    num_chars = sum(len(message["content"]) for message in prompt.messages)
    memo.put(memo.key(namespace, prompt, num_chars), prompt, EncodedPrompt(tokens, b""), num_chars)


def look_up(memo: PromptMemo, prompt: ChatPrompt, namespace: Namespace = NAMESPACE) -> bytes | None:
    num_chars = sum(len(message["content"]) for message in prompt.messages)
    found = memo.find(memo.key(namespace, prompt, num_chars), prompt)
    return None if found is None else found.tokens


def test_equal_messages_are_found_and_others_of_the_same_size_are_not() -> None:
    memo = PromptMemo(100_000)
    remember(memo, chat("ab", "the end"), b"1234")
    assert look_up(memo, copy.deepcopy(chat("ab", "the end"))) == b"1234"
    assert look_up(memo, chat("ba", "the end")) is None
    assert look_up(memo, chat("ab", "the end", add_generation_prompt=False)) is None
    assert look_up(memo, ChatPrompt([{**message, "name": "x"} for message in chat("ab", "the end").messages])) is None


def test_a_prompt_that_looks_alike_takes_the_place_of_the_one_before() -> None:
    memo = PromptMemo(100_000)
    remember(memo, chat("ab", "the end"), b"1234")
    remember(memo, chat("ba", "the end"), b"5678")
    assert look_up(memo, chat("ba", "the end")) == b"5678"
    assert look_up(memo, chat("ab", "the end")) is None
    assert len(memo) == 1


def test_tenants_have_prompts_of_their_own() -> None:
    memo = PromptMemo(100_000)
    remember(memo, chat("x"), b"1234", replace(NAMESPACE, salt="one"))
    assert look_up(memo, chat("x"), replace(NAMESPACE, salt="two")) is None


def test_the_memo_stays_within_its_limit_and_forgets_the_oldest_first() -> None:
    memo = PromptMemo(5_000)
    for number in range(20):
        remember(memo, chat(f"{number:03}"), b"1234")
        assert look_up(memo, chat("000")) is not None or number > 5
        assert memo.num_bytes <= 5_000
    assert 1 < len(memo) < 20
    remember(memo, chat("x" * 5_000), b"1234")
    assert look_up(memo, chat("x" * 5_000)) is None
    assert look_up(memo, chat("019")) is not None


def test_a_limit_of_zero_keeps_nothing() -> None:
    memo = PromptMemo(0)
    remember(memo, chat("x"), b"1234")
    assert (look_up(memo, chat("x")), memo.num_bytes, len(memo)) == (None, 0, 0)


@pytest.mark.parametrize(("addition", "remembered"), [("", 1), ("{{ strftime_now('%Y') }}", 0)])
async def test_the_stage_renders_the_same_messages_once_unless_the_template_looks_at_the_clock(
    addition: str, remembered: int
) -> None:
    files = tokenisers.qwen()
    files = replace(files, chat_template=(files.chat_template or "") + addition)
    stage = PromptStage(PromptSettings())
    hello = tokenisers.hello(files)
    await stage.load(hello, files)
    request = Request("r", Tenant("t"), "model", chat("Hello."), Sampling(max_tokens=1), received_s=0, deadline_s=0)
    first, second = [await stage.encode(request, hello) for _ in range(2)]
    assert (first.tokens, first.digests) == (second.tokens, second.digests)
    assert first.new_tokens > second.new_tokens == 0
    assert stage.stats()["model"]["prompt_memo_hit_segments"] == remembered
    stage.close()


def test_prompts_with_other_tools_or_another_ending_are_others() -> None:
    memo = PromptMemo(100_000)
    tools = (Tool("f", None, {"type": "object", "properties": {"a": {"type": "string"}}}),)
    others = (Tool("f", None, {"type": "object", "properties": {"b": {"type": "string"}}}),)
    remember(memo, chat("x", tools=tools), b"1234")
    assert look_up(memo, copy.deepcopy(chat("x", tools=tools))) == b"1234"
    assert look_up(memo, chat("x", tools=others)) is None
    assert look_up(memo, chat("x")) is None
    prompt = chat("x", tools=tools)
    assert memo.find(memo.key(NAMESPACE, prompt, 1, "<tool_call>"), prompt) is None


async def test_tools_count_in_the_size_of_a_remembered_prompt() -> None:
    files = tool_templates.qwen()
    stage = PromptStage(tuned(PromptSettings, thread_chars=10, prompt_memo_bytes=100_000))
    hello = tokenisers.hello(files)
    await stage.load(hello, files)
    tools = (Tool("f", "x" * 60_000),)
    values: dict[str, Any] = {"received_s": 0, "deadline_s": 0}
    request = Request("r", Tenant("t"), "model", chat("Hello.", tools=tools), Sampling(max_tokens=1), **values)
    await stage.encode(request, hello)
    assert stage.stats()["model"]["prompt_memo_entries"] == 0  # larger than the memo
    assert stage.stats()["model"]["tools"] == "hermes"
    stage.close()

"""What lines begin with: those that begin alike stand side by side."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import orjson
import pytest

from engine.protocol import Sampling, split_digests
from gateway.api.beginnings import MAX_PREFIX_BYTES, beginning_of_body, beginning_of_call
from gateway.api.call import Call
from gateway.queues.batch.paths import path_of
from gateway.types import ChatPrompt, Prompt, TextPrompt, TokenPrompt, Tool


def call(prompt: Prompt, **more: Any) -> Call:
    return Call("demo", (prompt,), "messages", Sampling(max_tokens=1), **more)


def test_prompts_that_begin_alike_stand_together() -> None:
    document = "A long document about rivers. " * 40

    def chat(text: str, question: str) -> dict[str, Any]:
        messages = [{"role": "system", "content": text}, {"role": "user", "content": question}]
        return {"model": "up-1", "messages": messages, "temperature": 0.5}

    bodies = [chat(text, f"{number}?") for number in range(3) for text in (document, "B" + document, "C" + document)]
    beginnings = [beginning_of_body(body) for body in bodies]
    order = sorted(range(9), key=lambda index: path_of(beginnings[index].digests))
    assert [{index % 3 for index in order[start : start + 3]} for start in (0, 3, 6)] in [
        [{a}, {b}, {c}] for a, b, c in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))
    ]
    assert beginnings[0].num_tokens == pytest.approx(len(orjson.dumps(bodies[0]["messages"])) / 4, rel=0.1)


def test_what_the_system_says_is_shared_by_lines_with_other_tools_and_tools_by_those_with_other_questions() -> None:
    def chat(tool: str, question: str) -> Call:
        messages = [{"role": "system", "content": "Be brief. " * 50}, {"role": "user", "content": question}]
        return call(ChatPrompt(messages, tools=(Tool(tool, "What it does. " * 50, {}),)))

    one, same_tool, other_tool = (
        beginning_of_call(made, "").digests for made in (chat("a", "Why?"), chat("a", "How?"), chat("b", "Why?"))
    )
    assert common(one, other_tool) >= 500 // 64
    assert common(one, same_tool) >= 1200 // 64


def common(one: bytes, other: bytes) -> int:
    """Leading digests that are the same."""
    pairs = zip(split_digests(one), split_digests(other), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def test_texts_and_tokens_have_beginnings_of_which_no_more_is_read_than_decides() -> None:
    long = beginning_of_call(call(TextPrompt("x" * 2 * MAX_PREFIX_BYTES)), "")
    assert long.digests == beginning_of_call(call(TextPrompt("x" * 3 * MAX_PREFIX_BYTES)), "").digests
    assert long.num_tokens == 2 * MAX_PREFIX_BYTES // 4
    assert beginning_of_call(call(TokenPrompt(bytes(4 * 100))), "").num_tokens == 100
    assert beginning_of_call(call(TokenPrompt(b"")), "") == (b"", 0)

"""Answers of upstreams from one form into the other: what a stream tells is what the whole answer says, and back."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.replies import data, event, read_events
from gateway.api.routes import REPLAYS
from gateway.types import Replay

CHAT, COMPLETION = REPLAYS["/v1/chat/completions"], REPLAYS["/v1/completions"]
RESPONSE, EMBEDDING = REPLAYS["/v1/responses"], REPLAYS["/v1/embeddings"]
MESSAGE, GEMINI = REPLAYS["/v1/messages"], REPLAYS[":generateContent"]
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
BASE = {"id": "c-1", "created": 1, "model": "m", "system_fingerprint": "fp"}
DONE = b"data: [DONE]\n\n"

texts = st.text(max_size=6)
calls = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.text("abc", min_size=1, max_size=3),
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": st.text("fg", min_size=1, max_size=3), "arguments": texts}),
        }
    ),
    max_size=2,
)


@st.composite
def chats(draw: st.DrawFn) -> dict[str, Any]:
    choices = []
    for index in range(draw(st.integers(1, 3))):
        message: dict[str, Any] = {"role": "assistant", "content": draw(texts) or None, "refusal": None}
        if called := draw(calls):
            message["tool_calls"] = called
        choices.append({"index": index, "message": message, "logprobs": None, "finish_reason": "stop"})
    return {**BASE, "object": "chat.completion", "choices": choices, "usage": USAGE}


blocks = st.lists(
    st.builds(lambda text: {"type": "text", "text": text}, texts)
    | st.builds(lambda text: {"type": "thinking", "thinking": text, "signature": "s"}, texts)
    | st.builds(lambda text: {"type": "tool_use", "id": "t", "name": "f", "input": {"a": text}}, texts),
    max_size=4,
)


@st.composite
def messages(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": draw(blocks),
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 3, "output_tokens": 2},
    }


parts = st.lists(
    st.builds(lambda text: {"type": "output_text", "text": text, "annotations": [], "logprobs": []}, texts)
    | st.builds(lambda text: {"type": "refusal", "refusal": text}, texts),
    max_size=2,
)
items = st.lists(
    st.builds(lambda parts: {"id": "i", "type": "message", "status": "completed", "content": parts}, parts)
    | st.builds(lambda text: {"id": "i", "type": "function_call", "name": "f", "arguments": text}, texts)
    | st.just({"id": "i", "type": "reasoning", "summary": []}),
    max_size=3,
)


@given(items, st.sampled_from(("completed", "incomplete")))
def test_a_response_that_becomes_a_stream_says_the_same(output: list[dict[str, Any]], status: str) -> None:
    whole = {"id": "r", "object": "response", "status": status, "output": output, "usage": {"input_tokens": 3}}
    assert folded(RESPONSE, whole) == whole


def folded(replay: Replay, whole: dict[str, Any]) -> Any:
    """There and back."""
    stream = replay.unfold(whole, usage=True)
    assert stream is not None
    return replay.fold(b"".join(stream))


@given(chats())
def test_a_chat_that_becomes_a_stream_says_the_same(whole: dict[str, Any]) -> None:
    assert folded(CHAT, whole) == whole


@given(messages())
def test_a_message_that_becomes_a_stream_says_the_same(whole: dict[str, Any]) -> None:
    assert folded(MESSAGE, whole) == whole


@given(st.lists(texts, min_size=1, max_size=3))
def test_completions_and_contents_say_the_same(said: list[str]) -> None:
    choices = [{"index": n, "text": one, "logprobs": None, "finish_reason": "stop"} for n, one in enumerate(said)]
    whole = {**BASE, "object": "text_completion", "choices": choices, "usage": USAGE}
    assert folded(COMPLETION, whole) == whole
    candidates = [
        {"index": n, "content": {"role": "model", "parts": [{"text": one}]}, "finishReason": "STOP"}
        for n, one in enumerate(said)
    ]
    contents = {"candidates": candidates, "usageMetadata": {"promptTokenCount": 3}, "modelVersion": "m"}
    assert folded(GEMINI, contents) == contents


def chunk(delta: dict[str, Any], index: int = 0, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
    return data({**BASE, "object": "chat.completion.chunk", "choices": [choice], **more})


USAGE_CHUNK = data({**BASE, "object": "chat.completion.chunk", "choices": [], "usage": USAGE})


def test_pieces_of_texts_and_calls_are_joined_and_what_is_not_known_is_kept() -> None:
    called = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
    stream = [
        chunk({"role": "assistant", "content": ""}, obfuscation="xyz"),
        chunk({"reasoning_content": "Hm"}),
        chunk({"reasoning_content": "m."}),
        chunk({"content": "Hel"}),
        chunk({"content": "lo"}),
        chunk({"tool_calls": [called]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}),
        chunk({"tool_calls": [{"index": 1, "id": "call_2", "type": "custom", "custom": {"name": "g", "input": ""}}]}),
        chunk({"tool_calls": [{"index": 1, "custom": {"input": "te"}}]}),
        chunk({"tool_calls": [{"index": 1, "custom": {"input": "xt"}}]}),
        chunk({}, finish="tool_calls"),
        USAGE_CHUNK,
        DONE,
    ]
    whole = CHAT.fold(b"".join(stream))
    assert whole is not None
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = {
        "role": "assistant",
        "content": "Hello",
        "reasoning_content": "Hmm.",
        "refusal": None,
        "tool_calls": [call, {"id": "call_2", "type": "custom", "custom": {"name": "g", "input": "text"}}],
    }
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls"}
    assert whole == {**BASE, "object": "chat.completion", "choices": [choice], "usage": USAGE}
    assert CHAT.ending(whole) == "tool_calls"


def test_pieces_of_lists_and_objects_are_joined() -> None:
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [], "audio": {"id": "audio_1", "transcript": "Hel"}},
        {"reasoning_details": [{"type": "reasoning.text", "text": "So"}], "audio": {"data": "QUJD"}},
        {"reasoning_details": [{"type": "reasoning.text", "text": " it is"}], "audio": {"data": "REVG"}},
        {"annotations": [{"type": "url_citation"}], "audio": {"transcript": "lo", "expires_at": 5}},
        {"tool_calls": [{"index": 0, "id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    ]
    chunks = [{**BASE, "error": None, "choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    end = {**BASE, "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}], "usage": USAGE}
    whole = CHAT.fold(b"".join(map(data, [*chunks, end])) + DONE)
    assert whole is not None
    assert whole["choices"][0]["message"] == {
        "role": "assistant",
        "content": None,
        "audio": {"id": "audio_1", "transcript": "Hello", "data": "QUJDREVG", "expires_at": 5},
        "reasoning_details": [
            {"type": "reasoning.text", "text": "So"},
            {"type": "reasoning.text", "text": " it is"},
        ],
        "annotations": [{"type": "url_citation"}],
        "tool_calls": [{"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        "refusal": None,
    }


def test_an_answer_that_says_an_error_is_none() -> None:
    said = {"choices": [{"finish_reason": "stop"}], "error": {"message": "overloaded"}}
    assert CHAT.ending(said) is None
    assert CHAT.ending(said | {"error": None}) == "stop"


def test_what_the_first_chunk_leaves_empty_is_that_of_a_later_one() -> None:
    first = {"id": "", "object": "", "created": 0, "model": "", "choices": [], "prompt_filter_results": [1]}
    end = {**BASE, "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}], "usage": USAGE}
    whole = CHAT.fold(data(first) + data(end) + DONE)
    assert whole is not None
    assert whole | BASE == whole
    assert whole["prompt_filter_results"] == [1]


def test_log_probabilities_of_pieces_are_joined() -> None:
    def scored(text: str) -> bytes:
        told = {"content": [{"token": text, "logprob": -1.0}], "refusal": None}
        choice = {"index": 0, "delta": {"content": text}, "logprobs": told, "finish_reason": None}
        return data({**BASE, "object": "chat.completion.chunk", "choices": [choice]})

    whole = CHAT.fold(scored("a") + scored("b") + chunk({}, finish="stop") + USAGE_CHUNK + DONE)
    assert whole is not None
    assert [one["token"] for one in whole["choices"][0]["logprobs"]["content"]] == ["a", "b"]


GOOD = chunk({"content": "Hello"}) + chunk({}, finish="stop")


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        GOOD + DONE,  # nobody knows what it took
        GOOD + USAGE_CHUNK,  # cut
        GOOD + data({"error": {"message": "x"}}) + USAGE_CHUNK + DONE,
        GOOD + b"data: {cut\n\n" + USAGE_CHUNK + DONE,
    ],
)
def test_a_stream_that_is_not_whole_is_no_answer(stream: bytes) -> None:
    assert CHAT.fold(stream) is None


START = event("message_start", {"type": "message_start", "message": {"id": "m", "content": [], "usage": {}}})
STOP = event("message_stop", {"type": "message_stop"})


@pytest.mark.parametrize("stream", [b"", START, STOP, START + event("error", {"type": "error", "error": {}}) + STOP])
def test_a_message_that_failed_or_was_cut_is_no_answer(stream: bytes) -> None:
    assert MESSAGE.fold(stream) is None


@pytest.mark.parametrize(
    ("replay", "whole", "ending"),
    [
        (CHAT, {"choices": [{"finish_reason": "stop"}]}, "stop"),
        (CHAT, {"choices": [{"finish_reason": "stop"}, {"finish_reason": "length"}]}, "length"),
        (CHAT, {"choices": [{"finish_reason": "tool_calls"}]}, "tool_calls"),
        (CHAT, {"choices": [{"finish_reason": "content_filter"}]}, None),
        (CHAT, {"choices": [{"finish_reason": None}]}, None),
        (CHAT, {"choices": []}, None),
        (CHAT, {"error": {}}, None),
        (MESSAGE, {"stop_reason": "end_turn"}, "stop"),
        (MESSAGE, {"stop_reason": "stop_sequence"}, "stop"),
        (MESSAGE, {"stop_reason": "tool_use"}, "tool_calls"),
        (MESSAGE, {"stop_reason": "max_tokens"}, "length"),
        (MESSAGE, {"stop_reason": "refusal"}, None),
        (MESSAGE, {"stop_reason": "pause_turn"}, None),
        (MESSAGE, {"type": "error"}, None),
        (RESPONSE, {"status": "completed", "output": [{"type": "reasoning"}, {"type": "message"}]}, "stop"),
        (RESPONSE, {"status": "completed", "output": [{"type": "function_call"}]}, "tool_calls"),
        (RESPONSE, {"status": "completed", "output": [{"type": "web_search_call"}]}, "tool_calls"),
        (RESPONSE, {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, "length"),
        (RESPONSE, {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}, None),
        (RESPONSE, {"status": "queued"}, None),
        (EMBEDDING, {"data": [{"embedding": "AAAA"}]}, "stop"),
        (EMBEDDING, {"data": []}, None),
        (GEMINI, {"candidates": [{"finishReason": "STOP"}]}, "stop"),
        (GEMINI, {"candidates": [{"finishReason": "MAX_TOKENS"}]}, "length"),
        (GEMINI, {"candidates": [{"finishReason": "SAFETY"}]}, None),
        (GEMINI, {"candidates": [{}]}, None),
        (GEMINI, {"promptFeedback": {"blockReason": "SAFETY"}}, None),
        (
            GEMINI,
            {"candidates": [{"finishReason": "STOP", "content": {"parts": [{"functionCall": {}}]}}]},
            "tool_calls",
        ),
    ],
)
def test_how_an_answer_ended(replay: Replay, whole: dict[str, Any], ending: str | None) -> None:
    assert replay.ending(whole) == ending


def said(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"output": [{"type": "reasoning"}, {"type": "message", "content": list(parts)}]}


def content(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"candidates": [{"content": {"parts": list(parts)}, **more}]}


@pytest.mark.parametrize(
    ("replay", "whole", "text"),
    [
        (CHAT, {"choices": [{"message": {"role": "assistant", "content": "a", "refusal": None}}]}, "a"),
        (CHAT, {"choices": [{"message": {"content": "a", "reasoning_content": "Hm."}}]}, "a"),
        (CHAT, {"choices": [{"message": {"content": "a", "refusal": "no"}}]}, None),
        (CHAT, {"choices": [{"message": {"content": None}}]}, None),
        (COMPLETION, {"choices": [{"text": "a"}]}, None),
        (MESSAGE, {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
        (MESSAGE, {"content": [{"type": "text", "text": "a", "citations": [{}]}]}, None),
        (MESSAGE, {"content": [{"type": "thinking", "thinking": "a"}]}, None),
        (GEMINI, content({"text": "a"}, {"text": "b", "thoughtSignature": "s"}), "ab"),
        (GEMINI, content({"text": "a", "thought": True}), None),
        (GEMINI, content({"text": "a"}, groundingMetadata={"x": 1}), None),
        (RESPONSE, said({"type": "output_text", "text": "a", "annotations": []}), "a"),
        (RESPONSE, said({"type": "output_text", "text": "a", "annotations": [{}]}), None),
        (RESPONSE, said({"type": "refusal", "refusal": "no"}), None),
        (EMBEDDING, {"data": [{"embedding": "AAAA"}]}, None),
    ],
)
def test_what_an_answer_that_is_one_text_says(replay: Replay, whole: dict[str, Any], text: str | None) -> None:
    assert replay.text(whole) == text


def test_several_answers_are_not_one_text() -> None:
    with pytest.raises(ValueError):
        CHAT.text({"choices": [{"message": {"content": "a"}}] * 2})


def test_an_item_that_nobody_knows_how_to_stream_is_not_streamed() -> None:
    for item in ({"type": "web_search_call"}, {"type": "reasoning", "summary": [{"text": "a"}]}):
        assert RESPONSE.unfold({"status": "completed", "output": [item]}, usage=False) is None


def test_a_response_that_failed_or_was_cut_is_no_answer() -> None:
    begun = event("response.created", {"type": "response.created", "response": {}})
    assert RESPONSE.fold(begun) is None
    assert RESPONSE.fold(begun + event("response.failed", {"type": "response.failed", "response": {}})) is None


def test_the_usage_of_a_stream_is_told_to_who_asked_for_it() -> None:
    with_usage, without = GOOD + USAGE_CHUNK + DONE, GOOD + DONE
    assert b"".join(CHAT.restream(with_usage, usage=True) or ()) == with_usage
    assert b"".join(CHAT.restream(with_usage, usage=False) or ()) == without
    assert b"".join(CHAT.restream(without, usage=False) or ()) == without
    assert CHAT.restream(without, usage=True) is None


def test_events_are_read_whatever_their_lines_end_with() -> None:
    stream = b"data: 1\n\n: note\r\n\r\nevent: x\r\ndata:2\r\ndata: 3\r\n\r\ndata: 4\r\rdata: cut"
    assert [told for told, _ in read_events(stream)] == [b"1", b"2\n3", b"4"]
    assert stream.startswith(b"".join(written for _, written in read_events(b"data: 1\n\n")))


def test_thoughts_and_texts_of_gemini_stay_apart() -> None:
    def part(**parts: Any) -> bytes:
        return data({"candidates": [{"index": 0, "content": {"role": "model", "parts": [parts]}}]})

    end = data({"candidates": [{"index": 0, "finishReason": "STOP"}], "usageMetadata": {"promptTokenCount": 1}})
    stream = part(text="a", thought=True) + part(text="b", thought=True) + part(text="c") + part(text="d") + end
    whole = GEMINI.fold(stream)
    assert whole is not None
    assert whole["candidates"][0]["content"]["parts"] == [{"text": "ab", "thought": True}, {"text": "cd"}]
    assert orjson.dumps(whole)

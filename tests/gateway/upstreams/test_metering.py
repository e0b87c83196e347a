"""Usage out of passing bytes, for what each provider writes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstreams.apis import Tokens
from gateway.upstreams.metering import Events, Meter, data_of
from tests.fakes.upstream import CHUNK, USAGE, events
from tests.fakes.upstream import chunk as chat_chunk

SSE, JSON = "text/event-stream", "application/json"


def sse(*events: Any) -> bytes:
    return b"".join(
        b"data: " + (event if isinstance(event, bytes) else orjson.dumps(event)) + b"\n\n" for event in events
    )


def named(*events: dict[str, Any]) -> bytes:
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events)


def chunk(**more: Any) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": 'a "usage" {'}}], **more}


def metered(dialect: str, media: str, *pieces: bytes, max_bytes: int = 100_000) -> Tokens | None:
    meter = Meter(dialect, is_stream=media == SSE, max_bytes=max_bytes)
    for piece in pieces:
        meter.feed(piece)
    return meter.tokens()


OPENAI_USAGE = {
    "prompt_tokens": 2006,
    "completion_tokens": 300,
    "total_tokens": 2306,
    "prompt_tokens_details": {"cached_tokens": 1920, "cache_write_tokens": 64},
}
CASES = {
    "OpenAI, whole": ("openai", JSON, orjson.dumps({"usage": OPENAI_USAGE}), Tokens(2006, 300, 1920, 64)),
    "OpenAI, streamed": (
        "openai",
        SSE,
        sse(chunk(usage=None), chunk(choices=[], usage=OPENAI_USAGE), b"[DONE]"),
        Tokens(2006, 300, 1920, 64),
    ),
    "OpenAI, streamed without include_usage": ("openai", SSE, sse(chunk(), b"[DONE]"), None),
    "Responses, streamed": (
        "openai",
        SSE,
        named(
            {"type": "response.created", "response": {"usage": None}},
            {
                "type": "response.completed",
                "response": {
                    "usage": {"input_tokens": 50, "input_tokens_details": {"cached_tokens": 40}, "output_tokens": 7}
                },
            },
        ),
        Tokens(50, 7, 40),
    ),
    "embeddings": ("openai", JSON, b'{"data":[],"usage":{"prompt_tokens":8,"total_tokens":8}}', Tokens(8, 0)),
    "vLLM, without details": (
        "openai",
        SSE,
        sse(
            chunk(),
            chunk(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": None}),
        ),
        Tokens(9, 2),
    ),
    "vLLM, usage in every chunk": (
        "openai",
        SSE,
        sse(*(chunk(usage={"prompt_tokens": 9, "completion_tokens": count}) for count in (1, 2, 3))),
        Tokens(9, 3),
    ),
    "DeepSeek": (
        "openai",
        JSON,
        orjson.dumps(
            {
                "usage": {
                    "prompt_tokens": 100,
                    "completion_tokens": 5,
                    "prompt_cache_hit_tokens": 64,
                    "prompt_cache_miss_tokens": 36,
                }
            }
        ),
        Tokens(100, 5, 64),
    ),
    "Moonshot": (
        "openai",
        JSON,
        b'{"usage":{"prompt_tokens":100,"completion_tokens":5,"cached_tokens":64}}',
        Tokens(100, 5, 64),
    ),
    "llama.cpp, usage without details": (
        "openai",
        SSE,
        sse(
            chunk(),
            chunk(
                choices=[],
                usage={"prompt_tokens": 40, "completion_tokens": 2},
                timings={"cache_n": 36, "prompt_n": 4, "predicted_n": 2},
            ),
        ),
        Tokens(40, 2, 36),
    ),
    "llama.cpp, timings of something else": (
        "openai",
        JSON,
        b'{"usage":{"prompt_tokens":40,"completion_tokens":2},"timings":{"cache_n":36,"prompt_n":9,"predicted_n":2}}',
        Tokens(40, 2),
    ),
    "Groq, streamed": (
        "openai",
        SSE,
        sse(chunk(x_groq={"usage": {"prompt_tokens": 4, "completion_tokens": 6}})),
        Tokens(4, 6),
    ),
    "llama.cpp, streamed without usage": (
        "openai",
        SSE,
        sse(chunk(timings={"cache_n": 236, "prompt_n": 1, "prompt_ms": 30.9, "predicted_n": 35}), b"[DONE]"),
        Tokens(237, 35, 236),
    ),
    "llama.cpp, with usage and timings": (
        "openai",
        JSON,
        b'{"usage":{"prompt_tokens":237,"completion_tokens":35,"prompt_tokens_details":{"cached_tokens":236}},'
        b'"timings":{"cache_n":236,"prompt_n":1,"predicted_n":35}}',
        Tokens(237, 35, 236),
    ),
    "Ollama": ("openai", JSON, b'{"usage":{"prompt_tokens":26,"completion_tokens":12}}', Tokens(26, 12)),
    "Anthropic, whole": (
        "anthropic",
        JSON,
        orjson.dumps(
            {
                "usage": {
                    "input_tokens": 12,
                    "cache_read_input_tokens": 1400,
                    "cache_creation_input_tokens": 100,
                    "cache_creation": {"ephemeral_5m_input_tokens": 100},
                    "output_tokens": 9,
                }
            }
        ),
        Tokens(1512, 9, 1400, 100, ((300.0, 100),)),
    ),
    "Anthropic, streamed": (
        "anthropic",
        SSE,
        named(
            {
                "type": "message_start",
                "message": {
                    "usage": {
                        "input_tokens": 12,
                        "cache_creation_input_tokens": 0,
                        "cache_read_input_tokens": 1400,
                        "output_tokens": 1,
                    }
                },
            },
            {"type": "ping"},
            {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 41, "input_tokens": None}},
        ),
        Tokens(1412, 41, 1400),
    ),
    "Gemini, streamed": (
        "gemini",
        SSE,
        sse(
            {"usageMetadata": {"promptTokenCount": 100, "cachedContentTokenCount": 90}},
            {
                "usageMetadata": {
                    "promptTokenCount": 100,
                    "cachedContentTokenCount": 90,
                    "candidatesTokenCount": 7,
                    "thoughtsTokenCount": 30,
                    "toolUsePromptTokenCount": 3,
                }
            },
        ),
        Tokens(103, 37, 90, reasoning=30),
    ),
    "Gemini, streamed as an array": (
        "gemini",
        JSON,
        b'[{"usageMetadata":{"promptTokenCount":5}}\n,\r\n{"usageMetadata":{"promptTokenCount":5,"candidatesTokenCount":2}}]',
        Tokens(5, 2),
    ),
    "nothing": ("openai", JSON, b"", None),
    "no JSON": ("openai", JSON, b'"usage" and so on', None),
    "figures that are none": ("openai", JSON, b'{"usage":{"prompt_tokens":"9","completion_tokens":-1}}', None),
}


@pytest.mark.parametrize(("dialect", "media", "told", "expected"), CASES.values(), ids=CASES)
def test_tokens_are_counted_as_the_provider_means_them(
    dialect: str, media: str, told: bytes, expected: Tokens | None
) -> None:
    assert metered(dialect, media, told) == expected


@given(st.sampled_from(list(CASES.values())), st.lists(st.integers(0, 1000)))
def test_it_does_not_matter_where_the_bytes_are_cut(
    case: tuple[str, str, bytes, Tokens | None], cuts: list[int]
) -> None:
    dialect, media, told, expected = case
    places = [0, *sorted(min(cut, len(told)) for cut in cuts), len(told)]
    pieces = [told[start:end] for start, end in pairwise(places)]
    assert metered(dialect, media, *pieces) == expected


@given(st.lists(st.binary(max_size=50), max_size=10), st.sampled_from(("openai", "anthropic", "gemini")))
def test_bytes_that_mean_nothing_are_not_metered_and_do_no_harm(pieces: list[bytes], dialect: str) -> None:
    for media in (SSE, JSON):
        assert metered(dialect, media, *pieces) is None


def test_an_answer_beyond_the_limit_is_not_kept() -> None:
    told = orjson.dumps({"data": "x" * 5000, "usage": OPENAI_USAGE})
    assert metered("openai", JSON, told[:4000], told[4000:], max_bytes=5000) is None
    assert metered("openai", JSON, told, max_bytes=6000) is not None


def test_figures_of_caching_are_never_more_than_the_prompt() -> None:
    told = b'{"usage":{"prompt_tokens":10,"prompt_tokens_details":{"cached_tokens":99,"cache_write_tokens":5}}}'
    assert metered("openai", JSON, told) == Tokens(10, 0, 10, 0)


# -- events ------------------------------------------------------------------------------------------------------------


ends = st.sampled_from((b"\n", b"\r\n", b"\r"))
line = st.sampled_from((b"data: {}", b"data:x", b": ping", b"event: message", b"data: \xc3\xa9", b"id: 1"))


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    end = draw(ends)
    return [
        b"".join(one + end for one in draw(st.lists(line, min_size=1, max_size=4))) + end
        for _ in range(draw(st.integers(0, 5)))
    ]


@given(streams(), st.lists(st.integers(0, 200)))
def test_events_are_the_same_wherever_the_bytes_are_cut(stream: list[bytes], cuts: list[int]) -> None:
    whole = b"".join(stream)
    places = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    events, found = Events(1000), []
    for start, end in pairwise(places):
        found += events.feed(whole[start:end])
    last = events.rest()
    assert b"".join([*found, last]) == whole
    # A carriage return at the very end may be half of an end that never came.
    assert [*found, *([last] if last else [])] == stream


def test_what_is_longer_than_the_limit_is_passed_over_in_pieces() -> None:
    events = Events(10)
    assert events.feed(b"data: 0123456789") == [b"data: 0123456789"]
    assert not events.between
    assert events.feed(b"\n\ndata: 1\n\n") == [b"\n\n", b"data: 1\n\n"]
    assert events.between


def test_between_events_nothing_is_held() -> None:
    events = Events(1000)
    assert events.feed(b"data: 1\n") == []
    assert not events.between
    assert events.feed(b"\n") == [b"data: 1\n\n"]
    assert events.between


def test_the_lines_of_an_events_data_are_joined() -> None:
    assert data_of(b"event: x\r\ndata: {\r\ndata:}\r\n\r\n") == b"{\n}"


# -- the usage that only the gateway wants -----------------------------------------------------------------------------


KEPT = [*events(chat_chunk("a", usage=None), chat_chunk('"usage" ✓', usage=None)), b": ping\n\n", b"data: [DONE]\n\n"]
TOLD = [*KEPT[:2], *events({**CHUNK, "choices": [], "usage": USAGE}), *KEPT[2:]]


def passed(whole: bytes, cuts: list[int], max_bytes: int, *, ends: bool = True) -> bytes:
    """What passes on of a stream that is cut there, without its usage."""
    meter = Meter("openai", is_stream=True, max_bytes=max_bytes, hides_usage=True)
    places = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    chunks = [meter.feed(whole[start:end]) for start, end in pairwise(places)]
    assert meter.between_events
    return b"".join(chunks) + (meter.end() if ends else b"")


@given(st.lists(st.integers(0, 2000)))
def test_the_usage_alone_is_taken_out_wherever_the_bytes_are_cut(cuts: list[int]) -> None:
    assert passed(b"".join(TOLD), cuts, 10_000) == b"".join(KEPT)


def test_what_breaks_off_within_an_event_ends_behind_the_one_before() -> None:
    assert passed(TOLD[0] + TOLD[1][:10], [], 10_000, ends=False) == TOLD[0]


def test_events_that_are_too_long_go_on_in_parts() -> None:
    told = b"data: " + b"x" * 5000 + b"\n\n"
    assert passed(told, [1000, 3000], 2000) == told

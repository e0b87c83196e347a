from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import Breakpoint
from gateway.api.anthropic.caching import Cached, account
from gateway.api.anthropic.request import MessageRequest, parse_count, parse_message
from gateway.api.anthropic.wire import error_json
from gateway.config import AnthropicSettings, LeaseSettings
from gateway.errors import BadRequestError
from gateway.types import ChatPrompt, Lease, Marker
from tests.fakes.gateway import running
from tests.fakes.pipeline import FakePipeline
from tests.fakes.tuned import tuned

MARK = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def text(said: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **fields}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def asked(*messages: Any, settings: AnthropicSettings | None = None, **fields: Any) -> MessageRequest:
    body = {"model": "demo", "max_tokens": 7, "messages": list(messages), **fields}
    return parse_message(body, "2026-10-21", settings or AnthropicSettings(), LeaseSettings())


def markers(*messages: Any, **fields: Any) -> tuple[Marker, ...]:
    found = asked(*messages, **fields)
    (prompt,) = found.call.prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.markers == found.caching.markers
    return prompt.markers


def refusal(*messages: Any, **fields: Any) -> str:
    with pytest.raises(BadRequestError) as refused:
        asked(*messages, **fields)
    return str(error_json(refused.value, "")["error"]["message"])


def test_every_kind_of_block_has_its_place() -> None:
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}, **MARK}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "done", **MARK}
    found = markers(
        user(text("a"), text("bc", **MARK), text("d")),
        {"role": "assistant", "content": [text("x"), call]},
        user(result, text("e")),
        tools=[TOOL, {**TOOL, "name": "g", **HOUR}],
        system="Be brief.",
    )
    assert found == (
        Marker(0, 0, 3600.0, tool=1),
        Marker(1, 3, 300.0),
        Marker(2, 0, 300.0, call=0),
        Marker(3, 4, 300.0),
    )


@pytest.mark.parametrize(
    ("said", "chars"), [("one two", 3), ("one two \n", 3), ("one.\n\ntwo.", 4), ("one", 3), (f"one {'x' * 65}", 69)]
)
def test_the_end_of_a_text_before_another_one_is_its_last_word(said: str, chars: int) -> None:
    assert markers(user(text(said, **MARK), text(" more"))) == (Marker(0, chars, 300.0),)
    assert markers(user(text(said, **MARK))) == (Marker(0, len(said), 300.0),), "nothing joins it at the end"
    places = asked(user(text(said), text("b", **MARK))).caching.places
    assert {place.chars for place in places} == {chars, len(said)}


def test_turns_that_are_merged_keep_their_places() -> None:
    assert markers(user(text("ab", **MARK)), user(text("c", **MARK))) == (Marker(0, 2, 300.0), Marker(0, 5, 300.0))


def test_an_automatic_control_marks_the_last_block_that_can_be_cached() -> None:
    control = MARK["cache_control"]
    assert markers({"role": "user", "content": "abc"}, cache_control=control) == (Marker(0, 3, 300.0),)
    assert markers(user(text("a"), text("b", **MARK)), cache_control=control) == (Marker(0, 2, 300.0),)
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    system = {"role": "system", "content": "Shout."}
    ended = [user(text("a")), {"role": "assistant", "content": [thinking, text("b")]}, user(text("cd")), system]
    assert markers(*ended, cache_control=HOUR["cache_control"]) == (Marker(3, 6, 3600.0),)


@pytest.mark.parametrize(
    ("messages", "fields", "told"),
    [
        (
            [user(*[text("a", **MARK)] * 5)],
            {},
            "A maximum of 4 blocks with cache_control may be provided. Found 5.",
        ),
        (
            [user(*[text("a", **MARK)] * 4, text("b"))],
            {"cache_control": MARK["cache_control"]},
            "A maximum of 4 blocks with cache_control may be provided. Found 5.",
        ),
        (
            [user(text("a", **HOUR))],
            {"cache_control": MARK["cache_control"]},
            "cache_control.ttl: the last block has a cache_control of its own, with ttl='1h'",
        ),
        (
            [user(text("a", **MARK), text("b", **HOUR))],
            {},
            "messages.0.content.1.cache_control.ttl: a ttl='1h' cache_control block must not come after a ttl='5m'",
        ),
        (
            [user(text("a"))],
            {"tools": [{**TOOL, **MARK}], "system": [text("s", **HOUR)]},
            "system.0.cache_control.ttl: a ttl='1h' cache_control block must not come after",
        ),
        (
            [user(text("a", cache_control={"type": "ephemeral", "ttl": "2h"}))],
            {},
            "messages.0.content.0.cache_control.ttl: '2h' is not one of '5m', '1h'",
        ),
        ([user(text("a", cache_control={"ttl": "5m"}))], {}, "messages.0.content.0.cache_control.type: Field required"),
        ([user(text("a", cache_control={"type": "persistent"}))], {}, "messages.0.content.0.cache_control.type:"),
        (
            [user(text("a")), {"role": "assistant", "content": [{"type": "thinking", "thinking": "h", **MARK}]}],
            {},
            "messages.1.content.0.cache_control: Extra inputs are not permitted",
        ),
    ],
)
def test_controls_that_cannot_be_are_refused(messages: Any, fields: dict[str, Any], told: str) -> None:
    assert refusal(*messages, **fields).startswith(told)


def test_a_time_that_the_operator_does_not_allow_is_refused() -> None:
    body = {"model": "demo", "max_tokens": 7, "messages": [user(text("a", **HOUR))]}
    with pytest.raises(BadRequestError) as refused:
        parse_message(body, "2026-10-21", AnthropicSettings(), LeaseSettings(ttls=("5m", "30m"), default_ttl="5m"))
    told = error_json(refused.value, "")["error"]["message"]
    assert told == "messages.0.content.0.cache_control.ttl: this server keeps nothing for 1h (leases.ttls: 5m, 30m)"


def places(*messages: Any, settings: AnthropicSettings | None = None, **fields: Any) -> list[tuple[int, int]]:
    """In the order of the prompt."""
    found = asked(*messages, settings=settings, **fields).caching.places
    return sorted((marker.message, marker.chars) for marker in found)


def test_entries_count_up_to_twenty_blocks_back_the_marked_one_included() -> None:
    blocks = [text("a") for _ in range(29)]
    assert places(user(*blocks, text("a", **MARK))) == [(0, chars) for chars in range(11, 30)]
    assert places(user(*blocks, text("a", **MARK)), settings=tuned(AnthropicSettings, lookback_blocks=3)) == [
        (0, 28),
        (0, 29),
    ]
    assert places(user(text("a", **MARK), *blocks)) == []


def test_a_run_of_results_is_one_position() -> None:
    calls = [{"type": "tool_use", "id": str(number), "name": "f", "input": {}} for number in range(8)]
    results = [{"type": "tool_result", "tool_use_id": str(number), "content": "r"} for number in range(8)]
    turns = [user(text("q")), {"role": "assistant", "content": calls}, user(*results, text("end", **MARK))]
    found = asked(*turns, settings=tuned(AnthropicSettings, lookback_blocks=3)).caching.places
    assert len([marker for marker in found if marker.call is None]) == 8, "every result, at one position"
    assert len([marker for marker in found if marker.call is not None]) == 8
    assert not any(marker.message == 0 for marker in found), "the question is the fourth position"


def test_counting_looks_for_no_breakpoints() -> None:
    body = {"model": "demo", "messages": [user(text("a", **MARK))]}
    (prompt,) = parse_count(body, AnthropicSettings(), LeaseSettings()).prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.markers == ()
    with pytest.raises(BadRequestError, match="A maximum of 4"):
        parse_count({**body, "messages": [user(*[text("a", **MARK)] * 5)]}, AnthropicSettings(), LeaseSettings())


def test_the_least_length_is_that_of_the_settings() -> None:
    settings = AnthropicSettings(min_cache_tokens=7)
    (prompt,) = asked(user(text("a", **MARK)), settings=settings).call.prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.min_breakpoint_tokens == 7


POINTS = (Breakpoint(10, 3600.0), Breakpoint(30, 300.0), Breakpoint(60, 300.0))


@pytest.mark.parametrize(
    ("reads", "entries", "kept", "cached"),
    [
        ((), {10, 30, 60}, 60, Cached(0, 50, 10)),
        ((10,), {10, 30, 60}, 60, Cached(10, 50, 0)),
        ((60, 30, 10), {10, 30, 60}, 60, Cached(60, 0, 0)),
        ((45, 10), {10, 30, 60}, 60, Cached(10, 50, 0)),  # an entry at no block of this request is as good as none
        ((45, 10), {10, 30, 45, 60}, 60, Cached(45, 15, 0)),
        ((10,), {10, 30, 60}, 30, Cached(10, 20, 0)),  # what was not kept is not claimed
        ((), {10, 30, 60}, 0, Cached()),
        ((), set(), 0, Cached()),
    ],
)
def test_figures_are_of_whole_breakpoints(reads: Any, entries: Any, kept: int, cached: Cached) -> None:
    assert account(reads, entries, POINTS, kept) == cached


@given(
    reads=st.lists(st.integers(1, 90), max_size=4),
    tokens=st.lists(st.integers(1, 90), unique=True, max_size=4),
    kept=st.integers(0, 90),
)
def test_figures_never_exceed_the_last_breakpoint_or_what_was_read(
    reads: list[int], tokens: list[int], kept: int
) -> None:
    points = [Breakpoint(one, 300.0) for one in sorted(tokens)]
    cached = account(sorted(reads, reverse=True), set(tokens), points, kept)
    assert cached.read in {0, *reads}
    assert cached.read + cached.written in {0, *tokens}


ASKED: Any = {"model": "demo", "max_tokens": 16, "messages": [user(text("a", **HOUR), text("b"), text("c", **MARK))]}
SEVERAL: dict[str, Any] = {
    "breakpoints": (Breakpoint(10, 3600.0), Breakpoint(30, 300.0)),
    "kept_tokens": 30,
    "lease": Lease(0, Breakpoint(30, 300.0)),
}


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_tells_what_was_written_and_for_how_long(stream: bool) -> None:
    async with running(FakePipeline(traced=SEVERAL)) as gateway, gateway.anthropic() as client:
        if stream:
            async with client.messages.stream(**ASKED) as events:
                answer: Any = await events.get_final_message()
        else:
            answer = await client.messages.create(**ASKED)
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens) == (10, 30, 0)
    assert usage.cache_creation.to_dict() == {"ephemeral_5m_input_tokens": 20, "ephemeral_1h_input_tokens": 10}
    assert usage.to_dict()["cache_lease"] == "kept"
    assert not gateway.pipeline.looked_up


@pytest.mark.parametrize(
    ("reads", "found", "figures"),
    [
        ((30,), (), (10, 0, 30)),
        ((10,), (), (10, 20, 10)),
        ((20,), (20,), (10, 10, 20)),  # at the block before the last marker
        ((25, 10), (20,), (10, 20, 10)),  # inside of a block: another request's
        ((35,), (20,), (10, 30, 0)),  # behind all blocks that count
    ],
)
async def test_a_read_counts_at_breakpoints_and_at_blocks_before_them(
    reads: Any, found: Any, figures: tuple[int, int, int]
) -> None:
    pipeline = FakePipeline(traced={**SEVERAL, "lease_reads": reads}, places=found)
    async with running(pipeline) as gateway, gateway.anthropic() as client:
        usage = (await client.messages.create(**ASKED)).usage
    assert (usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens) == figures
    assert pipeline.looked_up == ([(Marker(0, 2, 0.0),)] if found else []), "only blocks that are not marked"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_an_engine_says_at_the_end_is_what_counts(stream: bool) -> None:
    begun = {**SEVERAL, "cached_late": True}
    pipeline = FakePipeline(traced=begun, late={"lease_reads": (30,), "cached_late": False})
    async with running(pipeline) as gateway, gateway.anthropic() as client:
        if stream:
            events = [event async for event in await client.messages.create(**ASKED, stream=True)]
            begun_as, usage = events[0].message.usage, events[-2].usage
            assert (begun_as.cache_creation_input_tokens, begun_as.cache_read_input_tokens) == (30, 0)
        else:
            usage = (await client.messages.create(**ASKED)).usage
    assert (usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens) == (10, 0, 30)
    trace = pipeline.requests[0].trace
    assert (trace.reported_cached_tokens, trace.cache_write_tokens) == (30, 0)


async def test_what_is_not_kept_is_not_claimed_and_the_usage_says_so() -> None:
    degraded = {**SEVERAL, "kept_tokens": 0, "lease": Lease(2, None)}
    async with running(FakePipeline(traced=degraded)) as gateway, gateway.anthropic() as client:
        usage = (await client.messages.create(**ASKED)).usage
    assert (usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens) == (40, 0, 0)
    assert usage.to_dict()["cache_lease"] == "degraded"


async def test_without_a_marker_both_figures_are_zero() -> None:
    async with running(FakePipeline(cached_tokens=32)) as gateway, gateway.anthropic() as client:
        raw = await client.messages.with_raw_response.create(**ASKED | {"messages": [user(text("a"))]})
    usage = (await raw.parse()).usage
    assert (usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens) == (40, 0, 0)
    assert "cache_lease" not in usage.to_dict()
    assert raw.headers["x-kvasir-cached-tokens"] == "32", "what was reused physically is in a header"

"""The pipeline with stages that the test controls: order, retries, what is metered and how failures end."""

from __future__ import annotations

import itertools
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from engine.protocol import Breakpoint, Grammar, Sampling, SequenceUpdate, TokenLogprobs
from gateway.errors import (
    BadRequestError,
    ContextLengthError,
    EngineFailedError,
    EngineLostError,
    EnginesDiedError,
    NoEngineError,
    OverloadedError,
)
from gateway.types import (
    CallDelta,
    ChatPrompt,
    Constraint,
    Event,
    Finished,
    Group,
    Lease,
    Marker,
    ScoredToken,
    Spelled,
    Started,
    TextDelta,
    Tool,
    ToolUse,
    Usage,
)
from tests.fakes.stages import (
    FORCED,
    LETTERS,
    Script,
    ScriptedEngine,
    Stages,
    death,
    request,
    walk,
)

FIRST = SequenceUpdate(1, [0], cached_tokens=4, queue_ms=2.0, prefill_ms=3.0)


async def test_an_answer_is_started_pieces_and_finished_with_its_usage() -> None:
    stages = Stages([ScriptedEngine("e", [[FIRST, SequenceUpdate(1, [1, 2]), SequenceUpdate(1, [], finish="length")]])])
    asked = request()
    assert await walk(stages, asked) == [
        Started("e", Usage(9, 0, cached_tokens=4, cache_write_tokens=4)),
        TextDelta("a"),
        TextDelta("bc"),
        Finished("length", Usage(9, 3, cached_tokens=4, cache_write_tokens=4)),
    ]
    assert (asked.trace.cached_tokens, asked.trace.tokenized_tokens, asked.trace.finish) == (4, 3, "length")
    assert stages.places == 0


def scored(*tokens: int) -> tuple[ScoredToken, ...]:
    return tuple(ScoredToken(Spelled(LETTERS[token], None), -float(token), (), 0) for token in tokens)


def told(*tokens: int, **fields: Any) -> SequenceUpdate:
    return SequenceUpdate(1, list(tokens), logprobs=[TokenLogprobs(-float(token), ()) for token in tokens], **fields)


async def test_log_probabilities_come_with_the_text_of_their_tokens() -> None:
    stages = Stages([ScriptedEngine("e", [[told(0), told(1, 2), told(3, 23, finish="stop")]])])
    asked = replace(request(stop=("xyz",)), sampling=Sampling(max_tokens=9, logprobs=0))
    assert (await walk(stages, asked))[1:-1] == [
        TextDelta("a", scored(0)),
        TextDelta("b", scored(1)),
        TextDelta("c", scored(2)),
        TextDelta("d", scored(3)),
        TextDelta("x", scored(23)),
    ]


async def test_tokens_behind_a_stop_string_are_not_counted_however_they_came() -> None:
    tokens = [0, 1, 2, 3, 4]
    for cuts in itertools.product((False, True), repeat=4):
        updates, at = [], 0
        for end in [*(index + 1 for index, cut in enumerate(cuts) if cut), 5]:
            updates.append(SequenceUpdate(1, tokens[at:end]))
            at = end
        updates[0].cached_tokens = 0
        updates[-1].finish, updates[-1].stop_id = "stop", 25
        events = await walk(Stages([ScriptedEngine("e", [updates])]), request(stop=("cd",)))
        finished = events[-1]
        assert isinstance(finished, Finished)
        assert (finished.usage.completion_tokens, finished.stop) == (4, "cd")


async def test_log_probabilities_of_a_stop_string_are_never_told() -> None:
    stages = Stages([ScriptedEngine("e", [[told(0), told(23), told(24, finish="length")]])])
    asked = replace(request(stop=("xy",)), sampling=Sampling(max_tokens=9, logprobs=0))
    assert (await walk(stages, asked))[1:-1] == [TextDelta("a", scored(0))]


async def test_the_stages_are_asked_in_the_order_of_the_pipeline() -> None:
    engines = [ScriptedEngine(name, [[SequenceUpdate(1, [0], finish="stop")]]) for name in ("d", "e")]
    stages = Stages(engines, held={"e": 2})
    await walk(stages, request())
    assert stages.calls == ["encode", "find d,e", "place e {'e': 8}"]


async def test_the_queue_is_told_whose_turn_a_request_says_that_it_is() -> None:
    stages = Stages([ScriptedEngine("e", [[SequenceUpdate(1, [0], finish="stop")]])])
    await walk(stages, replace(request(), tier="flex", priority=-3))
    assert [(ask.tier, ask.priority) for ask in stages.asks] == [("flex", -3)]


async def test_a_request_that_prewarms_generates_nothing_and_may_fill_the_context() -> None:
    engine = ScriptedEngine("e", [[SequenceUpdate(1, [], cached_tokens=0, finish="length")]])
    stages = Stages([engine], num_tokens=32)
    asked = replace(request(max_tokens=0), prewarm=True)
    assert await walk(stages, asked) == [Started("e", Usage(32, 0, 0, 32)), Finished("length", Usage(32, 0, 0, 32))]
    assert engine.asked[0].max_tokens == 0


async def test_a_group_goes_to_one_engine_as_long_as_that_serves() -> None:
    scripts: list[Script] = [[SequenceUpdate(1, [0], finish="stop")] for _ in range(3)]
    engines = [ScriptedEngine(name, list(scripts)) for name in ("d", "e")]
    stages, group = Stages(engines, held={"e": 2}), Group(2)
    await walk(stages, replace(request(), group=group))
    stages.held = {"d": 2}
    await walk(stages, replace(request(), group=group, number=1))
    assert [call for call in stages.calls if call.startswith("place")] == ["place e {'e': 8}", "place e {'e': 9}"]
    assert (stages.asks[0].only, stages.asks[1].only, group.incarnation) == (None, "e", "e")
    stages.engines = engines[:1]
    await walk(stages, replace(request(), group=group, number=2))
    assert (stages.calls[-1], group.incarnation) == ("place d {}", "d")


async def test_a_group_leaves_an_engine_that_was_lost() -> None:
    engines = [
        ScriptedEngine("d", [[SequenceUpdate(1, [0], finish="stop")]]),
        ScriptedEngine("e", [[EngineLostError("gone")]]),
    ]
    stages, group = Stages(engines, held={"e": 2}), Group(2)
    await walk(stages, replace(request(), group=group))
    assert stages.calls[-1] == "place d {}"
    assert group.incarnation == "d"


async def test_an_engine_that_memory_does_not_know_is_looked_up() -> None:
    engine = ScriptedEngine("e", [[SequenceUpdate(1, [0], cached_tokens=8, finish="stop")]])
    stages, asked = Stages([engine], held={"e": 2}, remembered={"e": None}), request()
    await walk(stages, asked)
    assert (stages.calls, asked.trace.predicted_tokens) == (["encode", "find e", "place e {'e': 8}"], 8)


async def test_each_request_has_a_receipt_of_what_was_predicted_and_what_was_reported() -> None:
    """Predicted is what memory has when there is a slot, as whole blocks, without the token that is always computed."""
    for num_tokens, blocks, cached, figures in [
        (9, 2, 8, (1, 1, 8, 8, 0, 0)),
        (8, 2, 4, (1, 1, 4, 4, 0, 0)),  # the last token is computed
        (9, 2, 4, (1, 0, 8, 4, 4, 4)),  # evicted meanwhile
        (9, 0, 4, (1, 0, 0, 4, 4, 0)),  # computed by another request meanwhile
    ]:
        engine = ScriptedEngine("e", [[SequenceUpdate(1, [0], cached_tokens=cached, finish="stop")]])
        stages, asked = Stages([engine], num_tokens=num_tokens, remembered={"e": blocks}), request()
        await walk(stages, asked)
        assert (asked.trace.predicted_tokens, asked.trace.cached_tokens) == figures[2:4]
        assert tuple(stages.receipts.of("e").values())[:7] == (*figures, 0)


async def test_a_server_may_report_what_was_reused_behind_the_answer() -> None:
    script: Script = [SequenceUpdate(1, [0]), SequenceUpdate(1, [1], cached_tokens=8, finish="length")]
    stages, asked = Stages([ScriptedEngine("e", [script])], remembered={"e": 2}), request()
    late: list[tuple[bool, Event]] = []
    async with aclosing(stages.pipeline().answer(asked)) as events:
        late += [(asked.trace.cached_late, event) async for event in events]
    assert late[0] == (True, Started("e", Usage(9, 0, 0, 8)))
    assert late[-1] == (False, Finished("length", Usage(9, 2, 8, 0)))
    assert stages.receipts.of("e")["exact"] == 1


async def test_what_reuses_nothing_has_no_receipt() -> None:
    for asked in (replace(request(), use_cache=False), replace(request(), group=Group(2), number=1)):
        engine = ScriptedEngine("e", [[SequenceUpdate(1, [0], cached_tokens=0, finish="stop")]])
        stages = Stages([engine], held={"e": 2})
        await walk(stages, asked)
        assert (asked.trace.predicted_tokens, stages.receipts.of("e")) == (None, {})
    unsaid = Stages([ScriptedEngine("e", [[SequenceUpdate(1, [0], finish="stop")]])])
    await walk(unsaid, request())
    assert unsaid.receipts.of("e") == {}


async def test_with_one_engine_there_is_nothing_to_look_up() -> None:
    stages = Stages([ScriptedEngine("e", [[SequenceUpdate(1, [0], finish="stop")]])])
    await walk(stages, request())
    assert stages.calls == ["encode", "place e {}"]
    assert stages.asks[0].digests == b""  # what is not looked up must not be taken for lost


async def test_where_others_wait_it_is_looked_up_with_one_engine_as_well() -> None:
    stages = Stages([ScriptedEngine("e", [[SequenceUpdate(1, [0], finish="stop")]])], held={"e": 1}, waiting=1)
    await walk(stages, request())
    assert stages.calls == ["encode", "find e", "place e {'e': 4}"]
    assert (stages.asks[0].digests, stages.asks[0].block_size) == (b"x" * 32, 4)


async def test_a_request_without_the_cache_is_sent_anywhere_and_writes_nothing() -> None:
    engines = [ScriptedEngine(name, [[SequenceUpdate(1, [0], cached_tokens=0, finish="stop")]]) for name in ("d", "e")]
    stages = Stages(engines, held={"e": 2})
    events = await walk(stages, replace(request(), use_cache=False))
    assert stages.calls == ["encode", "place d {}"]
    assert events[-1] == Finished("stop", Usage(9, 1, cached_tokens=0, cache_write_tokens=0))


POINTS = (Breakpoint(3, 60.0), Breakpoint(7, 300.0))


@pytest.mark.parametrize(
    ("update", "points", "usage", "lease"),
    [
        # nothing was there; the last breakpoint is written, to the token
        ((0, 0, 7, 0), POINTS, Usage(9, 1, 0, 7, "kept"), Lease(0, POINTS[1])),
        # a lease is read to the token, though its last three tokens were computed again
        ((4, 7, 0, 0), POINTS, Usage(9, 1, 7, 0, "kept"), Lease(0, POINTS[1])),
        # more was reused than leases promised: what is written begins behind it
        ((4, 3, 4, 0), POINTS, Usage(9, 1, 4, 3, "kept"), Lease(0, POINTS[1])),
        ((8, 3, 4, 0), POINTS, Usage(9, 1, 8, 0, "kept"), Lease(0, POINTS[1])),
        # for want of budget
        ((0, 0, 3, 1), POINTS, Usage(9, 1, 0, 3, "degraded"), Lease(1, None)),
        ((4, 0, 0, 2), POINTS, Usage(9, 1, 4, 0, "degraded"), Lease(2, None)),
        # an engine that knows no leases; a template that leaves every marked part out
        ((4, None, None, None), POINTS, Usage(9, 1, 4, 0, "degraded"), Lease(2, None)),
        ((4, None, None, None), (), Usage(9, 1, 4, 0, "degraded"), Lease(0, None)),
        # figures that cannot be are not passed on
        ((0, 12, 12, 0), POINTS, Usage(9, 1, 9, 0, "kept"), Lease(0, POINTS[1])),
    ],
    ids=str,
)
async def test_a_request_with_breakpoints_is_metered_at_them(
    update: tuple[int | None, ...], points: tuple[Breakpoint, ...], usage: Usage, lease: Lease
) -> None:
    cached, read, write, degraded = update
    first = SequenceUpdate(1, [0], cached_tokens=cached, finish="stop")
    first.lease_read_tokens, first.lease_write_tokens, first.leases_degraded = read, write, degraded
    asked = replace(request(), prompt=ChatPrompt([{"role": "user", "content": "p"}], markers=(Marker(0, 1, 60.0),)))
    events = await walk(Stages([ScriptedEngine("e", [[first]])], breakpoints=points), asked)
    assert isinstance(events[-1], Finished)
    assert replace(events[-1].usage, lease_read_tokens=0, lease_writes=()) == usage
    assert asked.trace.lease == lease
    assert asked.trace.cached_tokens == cached
    assert usage.cached_tokens + usage.cache_write_tokens <= usage.prompt_tokens


async def test_a_prompt_that_begins_with_anothers_lease_reads_it_without_asking() -> None:
    first = SequenceUpdate(1, [0], cached_tokens=4, lease_read_tokens=6, lease_write_tokens=0, finish="stop")
    asked = request()
    events = await walk(Stages([ScriptedEngine("e", [[first]])]), asked)
    assert events[-1] == Finished("stop", Usage(9, 1, 6, 2, lease_read_tokens=6))
    assert (asked.trace.lease, asked.trace.cached_tokens, asked.trace.lease_read_tokens) == (None, 4, 6)


def test_the_usage_of_several_is_degraded_when_one_is() -> None:
    kept, degraded, plain = [Usage(1, 1, lease=lease) for lease in ("kept", "degraded", None)]
    assert [(one + two).lease for one, two in ((kept, plain), (plain, kept), (kept, degraded), (plain, plain))] == [
        "kept",
        "kept",
        "degraded",
        None,
    ]


async def test_a_stop_token_counts_as_completion_and_is_no_text() -> None:
    stages = Stages([ScriptedEngine("e", [[FIRST, SequenceUpdate(1, [], finish="stop", stop_id=25)]])])
    events = await walk(stages, request())
    assert events[1:] == [TextDelta("a"), Finished("stop", Usage(9, 2, 4, 4))]


async def test_a_stop_string_ends_the_answer_and_closes_the_engines_stream() -> None:
    engine = ScriptedEngine("e", [[FIRST, SequenceUpdate(1, [1]), SequenceUpdate(1, [2]), SequenceUpdate(1, [3])]])
    events = await walk(Stages([engine]), request(stop=("bc",)))
    assert events[1:] == [TextDelta("a"), Finished("stop", Usage(9, 3, 4, 4), "bc")]
    assert engine.closed == 1


async def test_text_held_back_for_a_stop_string_comes_at_the_end() -> None:
    engine = ScriptedEngine("e", [[FIRST, SequenceUpdate(1, [1], finish="length")]])
    assert (await walk(Stages([engine]), request(stop=("bc",))))[1:3] == [TextDelta("a"), TextDelta("b")]


async def test_an_engine_lost_before_the_first_token_is_replaced_by_another() -> None:
    lost = ScriptedEngine("a", [[EngineLostError("gone")]])
    good = ScriptedEngine("b", [[FIRST, SequenceUpdate(1, [1], finish="stop")]])
    spare = ScriptedEngine("c", [])
    stages, asked = Stages([lost, good, spare], held={"a": 2, "b": 1}), request()
    events = await walk(stages, asked)
    assert events[0] == Started("b", Usage(9, 0, 4, 4))
    assert "find b,c" in stages.calls
    assert (asked.trace.retries, asked.trace.engine, stages.places) == (1, "b", 0)


async def test_a_lone_engine_is_tried_as_often_as_allowed() -> None:
    engine = ScriptedEngine("a", [[EngineLostError("gone")] for _ in range(5)])
    with pytest.raises(OverloadedError) as caught:
        await walk(Stages([engine]), request())
    assert caught.value.retry_after_s
    assert len(engine.asked) == 3


async def test_a_request_whose_engine_died_is_tried_on_one_other_engine_and_no_more() -> None:
    engines = [ScriptedEngine(name, [[death()]]) for name in "abc"]
    with pytest.raises(EnginesDiedError):
        await walk(Stages(engines), request())
    assert [len(engine.asked) for engine in engines] == [1, 1, 0]


async def test_a_line_whose_engine_died_is_left_to_its_batch() -> None:
    engines = [ScriptedEngine(name, [[death()]]) for name in "ab"]
    with pytest.raises(EngineLostError, match="gone"):
        await walk(Stages(engines), replace(request(), lane="batch"))
    assert [len(engine.asked) for engine in engines] == [1, 0]


async def test_a_request_that_finds_no_engine_after_one_died_hears_when_to_retry() -> None:
    stages = Stages([ScriptedEngine("a", [[death()]])])
    away = NoEngineError("m", retry_after_s=1.0)
    stages.engines[0].scripts.append([away])
    with pytest.raises(NoEngineError) as caught:
        await walk(stages, request())
    assert caught.value is away


async def test_a_sequence_that_failed_is_not_tried_again() -> None:
    engine = ScriptedEngine("a", [[SequenceUpdate(1, finish="error", error="not finite")], [FIRST]])
    with pytest.raises(EngineFailedError, match="not finite"):
        await walk(Stages([engine]), request())
    assert len(engine.asked) == 1


@pytest.mark.parametrize(("path", "param"), [("properties.a.not", "f.schema.properties.a.not"), ("", "f.schema")])
async def test_a_grammar_that_cannot_be_carried_out_is_the_clients_mistake(path: str, param: str) -> None:
    update = SequenceUpdate(1, finish="error", error="'not' is not supported", grammar_path=path)
    engine = ScriptedEngine("a", [[update], [FIRST]])
    asked = replace(request(), constraint=Constraint(Grammar("json_schema", "{}"), "f.schema"))
    with pytest.raises(BadRequestError, match="'not' is not supported") as caught:
        await walk(Stages([engine]), asked)
    assert (caught.value.param, caught.value.code) == (param, "invalid_grammar")
    assert len(engine.asked) == 1


USE = ToolUse((Tool("f"),))
CALL = '{"name": "f", "arguments": {"a": "b"}}'


def letters(text: str, **fields: Any) -> SequenceUpdate:
    return SequenceUpdate(1, [LETTERS.index(char) for char in text], **fields)


@pytest.mark.parametrize(("finish", "reason"), [("stop", "tool_calls"), ("length", "length")])
async def test_a_tool_call_is_told_in_pieces_and_is_the_reason_unless_the_tokens_ran_out(
    finish: Any, reason: str
) -> None:
    script: Script = [letters("well"), letters("\n" + CALL[:30]), letters(CALL[30:], finish=finish)]
    events = await walk(Stages([ScriptedEngine("e", [script])]), replace(request(), tool_use=USE))
    assert events[1:-1] == [
        TextDelta("well"),
        CallDelta(0, "f"),
        CallDelta(0, "", CALL[27:30]),
        CallDelta(0, "", CALL[30:-1]),
    ]
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == reason


async def test_without_tools_to_use_the_same_is_text() -> None:
    events = await walk(Stages([ScriptedEngine("e", [[letters(CALL, finish="stop")]])]), request())
    assert events[1] == TextDelta(CALL)
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "stop"


async def test_text_that_only_began_like_a_call_comes_with_the_end() -> None:
    script: Script = [letters("ab" + CALL[:5]), letters("", finish="stop")]
    events = await walk(Stages([ScriptedEngine("e", [script])]), replace(request(), tool_use=USE))
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "ab" + CALL[:5]
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "stop"


async def test_the_only_call_that_is_wanted_ends_the_answer_and_aborts_the_sequence() -> None:
    engine = ScriptedEngine("e", [[letters(CALL + "\n"), letters(CALL, finish="length")]])
    events = await walk(Stages([engine]), replace(request(), tool_use=replace(USE, parallel=False)))
    assert {event.call for event in events if isinstance(event, CallDelta)} == {0}
    assert isinstance(events[-1], Finished)
    assert (events[-1].reason, engine.closed) == ("tool_calls", 1)


async def test_a_forced_call_constrains_the_engine_and_a_refusal_has_the_path_of_the_tool() -> None:
    path = "schemas.arguments_0.properties.a.not"
    update = SequenceUpdate(1, finish="error", error="'not' is not supported", grammar_path=path)
    engine = ScriptedEngine("e", [[update]])
    with pytest.raises(BadRequestError) as caught:
        await walk(Stages([engine]), replace(request(), tool_use=replace(USE, mode="required")))
    assert caught.value.param == "tools[3].function.parameters.properties.a.not"
    assert engine.constraints == [FORCED]


async def test_a_stream_that_ends_without_a_reason_is_an_error() -> None:
    with pytest.raises(EngineLostError):
        await walk(Stages([ScriptedEngine("a", [[FIRST]] * 3)]), request())


async def test_no_limit_means_up_to_the_end_of_the_context() -> None:
    engine = ScriptedEngine("e", [[SequenceUpdate(1, [0], finish="stop")]])
    await walk(Stages([engine]), request(max_tokens=0))
    assert engine.asked[0].max_tokens == 32 - 9


@pytest.mark.parametrize(("num_tokens", "max_tokens"), [(32, 0), (32, 1), (40, 0), (30, 3)])
async def test_what_does_not_fit_the_context_is_refused_with_both_numbers(num_tokens: int, max_tokens: int) -> None:
    stages = Stages([ScriptedEngine("e", [])], num_tokens=num_tokens)
    with pytest.raises(ContextLengthError) as caught:
        await walk(stages, request(max_tokens=max_tokens))
    assert "32" in caught.value.message
    assert str(num_tokens) in caught.value.message
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(("asked", "given"), [(5, 5), (100, 23), (23, 23)])
async def test_a_request_may_ask_for_as_much_as_fits(asked: int, given: int) -> None:
    engine = ScriptedEngine("e", [[SequenceUpdate(1, [0], finish="stop")]])
    await walk(Stages([engine]), replace(request(max_tokens=asked), fit=True))
    assert engine.asked[0].max_tokens == given
    with pytest.raises(ContextLengthError):
        await walk(Stages([engine], num_tokens=32), replace(request(max_tokens=asked), fit=True))


async def test_a_prompt_that_just_fits_is_answered() -> None:
    engine = ScriptedEngine("e", [[SequenceUpdate(1, [0], finish="length")]])
    assert len(await walk(Stages([engine], num_tokens=31), request(max_tokens=1))) == 3


@pytest.mark.parametrize("after", range(3))
async def test_a_client_that_goes_away_frees_place_and_sequence(after: int) -> None:
    engine = ScriptedEngine("e", [[FIRST, SequenceUpdate(1, [1]), SequenceUpdate(1, [2], finish="stop")]])
    stages = Stages([engine])
    seen: list[Event] = []
    async with aclosing(stages.pipeline().answer(request())) as events:
        async for event in events:
            seen.append(event)
            if len(seen) > after:
                break
    assert (engine.closed, stages.places) == (1, 0)


async def test_what_each_breakpoint_writes_is_told_with_its_time_to_live() -> None:
    points = (Breakpoint(3, 3600.0), Breakpoint(5, 300.0), Breakpoint(8, 300.0))
    first = SequenceUpdate(1, [0], cached_tokens=0, lease_read_tokens=2, lease_write_tokens=6, finish="stop")
    asked = replace(request(), prompt=ChatPrompt([{"role": "user", "content": "p"}], markers=(Marker(0, 1, 60.0),)))
    events = await walk(Stages([ScriptedEngine("e", [[first]])], breakpoints=points), asked)
    usage = events[-1].usage if isinstance(events[-1], Finished) else None
    assert usage is not None
    assert (usage.lease_read_tokens, usage.lease_writes) == (2, ((3600.0, 1), (300.0, 2), (300.0, 3)))


@pytest.mark.parametrize(
    ("read", "written", "degraded", "kept"), [(2, 6, 0, 8), (2, 3, 1, 5), (2, 0, 3, 0), (9, 0, 0, 8), (9, 0, 1, 0)]
)
async def test_the_trace_says_up_to_which_breakpoint_a_prompt_is_kept(
    read: int, written: int, degraded: int, kept: int
) -> None:
    points = (Breakpoint(3, 3600.0), Breakpoint(5, 300.0), Breakpoint(8, 300.0))
    first = SequenceUpdate(1, [0], cached_tokens=0, finish="stop", lease_reads=[read, 1])
    first.lease_read_tokens, first.lease_write_tokens, first.leases_degraded = read, written, degraded
    asked = replace(request(), prompt=ChatPrompt([{"role": "user", "content": "p"}], markers=(Marker(0, 1, 60.0),)))
    stages = Stages([ScriptedEngine("e", [[first]])], breakpoints=points)
    await walk(stages, asked)
    assert (asked.trace.breakpoints, asked.trace.lease_reads, asked.trace.kept_tokens) == (points, (read, 1), kept)
    assert await stages.pipeline().breakpoints(asked) == points


async def test_a_request_whose_prefixes_are_too_short_has_no_lease() -> None:
    first = SequenceUpdate(1, [0], cached_tokens=0, finish="stop")
    prompt = ChatPrompt([{"role": "user", "content": "p"}], markers=(Marker(0, 1, 60.0),), min_breakpoint_tokens=99)
    asked = replace(request(), prompt=prompt)
    await walk(Stages([ScriptedEngine("e", [[first]])]), asked)
    assert asked.trace.lease is None


async def test_in_explicit_mode_nothing_is_cached_that_was_not_asked_for() -> None:
    first = SequenceUpdate(1, [0], cached_tokens=8, lease_read_tokens=3, lease_write_tokens=4, finish="stop")
    prompt = ChatPrompt([{"role": "user", "content": "p"}], markers=(Marker(0, 1, 60.0),))
    told = []
    for only_leased in (True, False):
        asked = replace(request(), prompt=prompt, only_leased=only_leased)
        events = await walk(Stages([ScriptedEngine("e", [[replace(first)]])], breakpoints=POINTS), asked)
        assert isinstance(events[-1], Finished)
        usage = events[-1].usage
        assert sum(tokens for _, tokens in usage.lease_writes) == usage.cache_write_tokens
        told.append((usage.cached_tokens, usage.cache_write_tokens))
    assert told == [(3, 4), (8, 0)]


async def test_a_prompt_is_counted_without_an_engine_being_asked() -> None:
    stages = Stages([ScriptedEngine("e", [])])
    assert await stages.pipeline().count(request()) == 9
    assert stages.calls == ["encode"]

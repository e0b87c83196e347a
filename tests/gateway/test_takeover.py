"""An engine that is lost in the middle of an answer: another goes on, and the client sees one answer."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import Breakpoint, Grammar, Sampling
from gateway.errors import EngineLostError, EnginesDiedError, KvasirError, OverloadedError, QueueFullError
from gateway.types import CallDelta, Constraint, Event, Finished, Group, Request, TextDelta, Tool, ToolUse
from tests.fakes.gateway import Gateway, running
from tests.fakes.pipeline import FakePipeline
from tests.fakes.stages import LETTERS, MortalEngine, Stages, request, walk

USE = ToolUse((Tool("f"),))
CALL = 'ab\n{"name": "f", "arguments": {"a": "b"}}'


def ids(text: str) -> tuple[int, ...]:
    return tuple(LETTERS.index(char) for char in text)


def fleet(answer: tuple[int, ...], *deaths: int | None, **fields: Any) -> Stages:
    """Engines a, b, ... that die after so many tokens of the answer. The first has the prompt's prefix."""
    engines = [MortalEngine("abc"[at], [], answer=answer, dies_after=after) for at, after in enumerate(deaths)]
    for engine in engines:
        for name, value in {"context_tokens": 109, **fields}.items():
            setattr(engine, name, value)
    return Stages(list(engines), held={"a": 2, "b": 1})


def joined(events: list[Event]) -> list[object]:
    """Chunks of text, and of one call, put together: where an answer is cut into chunks is chance."""
    parts: list[Any] = []
    for event in events:
        last = parts[-1] if parts else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            parts[-1] = TextDelta(last.text + event.text, last.scored + event.scored)
        elif isinstance(event, CallDelta) and isinstance(last, CallDelta) and last.call == event.call:
            parts[-1] = CallDelta(last.call, last.name + event.name, last.arguments + event.arguments)
        else:
            parts.append(event)
    return parts


ASKED = {
    "text": (ids("abcdefghijkl"), request(max_tokens=20)),
    "all tokens that it may have": (ids("abcdefghijkl"), request(max_tokens=12)),
    "fewer tokens": (ids("abcdefghijkl"), request(max_tokens=7)),
    "to the end of the context": (ids("abcdefghijkl" * 2), request(max_tokens=0)),
    "a stop string": (ids("abcdefghijkl"), request(max_tokens=20, stop=("fg", "zz"))),
    "the beginning of a stop string": (ids("abcdefghijkl"), request(max_tokens=20, stop=("lx",))),
    "log probabilities": (ids("abcdefgh"), replace(request(), sampling=Sampling(max_tokens=20, logprobs=0))),
    "calls": (ids(CALL), replace(request(max_tokens=90), tool_use=USE)),
    "one call": (ids(CALL + "\n" + CALL), replace(request(max_tokens=90), tool_use=replace(USE, parallel=False))),
    "sampled": (ids("abcdefgh"), replace(request(), sampling=Sampling(max_tokens=20, seed=7, repetition_penalty=1.1))),
}


def fresh(asked: Request) -> Request:
    """With a trace of its own."""
    now = request()
    return replace(asked, trace=now.trace, received_s=now.received_s, deadline_s=now.deadline_s)


@pytest.mark.parametrize("tokens_per_update", [1, 3])
@pytest.mark.parametrize("name", ASKED)
async def test_an_answer_cut_at_any_token_is_the_uncut_one(name: str, tokens_per_update: int) -> None:
    answer, asked = ASKED[name]
    if name == "to the end of the context":
        answer *= 5
    whole = await walk(fleet(answer, None, tokens_per_update=tokens_per_update), asked := fresh(asked))
    assert isinstance(whole[-1], Finished)
    generated = asked.trace.completion_tokens
    for after in range(1, min(generated, len(answer)) + 1):
        stages = fleet(answer, after, None, tokens_per_update=tokens_per_update)
        again = fresh(asked)
        events = await walk(stages, again)
        assert joined(events) == joined(whole), f"died after {after} tokens"
        assert (again.trace.finish, again.trace.completion_tokens) == (asked.trace.finish, generated)
        first, second = stages.engines
        assert len(first.asked) == 1
        assert again.trace.retries == len(second.asked)
        assert (first.closed, stages.places) == (0, 0)
        if second.asked:
            given = first.asked[0]
            assert second.asked == [replace(given, max_tokens=given.max_tokens - after)]
            assert again.trace.engine == "b"


@given(
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=2),
    most=st.integers(1, 40),
    per_update=st.integers(1, 5),
    text=st.text("abc", min_size=1, max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=2),
)
async def test_whatever_stops_it_wherever_it_is_cut(
    lengths: list[int], most: int, per_update: int, text: str, stops: list[str]
) -> None:
    asked = request(max_tokens=most, stop=tuple(stops))
    whole = await walk(fleet(ids(text), None), asked)
    engines = fleet(ids(text), lengths[0], lengths[1], None, tokens_per_update=per_update, error=EngineLostError("x"))
    again = fresh(asked)
    assert joined(await walk(engines, again)) == joined(whole)
    assert again.trace.completion_tokens == asked.trace.completion_tokens
    assert again.trace.reported_cached_tokens == asked.trace.reported_cached_tokens


async def test_the_next_engine_gets_the_prompt_and_all_tokens_that_came() -> None:
    asked = replace(request(stop=("bcd",)), sampling=Sampling(max_tokens=9, min_tokens=5, temperature=0.0, seed=3))
    stages = fleet(ids("abcabcab"), 3, None)
    stages.breakpoints = (Breakpoint(4, 60.0),)
    events = await walk(stages, asked)
    second = stages.engines[1]
    assert second.prompts == [[*range(9), 0, 1, 2]], "those that the reader held back are among them"
    assert second.asked == [Sampling(max_tokens=6, min_tokens=2, temperature=0.0, seed=3)]
    assert (stages.asks[1].prompt_tokens, stages.asks[1].avoid) == (12, frozenset("a"))
    assert (stages.asks[0].tier, stages.asks[1].tier) == ("default", "priority")
    assert isinstance(events[-1], Finished)
    assert events[-1].usage.completion_tokens == 9, "with the stop token"


async def test_usage_and_receipt_are_those_of_the_first_engine() -> None:
    stages = fleet(ids("abcdef"), 2, None)
    stages.engines[1].cached_tokens = 8  # type: ignore[attr-defined]
    asked = request(max_tokens=9)
    events = await walk(stages, asked)
    assert isinstance(events[-1], Finished)
    assert (events[-1].usage.cached_tokens, asked.trace.cached_tokens, asked.trace.predicted_tokens) == (4, 4, 8)
    assert stages.receipts.of("a")["receipts"] == 1
    assert stages.receipts.of("b") == {}
    assert asked.trace.first_token_ms is not None
    assert asked.trace.overhead_ms <= asked.trace.first_token_ms, "not the time until the other engine had it"


async def test_the_log_says_where_an_answer_was_cut(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        await walk(fleet(ids("abcdef"), 4, None), request(max_tokens=9))
    assert caplog.messages == ["engine a was lost after 4 tokens of the answer; request r goes on at another"]


CONSTRAINED = Constraint(Grammar("regex", "a*"), "guided_regex")
ALONE = {
    "a grammar": replace(request(), constraint=CONSTRAINED),
    "several answers": replace(request(), group=Group(2)),
    "log probabilities of the prompt": replace(request(), sampling=Sampling(max_tokens=5, prompt_logprobs=0)),
    "a presence penalty": replace(request(), sampling=Sampling(max_tokens=5, presence_penalty=0.5)),
    "a frequency penalty": replace(request(), sampling=Sampling(max_tokens=5, frequency_penalty=0.5)),
}


@pytest.mark.parametrize("name", ALONE)
async def test_what_cannot_go_on_elsewhere_is_told_of_the_loss(name: str) -> None:
    stages = fleet(ids("abcdef"), 2, None)
    with pytest.raises(EngineLostError, match="gone"):
        await walk(stages, fresh(ALONE[name]))
    assert stages.engines[1].asked == []


async def test_a_sequence_that_kills_engines_kills_two_at_most() -> None:
    stages = fleet(ids("abcdefgh"), 2, 4, None)
    with pytest.raises(EnginesDiedError):
        await walk(stages, request(max_tokens=9))
    assert [len(engine.asked) for engine in stages.engines] == [1, 1, 0]
    stages = fleet(ids("abcdefgh"), 0, 3, None)  # the first before the first token
    with pytest.raises(EnginesDiedError):
        await walk(stages, request(max_tokens=9))
    assert [len(engine.asked) for engine in stages.engines] == [1, 1, 0]


async def test_an_answer_goes_from_engine_to_engine_a_few_times_and_no_more() -> None:
    stages = fleet(ids("abcdefgh"), 2, 4, 6, error=EngineLostError("drained"))
    with pytest.raises(EngineLostError, match="drained"):
        await walk(stages, request(max_tokens=9))
    assert [len(engine.asked) for engine in stages.engines] == [1, 1, 1]


async def test_a_line_whose_engine_died_in_its_answer_is_left_to_its_batch() -> None:
    stages = fleet(ids("abcdefgh"), 2, None)
    with pytest.raises(EngineLostError, match="gone"):
        await walk(stages, replace(request(), lane="batch"))
    assert stages.engines[1].asked == []


@pytest.mark.parametrize("full", [QueueFullError("full"), OverloadedError("busy")])
async def test_where_no_other_engine_has_room_the_client_hears_of_the_loss(full: KvasirError) -> None:
    stages = fleet(ids("abcdefgh"), 2, None)
    plain = stages.slot

    def slot(engines: Any, ask: Any) -> Any:
        if ask.avoid:
            raise full
        return plain(engines, ask)

    stages.slot = slot  # type: ignore[method-assign]
    with pytest.raises(EngineLostError, match="gone") as caught:
        await walk(stages, request(max_tokens=9))
    assert caught.value.__cause__ is full


async def test_no_engine_of_other_weights_goes_on_with_an_answer() -> None:
    @dataclass
    class Newer(MortalEngine):
        @property
        def hello(self) -> Any:
            old = super().hello
            return replace(old, namespace=replace(old.namespace, weights="w2"))

    stages = fleet(ids("abcdefgh"), 2)
    (old,) = stages.engines
    newer = Newer("b", [], answer=ids("abcdefgh"))
    stages.serving = lambda model: [newer] if old.asked else [old]  # type: ignore[method-assign]
    with pytest.raises(EngineLostError, match="gone"):
        await walk(stages, request(max_tokens=9))
    assert newer.asked == []


@dataclass
class CutPipeline(FakePipeline):
    """The pipeline itself behind the HTTP side, over engines of which the first dies after so many tokens."""

    dies_after: int | None = None
    text: str = "well, so abc"
    stages: list[Stages] = field(default_factory=list)

    def answer(self, request: Request) -> AsyncGenerator[Event, None]:
        stages = fleet(ids(self.text), self.dies_after, None)
        self.stages.append(stages)
        return stages.pipeline().answer(request)


CHAT = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "stream": True}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**CHAT, "max_tokens": 50, "stream_options": {"include_usage": True}},
    "/v1/completions": {"model": "demo", "prompt": "x", "max_tokens": 50, "stream": True},
    "/v1/responses": {"model": "demo", "input": "x", "stream": True, "store": False},
    "/v1/messages": {**CHAT, "max_tokens": 50},
    "/v1beta/models/demo:streamGenerateContent?alt=sse": {"contents": [{"role": "user", "parts": [{"text": "x"}]}]},
}
CHANGES = re.compile(
    r'"(id|item_id|responseId|response_id|created|created_at|completed_at|createTime)":("[^"]*"|[\d.]+)|"obfuscation":"[^"]*"'
)


async def transcript(gateway: Gateway, path: str) -> str:
    headers = {"anthropic-version": "2023-06-01"} if path == "/v1/messages" else {}
    return CHANGES.sub("-", await gateway.transcript(path, STREAMS[path], headers=headers))


@pytest.mark.parametrize("path", STREAMS)
async def test_the_bytes_of_a_stream_do_not_say_where_it_was_cut(path: str) -> None:
    pipeline = CutPipeline()
    async with running(pipeline) as gateway:
        whole = await transcript(gateway, path)
        assert "error" not in re.sub(r'"error":null', "", whole)
        for after in range(1, len(pipeline.text) + 1):
            pipeline.dies_after = after
            assert await transcript(gateway, path) == whole
            first, second = pipeline.stages[-1].engines
            assert (len(first.asked), len(second.asked)) == (1, 1)

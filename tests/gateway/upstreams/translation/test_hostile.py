"""Broken and hostile answers of upstreams: each ends as an answer or one of our errors, and leaves nothing behind."""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from gateway.errors import KvasirError
from gateway.types import (
    CallDelta,
    Event,
    Finished,
    Started,
    TextDelta,
    Thinking,
    ThinkingDelta,
    UpstreamAnswer,
    UpstreamRequest,
)
from gateway.upstreams.routes import Route
from gateway.upstreams.translation.forms import FORMS
from gateway.upstreams.translation.stage import Translation
from tests.fakes.declining import declines
from tests.fakes.hosted import UPSTREAMS, answers
from tests.fakes.translated import chat

MUTATIONS = 5_000  # of each API, whole and streamed
CALLS = [("get_weather", {"place": "Oslo"}), ("clock", {})]
ODD: Sequence[Any] = (None, True, -1, 0, 2**40, 1.5, "", "x", "\ud800", [], [None], {}, {"x": 1}, "\x00", "data: x\n\n")


class Broken:
    """Upstreams of one API whose next answer is `body`."""

    def __init__(self, form: str, dialect: str) -> None:
        self._route = Route("up", dialect, form, "m", "m", over_engines=False, lossy=False)
        self.body, self.media, self.status = b"", "application/json", 200

    def routes(self, _model: str, _tenant: str) -> Sequence[Route]:
        return [self._route]

    @asynccontextmanager
    async def answer(self, request: UpstreamRequest) -> AsyncIterator[UpstreamAnswer]:
        async with aclosing(self._chunks()) as chunks:
            yield UpstreamAnswer("up", self.status, (("Content-Type", self.media),), chunks, "m")

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        for start in range(0, len(self.body), 97):  # cut anywhere
            yield self.body[start : start + 97]


def mutated(value: Any, dice: random.Random) -> Any:
    """The value with one place in it changed: odd, missing, doubled or of another kind."""
    if isinstance(value, dict) and value and dice.random() < 0.9:
        name = dice.choice(list(value))
        if dice.random() < 0.1:
            return {key: one for key, one in value.items() if key != name}
        return {**value, name: mutated(value[name], dice)}
    if isinstance(value, list) and value and dice.random() < 0.9:
        at = dice.randrange(len(value))
        if dice.random() < 0.2:
            return value[:at] + value[at + 1 :] if dice.random() < 0.5 else [*value, value[at]]
        return [*value[:at], mutated(value[at], dice), *value[at + 1 :]]
    return dice.choice(ODD)


def written(value: Any) -> bytes:
    return json.dumps(value).encode()  # also half of a surrogate pair


def broken_stream(pieces: Sequence[bytes], dice: random.Random) -> bytes:
    """Events in another order, missing, doubled, cut, changed, or with others between them."""
    events = list(pieces)
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(len(events))
        match dice.randrange(6):
            case 0:
                del events[at]
            case 1:
                events.insert(dice.randrange(len(events)), events[at])
            case 2:
                dice.shuffle(events)
            case 3:
                events[at] = events[at][: dice.randrange(len(events[at]) + 1)]
            case 4:
                events.insert(
                    at, dice.choice([b"data: 7\n\n", b"event: x\ndata: {}\n\n", b": ping\n\n", b"\xff\xfe\n\n"])
                )
            case _:
                head, _, data = events[at].rpartition(b"data: ")
                if data.startswith(b"{") and data.endswith(b"}\n\n"):
                    events[at] = head + b"data: " + written(mutated(json.loads(data), dice)) + b"\n\n"
        if not events:
            return b""
    return b"".join(events)


def check(events: Sequence[Event]) -> None:
    """What the dialects rely on."""
    assert not events or type(events[0]) is Started
    named = 0
    for event in events[1:]:
        if type(event) is TextDelta:
            event.text.encode("utf-8", "surrogatepass")
        elif type(event) is ThinkingDelta:
            event.text.encode("utf-8", "surrogatepass")
            assert event.text or event.signature.startswith("a3Yx")
        elif type(event) is CallDelta:
            assert bool(event.name) == (event.call == named)
            named += bool(event.name)
            assert event.call == named - 1
        else:
            assert type(event) is Finished
            assert event is events[-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", UPSTREAMS)
async def test_every_answer_comes_to_an_end(api: str, stream: bool) -> None:
    form = {"responses": "openai-responses"}.get(api, api)
    dialect = {"responses": "openai"}.get(api, api)
    dice, upstreams = random.Random(f"{api}{stream}"), Broken(form, dialect)
    translation: Any = Translation(upstreams, FORMS)  # type: ignore[arg-type]
    told = answers(api, ["Hel", "lo"], CALLS, stream=stream, thought="Let me see.")
    upstreams.media = told.media
    ended = 0
    refused = declines(api, stream=stream)
    for _ in range(MUTATIONS):
        pieces = (refused if dice.random() < 0.1 else told).pieces
        if stream:
            upstreams.body = broken_stream(pieces, dice)
        else:
            body = pieces[0]
            cut = body[: dice.randrange(len(body))]
            upstreams.body = cut if dice.random() < 0.1 else written(mutated(json.loads(body), dice))
        events: list[Event] = []
        begun_s = time.monotonic()
        try:
            asked = chat(stream=stream, thinking=dice.choice((None, Thinking())))
            async with aclosing(translation.answer(asked)) as answer:
                async for event in answer:
                    events += (event,)
            assert type(events[-1]) is Finished
            ended += 1
        except KvasirError:
            assert not any(type(event) is Finished for event in events)
        check(events)
        assert time.monotonic() - begun_s < 5
    assert 0 < ended < MUTATIONS
    upstreams.body = b"".join(told.pieces)
    async with aclosing(translation.answer(chat(stream=stream))) as answer:
        events = [event async for event in answer]
    text = "".join(event.text for event in events if type(event) is TextDelta)
    assert (text, [event.name for event in events if type(event) is CallDelta and event.name]) == (
        "Hello",
        ["get_weather", "clock"],
    )

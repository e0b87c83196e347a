"""Golden transcripts of answers, whole and in pieces, under tests/golden/gemini."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.types import CallDelta, FinishReason, ScoredToken, Spelled, TextDelta
from tests.fakes.gateway import running
from tests.fakes.golden import assert_golden
from tests.fakes.pipeline import FakePipeline

HI = {"contents": [{"parts": [{"text": "hi"}]}]}
TWO_CALLS = (
    "Let me see.",
    CallDelta(0, "weather", '{"city": '),
    CallDelta(0, "", '"Århus"}'),
    CallDelta(1, "time"),
)
CUT = ("So", CallDelta(0, "weather", '{"city": "Å'))


def scored(text: str) -> TextDelta:
    token = Spelled(text, text.encode())
    other = Spelled("<x>", None)
    return TextDelta(text, (ScoredToken(token, -0.5, ((token, -0.5), (other, -2.0)), 0),))


SCENES: dict[str, tuple[FakePipeline, dict[str, Any]]] = {
    "text": (FakePipeline(), {}),
    "cut": (FakePipeline(("One\u2028line", " 👩‍🚀"), cached_tokens=0, reason="length"), {}),
    "nothing": (FakePipeline((), cached_tokens=0), {}),
    "calls": (FakePipeline(TWO_CALLS, reason="tool_calls"), {}),
    "cut_call": (FakePipeline(CUT, reason="length"), {}),
    "broken_call": (FakePipeline((*CUT, CallDelta(1, "time", "{}")), reason="tool_calls"), {}),
    "logprobs": (FakePipeline((scored("Hi"), scored("!"))), {"responseLogprobs": True, "logprobs": 2}),
}


@pytest.mark.parametrize("form", ["whole", "sse", "array"])
@pytest.mark.parametrize("scene", SCENES)
async def test_answers_are_written_as_the_transcripts_say(scene: str, form: str) -> None:
    pipeline, config = SCENES[scene]
    verb = "generateContent" if form == "whole" else "streamGenerateContent"
    url = f"/v1/models/demo:{verb}" + ("?alt=sse" if form == "sse" else "")
    async with (
        running(pipeline) as gateway,
        gateway.session.post(gateway.url + url, json={**HI, "generationConfig": config}) as answer,
    ):
        assert answer.status == 200
        written = await answer.text()
        assert answer.content_type == ("text/event-stream" if form == "sse" else "application/json")
    if form == "whole":
        written = json.dumps(json.loads(written), indent=1, ensure_ascii=False) + "\n"
    assert_golden(f"gemini/{scene}.{form}.txt", written)


@pytest.mark.parametrize("reason", ["stop", "length"])
async def test_several_candidates_are_told_apart_and_the_last_one_brings_the_usage(reason: FinishReason) -> None:
    async with running(FakePipeline(reason=reason)) as gateway:
        body = {**HI, "generationConfig": {"candidateCount": 3}}
        _, pieces, _ = await gateway.post("/v1/models/demo:streamGenerateContent", body)
        _, whole, _ = await gateway.post("/v1/models/demo:generateContent", body)
    said = dict.fromkeys(range(3), "")
    ended: list[int] = []
    for piece in pieces:
        (candidate,) = piece["candidates"]
        said[candidate["index"]] += "".join(part["text"] for part in candidate["content"]["parts"])
        ended += [candidate["index"]] if "finishReason" in candidate else []
    assert said == dict.fromkeys(range(3), "Hello world")
    assert sorted(ended) == [0, 1, 2]
    assert [candidate["index"] for candidate in whole["candidates"]] == [0, 1, 2]
    usage = {"promptTokenCount": 40, "candidatesTokenCount": 6, "totalTokenCount": 46}
    assert pieces[-1]["usageMetadata"].items() >= usage.items()
    assert whole["usageMetadata"].items() >= usage.items()
    assert not any("usageMetadata" in piece for piece in pieces[:-1])

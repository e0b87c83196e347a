"""Several answers to one prompt: numbered, counted once, and the best of them found."""

from __future__ import annotations

from typing import Any

import pytest

from engine.protocol import Sampling
from gateway.api.call import Choices
from gateway.api.openai.response import Answer
from gateway.types import ScoredToken, Spelled, TextDelta, Usage
from tests.fakes.gateway import running
from tests.fakes.pipeline import FakePipeline

HI: Any = [{"role": "user", "content": "hi"}]


def answer(*logprobs: float) -> Answer:
    scored = tuple(ScoredToken(Spelled("a", b"a"), logprob, (), 0) for logprob in logprobs)
    return Answer(f"{logprobs}", "stop", Usage(1, len(logprobs)), scored)


def test_seeds_count_up_and_only_several_answers_are_a_group() -> None:
    many = list(Choices(2, 3).samplings(Sampling(max_tokens=5, seed=7)))
    assert [(number, sampling.seed) for number, _, sampling in many] == [(0, 7), (1, 8), (2, 9)]
    assert len({id(group) for _, group, _ in many}) == 1
    assert [sampling.logprobs for _, _, sampling in many] == [0, 0, 0]
    assert list(Choices().samplings(Sampling(max_tokens=5))) == [(0, None, Sampling(max_tokens=5))]
    assert [one.seed for _, _, one in Choices(2, 2).samplings(Sampling(max_tokens=5))] == [None, None]


def test_the_likeliest_on_average_are_told_best_first_of_each_prompt() -> None:
    first = [answer(-1.0, -1.0, -1.0), answer(-2.0), answer(), answer(-0.5, -0.9)]
    second = [answer(-3.0), answer(-4.0), answer(-2.0), answer(-9.0)]
    best = Choices(2, 4).best([*first, *second], logprobs=True)
    assert best == [first[3], first[0], second[2], second[0]]
    assert [one.scored for one in Choices(2, 4).best([*first, *second], logprobs=False)] == [None] * 4
    assert Choices(4, 4).best(first, logprobs=False) == first


class Numbered(FakePipeline):
    """Each answer says its number, and is as likely as that says."""

    async def _events(self, request: Any) -> Any:
        scored = ScoredToken(Spelled("x", b"x"), -1.0 / (request.number + 1), (), 0)
        wants = request.sampling.logprobs is not None
        self.pieces = [TextDelta(f"answer {request.number}", (scored,) if wants else ())]
        async for event in super()._events(request):
            yield event


async def test_choices_are_numbered_and_the_prompt_is_counted_once() -> None:
    async with running(Numbered()) as gateway, gateway.sdk() as client:
        raw = await client.chat.completions.with_raw_response.create(model="demo", messages=HI, n=3, seed=5)
        given = raw.parse()
        assert [choice.index for choice in given.choices] == [0, 1, 2]
        assert [choice.message.content for choice in given.choices] == ["answer 0", "answer 1", "answer 2"]
        assert given.usage is not None
        assert (given.usage.prompt_tokens, given.usage.completion_tokens) == (40, 3)
        assert raw.headers["x-kvasir-cached-tokens"] == "32"
        assert [request.sampling.seed for request in gateway.pipeline.requests] == [5, 6, 7]
        metrics = (await gateway.get("/metrics"))[1]
        assert 'kvasir_prompt_tokens_total{model="demo",tenant="anonymous"} 40.0' in metrics


async def test_a_stream_introduces_every_choice_in_order_before_it_says_anything() -> None:
    async with running(Numbered()) as gateway, gateway.sdk() as client:
        stream = await client.chat.completions.create(
            model="demo", messages=HI, n=3, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert [chunk.choices[0].index for chunk in chunks[:3]] == [0, 1, 2]
        assert [chunk.choices[0].delta.role for chunk in chunks[:3]] == ["assistant"] * 3
        said = dict.fromkeys(range(3), "")
        for chunk in chunks[:-1]:
            said[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert said == {index: f"answer {index}" for index in range(3)}
        assert sum(chunk.choices[0].finish_reason == "stop" for chunk in chunks[:-1]) == 3
        usage = chunks[-1].usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (40, 3)


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_the_best_are_told_of_each_prompt_and_all_are_counted(logprobs: int | None) -> None:
    async with running(Numbered()) as gateway, gateway.sdk() as client:
        given = await client.completions.create(
            model="demo", prompt=["a: ", "b: "], n=2, best_of=4, echo=logprobs is None, logprobs=logprobs
        )
        heads = ["a: ", "a: ", "b: ", "b: "] if logprobs is None else [""] * 4
        said = ["answer 3", "answer 2", "answer 3", "answer 2"]
        assert [choice.text for choice in given.choices] == [a + b for a, b in zip(heads, said, strict=True)]
        assert [choice.index for choice in given.choices] == [0, 1, 2, 3]
        assert [choice.logprobs is not None for choice in given.choices] == [logprobs is not None] * 4
        assert given.usage is not None
        assert (given.usage.prompt_tokens, given.usage.completion_tokens) == (80, 8)

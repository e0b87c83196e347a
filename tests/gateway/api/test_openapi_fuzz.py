"""Requests made of /openapi.json against a running gateway: whatever comes, an answer, in the shape it should have."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.protocol import TokenizerFiles
from gateway.api.middleware import DIALECTS
from gateway.api.openapi import document
from gateway.api.routes import ROUTES
from gateway.errors import EngineFailedError, EngineLostError, OverloadedError, QueueFullError
from gateway.types import CallDelta
from tests.fakes import tool_templates
from tests.fakes.asking_over import Target, ended, target
from tests.fakes.askings import Asking, askings
from tests.fakes.bodies import BODIES
from tests.fakes.embedding import FakeTextModel, fake_embedder
from tests.fakes.gateway import Gateway, make_app, running
from tests.fakes.instances import instances
from tests.fakes.pipeline import FakePipeline
from tests.fakes.waiting import until
from tests.fakes.whole import whole

ASKS_WITH = {dialect.name: dialect.asking_headers for dialect in DIALECTS}
FAILURES = st.sampled_from(
    (
        None,
        QueueFullError("Too many wait.", retry_after_s=2),
        OverloadedError("No place."),
        EngineLostError("It is gone."),
        EngineFailedError("It \ud83d cannot."),
        RuntimeError("a bug"),
    )
)


@dataclass(frozen=True)
class Plan:
    """What the pipeline does with the next request."""

    pieces: tuple[str | CallDelta, ...]
    reason: str
    before: Exception | None
    after: Exception | None

    @property
    def fails(self) -> bool:
        return self.before is not None or self.after is not None


CALLS = (
    CallDelta(0, "get_time", ""),
    CallDelta(0, "", '{"a":'),
    CallDelta(0, "", ' "\u2028😀"}'),
    CallDelta(1, "f", "{}"),
)
TEXTS = st.lists(st.sampled_from(("", "a", " b", "\n", "😀", "\u2028", "data: x\n\n", "\x00", '"')), max_size=4).map(
    tuple
)
PLANS = st.one_of(
    st.builds(Plan, TEXTS, st.sampled_from(("stop", "length")), st.none(), st.none()),
    st.builds(Plan, TEXTS.map(lambda text: (*text, *CALLS)), st.just("tool_calls"), st.none(), st.none()),
    st.builds(Plan, TEXTS, st.just("stop"), FAILURES, FAILURES),
)


SAID = (
    "Hello.",
    "😀👍🏽é",
    '<tool_call>\n{"name": "f", "arguments": {"a": "\u2028😀"}}\n</tool_call>',
    '<tool_call>{"name": "f"',
    '[TOOL_CALLS] [{"name": "f", "arguments": {}}]',
    '<|python_tag|>{"name": "f", "parameters": {"a": 1}}',
    '{"name": "f", "parameters": {}}',
    "<think>\nhm\n</think>\n\nYes. <think>",
    "\x00\r\n\n",
)
"""What an engine says; tokens of it, cut anywhere, over and over."""

_Plan = TypeVar("_Plan")


def ask_all(
    runner: asyncio.Runner, target: Target, examples: int, plans: st.SearchStrategy[_Plan], act: Callable[[_Plan], bool]
) -> Counter[str]:
    """So many requests, the same ones each time. `act` prepares for each what answers it, and says whether that fails.
    Returns how often each status was seen, by dialect."""

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(asking=askings(target.document, ASKS_WITH, target.made), plan=plans)
    def ask(asking: Asking, plan: _Plan) -> None:
        fails = act(plan)
        runner.run(target.check(asking, fails=fails))

    ask()
    return target.seen


def fuzz_pipeline(examples: int) -> Counter[str]:
    pipeline = FakePipeline()
    served = running(pipeline, embedder=fake_embedder(FakeTextModel(max_tokens=64)))

    def act(plan: Plan) -> bool:
        runner.run(until(lambda: pipeline.open == 0))  # the answer before was closed; one may still run
        pipeline.pieces, pipeline.reason = plan.pieces, plan.reason  # type: ignore[assignment]
        pipeline.fails_before, pipeline.fails_after = plan.before, plan.after
        return plan.fails

    with asyncio.Runner() as runner, target(runner, served) as (over, _):
        return ask_all(runner, over, examples, PLANS, act)


def fuzz_engine(examples: int, files: TokenizerFiles) -> Counter[str]:
    """With all stages between: templates, tokenisers, readers of tool calls."""
    encode = Tokenizer.from_str(files.tokenizer_json).encode
    said = [tuple(encode(text, add_special_tokens=False).ids) for text in SAID]

    with asyncio.Runner() as runner, target(runner, whole(files=files)) as (over, served):
        (engine,) = served.engines

        def act(plan: tuple[tuple[int, ...], int, str]) -> bool:
            answer, engine.behaviour.tokens, engine.behaviour.finish = plan
            engine.behaviour.answer = answer
            return engine.behaviour.finish == "error"

        answers = st.sampled_from(said) | st.lists(st.integers(0, 400), min_size=1, max_size=9).map(tuple)
        plans = st.tuples(answers, st.integers(1, 40), st.sampled_from(("stop", "stop", "length", "error")))
        return ask_all(runner, over, examples, plans, act)


def test_every_request_has_an_answer_in_the_shape_of_its_dialect() -> None:
    seen = fuzz_pipeline(300)
    for dialect in DIALECTS:
        assert {f"{dialect.name} 200", f"{dialect.name} 400", f"{dialect.name} 404"} <= set(seen)


@pytest.mark.slow
def test_five_thousand_requests_have_an_answer_in_the_shape_of_their_dialect() -> None:
    assert sum(fuzz_pipeline(5000).values()) >= 5000


@pytest.mark.slow
@pytest.mark.parametrize("template", ["demo", "mistral"])
def test_the_same_holds_with_all_stages_between(template: str) -> None:
    assert fuzz_engine(60, tool_templates.ALL[template]())["openai 200"]


@pytest.mark.slow
@pytest.mark.parametrize("template", tool_templates.ALL)
def test_the_same_holds_for_every_style_of_tool_calls(template: str) -> None:
    assert fuzz_engine(500, tool_templates.ALL[template]())["openai 200"]


@pytest.mark.parametrize("path", BODIES)
async def test_what_the_fuzzer_begins_with_is_answered(path: str) -> None:
    async with running() as gateway:
        for body in BODIES[path]:
            for name, headers in ASKS_WITH.items():
                if name in json.loads((await gateway.get("/openapi.json"))[1])["paths"][path]["post"]["tags"]:
                    status, answer, _ = await _post(gateway, path.replace("{model}", "demo"), body, headers)
                    assert status == 200, (body, answer)


async def _post(gateway: Gateway, path: str, body: Any, headers: Mapping[str, str]) -> tuple[int, str, Any]:
    async with gateway.session.post(gateway.url + path, json=body, headers=headers) as answer:
        return answer.status, await answer.text(), answer.headers


WRITTEN = json.loads(json.dumps(document(make_app()[ROUTES], DIALECTS, "1")))["components"]["schemas"]


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_what_is_made_of_a_schema_fits_it(name: str) -> None:
    @settings(max_examples=30, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(value=instances(WRITTEN[name]))
    def check(value: object) -> None:
        jsonschema.Draft202012Validator(WRITTEN[name]).validate(value)

    check()


@pytest.mark.parametrize(
    ("stream", "end"),
    [
        (b'data: {"choices":[]}\n\ndata: [DONE]\n\n', "whole"),
        (b'data: {"error":{"message":"x"}}\n\n', "failed"),
        (b'event: message_stop\ndata: {"type":"message_stop"}\n\n', "whole"),
        (b'event: response.failed\ndata: {"type":"response.failed"}\n\n', "failed"),
        (b'data: {"candidates":[{"finishReason":"STOP"}]}\n\n', "whole"),
        (b'data: {"choices":[]}\n\n', None),
        (b'data: {"choices":[]}\n\ndata: [DONE]\n', None),
        (b'data: {"candidates":[{"index":0}]}\n\n', None),
        (b"data: {\n\ndata: [DONE]\n\n", None),
        (b"", None),
    ],
)
def test_a_stream_that_was_cut_is_known_for_one(stream: bytes, end: str | None) -> None:
    if end is not None:
        assert ended(stream) == end
        return
    with pytest.raises((AssertionError, KeyError, ValueError)):
        ended(stream)

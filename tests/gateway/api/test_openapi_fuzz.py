"""Requests made of /openapi.json against a running gateway: whatever comes, an answer, in the shape it should have."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import aiohttp
import jsonschema
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict
from tokenizers import Tokenizer
from yarl import URL

from engine.protocol import TokenizerFiles
from gateway.api.dialect import JSON, SSE, Dialect
from gateway.api.dialects import DIALECTS, dialect_of
from gateway.api.openapi import document
from gateway.api.routes import ROUTES
from gateway.errors import EngineFailedError, EngineLostError, OverloadedError, QueueFullError
from gateway.types import CallDelta
from tests.fakes import tool_templates
from tests.fakes.askings import Asking, askings
from tests.fakes.bodies import BODIES
from tests.fakes.embedding import FakeTextModel, fake_embedder
from tests.fakes.gateway import LIMIT_S, Gateway, make_app, running
from tests.fakes.instances import instances
from tests.fakes.street import FakeStreet
from tests.fakes.whole import whole

ASKS_WITH = {dialect.name: dialect.asking_headers for dialect in DIALECTS}
SHAPE_CODES = {"unknown_parameter", "invalid_type", "empty_array", "array_above_max_length", "empty_string"}
"""What the OpenAI dialect never says of a body that fits its schema."""

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
    """What the street does with the next request."""

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


@dataclass
class Target:
    """A running gateway, and what it says of itself."""

    url: str
    session: aiohttp.ClientSession
    document: dict[str, Any]
    seen: Counter[str]

    async def ask(self, asking: Asking) -> tuple[int, aiohttp.typedefs.LooseHeaders, bytes]:
        async with (
            asyncio.timeout(LIMIT_S),
            self.session.request(
                asking.method,
                URL(self.url + asking.target, encoded=True),
                data=asking.body,
                headers=CIMultiDict(asking.headers),
                skip_auto_headers=("Content-Type", "User-Agent"),
                allow_redirects=False,
            ) as answer,
        ):
            return answer.status, answer.headers, await answer.read()

    async def check(self, asking: Asking, *, fails: bool) -> None:
        """Asks, and holds the answer to what is promised of every answer."""
        status, headers, body = await self.ask(asking)
        dialect = spoken(asking)
        self.seen[f"{dialect.name} {status}"] += 1
        assert status < 500 or fails, body
        if is_no_http(asking) and status == 400 and headers["Content-Type"].startswith("text/plain"):
            return  # refused before anybody could know whose it is
        for name in dialect.headers("x", 1.0):
            assert name in headers
        if asking.method == "HEAD":
            return
        if status >= 400:
            self.check_refusal(asking, dialect, status, headers, body)
        elif asking.template:
            self.check_answer(asking, headers, body, fails=fails)

    def check_refusal(self, asking: Asking, dialect: Dialect, status: int, headers: Any, body: bytes) -> None:
        assert headers["Content-Type"].partition(";")[0] == JSON
        refusal = json.loads(body)
        schema = self.document["components"]["schemas"][f"{dialect.name}_error"]
        jsonschema.Draft202012Validator(schema).validate(refusal)
        if asking.fits and dialect.name == "openai" and status == 400:
            assert refusal["error"]["code"] not in SHAPE_CODES, (refusal, asking)

    def check_answer(self, asking: Asking, headers: Any, body: bytes, *, fails: bool) -> None:
        operation = self.document["paths"][asking.template][asking.method.lower()]
        media = headers["Content-Type"].partition(";")[0]
        assert media in operation["responses"]["200"]["content"]
        if media == JSON:
            json.loads(body)
        elif media == SSE:
            assert ended(body) in (("whole", "failed") if fails else ("whole",)), body
        if isinstance(asking.value, dict) and "requestBody" in operation:
            schema = operation["requestBody"]["content"][JSON]["schema"]
            whole = {**schema, "components": self.document["components"]}
            jsonschema.Draft202012Validator(whole).validate(given_values(asking.value))


def is_no_http(asking: Asking) -> bool:
    """A method that there is not, or twice a header that is there only once."""
    names = Counter(name.lower() for name, _ in asking.headers)
    return asking.method == "BREW" or names["content-type"] > 1 or names["content-encoding"] > 1


def spoken(asking: Asking) -> Dialect:
    """The dialect of a request, as whoever sent it expects it."""
    url = URL(asking.target, encoded=True)
    asked = SimpleNamespace(
        method=asking.method, path=url.path, query=url.query, headers=CIMultiDict(asking.headers), rel_url=url
    )
    return dialect_of(cast("web.Request", asked))


def given_values(value: Any) -> Any:
    """Without what was not given: keys whose value is null."""
    if isinstance(value, dict):
        return {key: given_values(item) for key, item in value.items() if item is not None}
    return [given_values(item) for item in value] if isinstance(value, list) else value


def ended(stream: bytes) -> str:
    """How a stream of any dialect ended: "whole" or "failed". Raises for one that is cut off or is none."""
    text = stream.decode()
    assert text.endswith("\n\n"), "the last event is complete"
    events = [block.split("\n") for block in text[:-2].split("\n\n")]
    assert all(line.startswith(("data: ", "event: ")) for lines in events for line in lines)
    data = [line.removeprefix("data: ") for lines in events for line in lines if line.startswith("data: ")]
    assert len(data) == len(events)
    *before, last = data
    for one in before:
        json.loads(one)
    if last == "[DONE]":
        return "whole"
    value = json.loads(last)
    if value.get("error") or value.get("type") in ("error", "response.failed"):
        return "failed"
    if value.get("type") in ("message_stop", "response.completed", "response.incomplete"):
        return "whole"
    assert value["candidates"][0]["finishReason"], "Gemini's last event has the reason"
    return "whole"


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
    @given(asking=askings(target.document, ASKS_WITH), plan=plans)
    def ask(asking: Asking, plan: _Plan) -> None:
        fails = act(plan)
        runner.run(target.check(asking, fails=fails))

    ask()
    return target.seen


@contextmanager
def target(runner: asyncio.Runner, context: AbstractAsyncContextManager[Any]) -> Iterator[tuple[Target, Any]]:
    """A target, and what the context gave, whose url is the target's."""

    async def start() -> tuple[Any, aiohttp.ClientSession, dict[str, Any]]:
        served, session = await context.__aenter__(), aiohttp.ClientSession()
        async with session.get(f"{served.url}/openapi.json") as answer:
            return served, session, await answer.json()

    async def end() -> None:
        await session.close()
        await context.__aexit__(None, None, None)

    served, session, document = runner.run(start())
    try:
        yield Target(served.url, session, document, Counter()), served
    finally:
        runner.run(end())


def fuzz_street(examples: int) -> Counter[str]:
    street = FakeStreet()
    served = running(street, embedder=fake_embedder(FakeTextModel(max_tokens=64)))

    def act(plan: Plan) -> bool:
        assert street.open == 0, "the answer before was closed"
        street.pieces, street.reason = plan.pieces, plan.reason  # type: ignore[assignment]
        street.fails_before, street.fails_after = plan.before, plan.after
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
    seen = fuzz_street(300)
    for dialect in DIALECTS:
        assert {f"{dialect.name} 200", f"{dialect.name} 400", f"{dialect.name} 404"} <= set(seen)


@pytest.mark.slow
def test_five_thousand_requests_have_an_answer_in_the_shape_of_their_dialect() -> None:
    assert sum(fuzz_street(5000).values()) >= 5000


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

"""Sends requests to a running gateway, and holds every answer to what is promised of it: a status below 500, headers
and errors of its dialect, media types of the document, a stream that ends.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import jsonschema
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from gateway.api.dialect import JSON, SSE, Dialect
from gateway.api.middleware import DIALECTS, dialect_of
from tests.fakes.askings import Asking
from tests.fakes.gateway import LIMIT_S

SHAPE_CODES = {"unknown_parameter", "invalid_type", "empty_array", "array_above_max_length", "empty_string"}
"""What the OpenAI dialect never says of a body that fits its schema."""
LIVE = "/admin/live"
"""Its events have no end: the first is read."""
MADE = 8  # responses and cached contents that there are at first; some requests delete one
DEPENDS = {("empty_array", "input")}
"""But for these, which depend on other fields: an earlier response may be continued with no input."""


@dataclass
class Target:
    """A running gateway, and what it says of itself."""

    url: str
    session: aiohttp.ClientSession
    document: dict[str, Any]
    made: dict[str, list[str]]  # ids of what there is, by their names in paths
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
            if answer.status == 200 and asking.method == "GET" and asking.target.startswith(LIVE):
                return answer.status, answer.headers, await answer.content.readuntil(b"\n\n")
            return answer.status, answer.headers, await answer.read()

    async def upload(self) -> str:
        """A file of requests, by its id."""
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", b"{}", filename="in.jsonl")
        async with self.session.post(f"{self.url}/v1/files", data=form) as answer:
            assert answer.status == 200, await answer.text()
            return str((await answer.json())["id"])

    async def make(self, path: str, **changed: Any) -> Any:
        """Posts the document's example."""
        examples = self.document["paths"][path]["post"]["requestBody"]["content"][JSON]["examples"]
        tag, example = next(iter(examples.items()))
        headers = next((dialect.asking_headers for dialect in DIALECTS if dialect.name == tag), {})
        async with self.session.post(self.url + path, json=example["value"] | changed, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def check(self, asking: Asking, *, fails: bool) -> None:
        """Asks, and holds the answer to what is promised of every answer."""
        status, headers, body = await self.ask(asking)
        dialect = spoken(asking)
        self.seen[f"{dialect.name} {status}"] += 1
        assert status < 500 or fails, body
        if is_no_http(asking) and status in (400, 417) and headers["Content-Type"].startswith("text/plain"):
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
            code, param = refusal["error"]["code"], refusal["error"]["param"]
            assert code not in SHAPE_CODES or (code, param) in DEPENDS, (refusal, asking)

    def check_answer(self, asking: Asking, headers: Any, body: bytes, *, fails: bool) -> None:
        operation = self.document["paths"][asking.template][asking.method.lower()]
        media = headers["Content-Type"].partition(";")[0]
        assert media in operation["responses"]["200"]["content"]
        if media == JSON:
            json.loads(body)
        elif media == SSE and asking.template != LIVE:
            assert ended(body) in (("whole", "failed") if fails else ("whole",)), body
        if isinstance(asking.value, dict) and "requestBody" in operation:
            schema = operation["requestBody"]["content"][JSON]["schema"]
            whole = {**schema, "components": self.document["components"]}
            jsonschema.Draft202012Validator(whole).validate(given_values(asking.value))


def is_no_http(asking: Asking) -> bool:
    """A method that there is not, twice a header that is there only once, or an expectation that there is not."""
    names = Counter(name.lower() for name, _ in asking.headers)
    return (
        ("Expect", "nothing") in asking.headers
        or asking.method == "BREW"
        or names["content-type"] > 1
        or names["content-encoding"] > 1
    )


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


@contextmanager
def target(runner: asyncio.Runner, context: AbstractAsyncContextManager[Any]) -> Iterator[tuple[Target, Any]]:
    """A target, and what the context gave, whose url is the target's."""

    async def start() -> tuple[Any, Target]:
        served, session = await context.__aenter__(), aiohttp.ClientSession()
        async with session.get(f"{served.url}/openapi.json") as answer:
            over = Target(served.url, session, await answer.json(), {}, Counter())
        for _ in range(MADE):
            over.made.setdefault("response_id", []).append((await over.make("/v1/responses"))["id"])
            cached = await over.make("/v1beta/cachedContents")
            over.made.setdefault("name", []).append(cached["name"].removeprefix("cachedContents/"))
        over.made["file_id"] = [await over.upload() for _ in range(MADE)]
        batches = [await over.make("/v1/batches", input_file_id=file_id) for file_id in over.made["file_id"]]
        batches += [await over.make("/v1/messages/batches") for _ in range(MADE)]
        over.made["batch_id"] = [one["id"] for one in batches]
        return served, over

    async def end() -> None:
        await over.session.close()
        await context.__aexit__(None, None, None)

    served, over = runner.run(start())
    try:
        yield over, served
    finally:
        runner.run(end())

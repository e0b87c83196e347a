"""The Gemini API as far as prefixes go: keeps cachedContents with their time to live, counts tokens, answers with
usage, and refuses what the API refuses. Requests and answers are those of the SDK's own types."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import orjson
from aiohttp import web
from google.genai import types as google

from gateway.config import UpstreamSettings
from tests.fakes.tuned import tuned

KEY = "sk-upstream"
ANSWER_TOKENS = 7
_CREATED = ("model", "contents", "systemInstruction", "tools", "toolConfig", "ttl")


def tokens_of(value: Any) -> int:
    """Four characters each; of a content, what its texts have, so that contents add up."""
    if isinstance(value, str):
        return -(-len(value) // 4)
    if isinstance(value, dict):
        return sum(tokens_of(inner) for name, inner in value.items() if name not in ("role", "id"))
    return sum(map(tokens_of, value)) if isinstance(value, list) else 0


@dataclass
class Held:
    body: dict[str, Any]
    tokens: int
    ends_s: float


@dataclass
class CachedGemini:
    """`refuses` is a status that creations are answered with. `gate` holds creations back until it is set."""

    now: Callable[[], float] = time.time
    least: int = 1024
    refuses: int = 0
    url: str = ""
    held: dict[str, Held] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)  # method and last part of the path
    prompts: list[int] = field(default_factory=list)  # tokens of each request that was answered
    created_tokens: int = 0
    keys: set[str | None] = field(default_factory=set)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    def settings(self, **options: Any) -> UpstreamSettings:
        table = {
            "url": self.url,
            "models": ("up-pro = gemini-pro", "up-flash = gemini-flash"),
            "key": KEY,
            "retries": 0,
        }
        return tuned(UpstreamSettings, name="up", dialect="gemini", **{**table, **options})

    def count(self, call: str) -> int:
        return self.calls.count(call)

    def forget(self) -> None:
        self.held.clear()

    async def handle(self, http: web.Request) -> web.Response:
        self.keys.add(http.headers.get("x-goog-api-key"))
        body = orjson.loads(await http.read() or b"{}")
        what = http.path.removeprefix("/v1beta/")
        self.calls.append(
            f"{http.method} {what.partition('/')[0] if what.startswith('cached') else what.partition(':')[2]}"
        )
        if what == "cachedContents":
            return await self._create(body)
        if what.startswith("cachedContents/"):
            return self._change(http.method, what, body)
        return self._generate(what.removeprefix("models/"), body)

    async def _create(self, body: dict[str, Any]) -> web.Response:
        self.reached.set()
        await self.gate.wait()
        assert set(body) <= set(_CREATED)
        google.CreateCachedContentConfig.model_validate({name: body[name] for name in body if name != "model"})
        tokens = sum(tokens_of(body.get(name)) for name in _CREATED[1:4])
        if self.refuses:
            return refused(self.refuses, "no room")
        if tokens < self.least:
            counts = f"total_token_count={tokens}, min_total_token_count={self.least}"
            return refused(400, f"Cached content is too small. {counts}")
        name = f"cachedContents/c{len(self.calls)}"
        self.held[name] = Held(body, tokens, self.now() + float(body["ttl"].removesuffix("s")))
        self.created_tokens += tokens
        return self._resource(name)

    def _change(self, method: str, name: str, body: dict[str, Any]) -> web.Response:
        held = self._find(name)
        if held is None:
            return refused(404, "not found")
        if method == "DELETE":
            del self.held[name]
            return web.json_response({})
        assert method == "PATCH"
        held.ends_s = self.now() + float(body["ttl"].removesuffix("s"))
        return self._resource(name)

    def _find(self, name: str) -> Held | None:
        held = self.held.get(name)
        return held if held is not None and held.ends_s > self.now() else None

    def _resource(self, name: str) -> web.Response:
        held = self.held[name]
        value = {
            "name": name,
            "model": held.body["model"],
            "expireTime": datetime.fromtimestamp(held.ends_s, UTC).isoformat(),
            "usageMetadata": {"totalTokenCount": held.tokens},
        }
        return _reply(google.CachedContent.model_validate(value))

    def _generate(self, what: str, body: dict[str, Any]) -> web.Response:
        model, _, verb = what.partition(":")
        for content in body["contents"]:
            google.Content.model_validate(content)
        cached = 0
        if "cachedContent" in body:
            held = self._find(body["cachedContent"])
            if held is None:
                return refused(403, "CachedContent not found (or permission denied)")
            if held.body["model"] != f"models/{model}" or {"systemInstruction", "tools", "toolConfig"} & set(body):
                return refused(400, "CachedContent can not be used with this")
            cached = held.tokens
        prompt = cached + sum(tokens_of(body.get(name)) for name in ("contents", "systemInstruction", "tools"))
        self.prompts.append(prompt)
        usage = {"promptTokenCount": prompt, "candidatesTokenCount": ANSWER_TOKENS}
        usage |= {"totalTokenCount": prompt + ANSWER_TOKENS} | ({"cachedContentTokenCount": cached} if cached else {})
        candidate = {"content": {"role": "model", "parts": [{"text": "Hello"}]}, "finishReason": "STOP", "index": 0}
        answer = google.GenerateContentResponse.model_validate(
            {"candidates": [candidate], "modelVersion": model, "usageMetadata": usage}
        )
        if verb != "streamGenerateContent":
            return _reply(answer)
        data = b"data: %b\n\n" % answer.model_dump_json(by_alias=True, exclude_none=True).encode()
        return web.Response(body=data, content_type="text/event-stream")


def refused(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"code": status, "message": message, "status": "T"}}, status=status)


def _reply(value: Any) -> web.Response:
    body = value.model_dump_json(by_alias=True, exclude_none=True).encode()
    return web.Response(body=body, content_type="application/json")


@asynccontextmanager
async def cached_gemini(**options: Any) -> AsyncIterator[CachedGemini]:
    """On a port, until the block is left."""
    fake = CachedGemini(**options)
    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", fake.handle)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield fake
    finally:
        await runner.cleanup()

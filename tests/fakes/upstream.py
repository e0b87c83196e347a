"""A hosted API on a real port: answers with bytes that a test wrote, and fails as hosted APIs do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from socket import socket
from typing import Any, Literal

import orjson
from aiohttp import web

from gateway.config import UpstreamSettings
from tests.fakes.tuned import tuned

BLOCKED_S = 0.5
"""A write that takes longer has nobody who reads."""

JSON, SSE = "application/json", "text/event-stream"

Then = Literal["end", "cut", "stall", "garble"]


def events(*values: Any) -> list[bytes]:
    return [b"data: " + (value if isinstance(value, bytes) else orjson.dumps(value)) + b"\n\n" for value in values]


def named(*values: dict[str, Any]) -> list[bytes]:
    return [b"event: %b\ndata: %b\n\n" % (value["type"].encode(), orjson.dumps(value)) for value in values]


@dataclass(frozen=True)
class Told:
    """An answer.

    pieces  of the body, each written and flushed by itself
    then    after them: the end, the connection cut, or nothing until the test is over ("garble": after broken framing)
    refuse  the connection is cut before anything was said
    """

    pieces: Sequence[bytes] = ()
    status: int = 200
    media: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    then: Then = "end"
    refuse: bool = False
    sized: bool = False  # with Content-Length


def said(value: Any, status: int = 200, **headers: str) -> Told:
    return Told([orjson.dumps(value)], status, headers={key.replace("_", "-"): one for key, one in headers.items()})


def error(status: int, message: str = "no", **headers: str) -> Told:
    return said({"error": {"message": message, "type": "t", "param": None, "code": "c"}}, status, **headers)


@dataclass(frozen=True)
class Got:
    path: str  # with the query, as it came
    headers: Mapping[str, str]
    body: bytes
    method: str = "POST"

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)


CHUNK = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "up-1"}


def chunk(content: str | None = None, **more: Any) -> dict[str, Any]:
    delta = {} if content is None else {"content": content}
    return {**CHUNK, "choices": [{"index": 0, "delta": delta, "finish_reason": None}], **more}


USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 7,
    "total_tokens": 107,
    "prompt_tokens_details": {"cached_tokens": 64},
}
CHAT = said(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "up-1",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}],
        "usage": USAGE,
        "x_unknown": {"kept": True},
    }
)


def whole_chat(text: str = "Hello", finish: str = "stop", **more: Any) -> Told:
    """An answer of one choice, with more in its message."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **more}, "finish_reason": finish}
    base = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "up-1"}
    return said({**base, "choices": [choice], "usage": USAGE, "x_unknown": {"kept": True}})


CHAT_STREAM = Told(
    [*events(chunk("Hel"), chunk("lo ✓"), {**CHUNK, "choices": [], "usage": USAGE}), b"data: [DONE]\n\n"], media=SSE
)
RESPONSE = said(
    {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": "up-1",
        "status": "completed",
        "output": [
            {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "Hello", "annotations": []}],
            }
        ],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": 50,
            "input_tokens_details": {"cached_tokens": 40},
            "output_tokens": 2,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 52,
        },
    }
)
_RESPONSE = orjson.loads(RESPONSE.pieces[0])
_AT = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
_PART = {"type": "output_text", "text": "Hello", "annotations": []}
_BEGUN = {**_RESPONSE, "status": "in_progress", "output": [], "usage": None}
_ITEM = _RESPONSE["output"][0]
_OPEN = {**_ITEM, "status": "in_progress", "content": []}
_RESPONSE_EVENTS: tuple[dict[str, Any], ...] = (
    {"type": "response.created", "response": _BEGUN},
    {"type": "response.in_progress", "response": _BEGUN},
    {"type": "response.output_item.added", "output_index": 0, "item": _OPEN},
    {"type": "response.content_part.added", **_AT, "part": {**_PART, "text": ""}},
    {"type": "response.output_text.delta", **_AT, "delta": "Hel", "logprobs": []},
    {"type": "response.output_text.delta", **_AT, "delta": "lo", "logprobs": []},
    {"type": "response.output_text.done", **_AT, "text": "Hello", "logprobs": []},
    {"type": "response.content_part.done", **_AT, "part": _PART},
    {"type": "response.output_item.done", "output_index": 0, "item": _ITEM},
    {"type": "response.completed", "response": _RESPONSE},
)
RESPONSE_STREAM = Told(
    named(*({"sequence_number": number, **told} for number, told in enumerate(_RESPONSE_EVENTS))), media=SSE
)
EMBEDDINGS = said(
    {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -1.0]}],
        "model": "up-1",
        "usage": {"prompt_tokens": 8, "total_tokens": 8},
    }
)
_MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "up-1",
    "stop_reason": None,
    "stop_sequence": None,
}
_INPUT = {"input_tokens": 12, "cache_creation_input_tokens": 20, "cache_read_input_tokens": 1400, "output_tokens": 1}
MESSAGE = said(
    {
        **_MESSAGE,
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "usage": {**_INPUT, "output_tokens": 9},
    }
)
MESSAGE_STREAM = Told(
    named(
        {"type": "message_start", "message": {**_MESSAGE, "content": [], "usage": _INPUT}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"output_tokens": 9},
        },
        {"type": "message_stop"},
    ),
    media=SSE,
)
_CONTENT = {
    "candidates": [{"content": {"role": "model", "parts": [{"text": "Hello"}]}, "finishReason": "STOP", "index": 0}],
    "usageMetadata": {
        "promptTokenCount": 90,
        "cachedContentTokenCount": 80,
        "candidatesTokenCount": 3,
        "thoughtsTokenCount": 4,
        "totalTokenCount": 97,
    },
    "modelVersion": "up-1",
}
CONTENT = said(_CONTENT)
CONTENT_STREAM = Told(events(_CONTENT), media=SSE)


@dataclass
class StubUpstream:
    """`answers` are given in turn, the last one ever after."""

    answers: list[Told]
    url: str = ""
    got: list[Got] = field(default_factory=list)
    connections: set[asyncio.BaseTransport] = field(default_factory=set)
    open: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)  # a client hung up on an answer
    reached: asyncio.Event = field(default_factory=asyncio.Event)  # an answer stalls
    blocked: asyncio.Event = field(default_factory=asyncio.Event)  # a write waits for its reader
    written: int = 0  # bytes of all answers

    def settings(self, *models: str, name: str = "up", **options: Any) -> UpstreamSettings:
        """This upstream, for a gateway."""
        url = self.url if options.get("dialect", "openai") != "openai" else f"{self.url}/v1"
        return tuned(
            UpstreamSettings, name=name, **{"url": url, "models": models or ("up-1",), "key": "sk-upstream", **options}
        )

    async def handle(self, http: web.Request) -> web.StreamResponse:
        body = await http.read()
        told = self.answers[min(len(self.got), len(self.answers) - 1)]
        self.got.append(Got(http.raw_path, http.headers.copy(), body, http.method))
        assert http.transport is not None
        self.connections.add(http.transport)
        self.open += 1
        try:
            return await self._answer(http, told)
        except (asyncio.CancelledError, ConnectionResetError):
            self.left.set()
            raise
        finally:
            self.open -= 1

    async def _answer(self, http: web.Request, told: Told) -> web.StreamResponse:
        assert http.transport is not None
        if told.refuse:
            http.transport.abort()
            return web.Response()
        response = web.StreamResponse(status=told.status, headers={"Content-Type": told.media, **told.headers})
        if told.sized:
            response.content_length = sum(map(len, told.pieces))
        if told.pieces or told.then == "end":
            await response.prepare(http)
        for piece in told.pieces:
            await self._write(response, piece)
            self.written += len(piece)
            await asyncio.sleep(0)
        if told.then == "garble":
            http.transport.write(b"zz\r\n")
        if told.then in ("stall", "garble"):
            self.reached.set()
            await asyncio.Event().wait()
        if told.then == "cut":
            http.transport.close()
            return response
        await response.write_eof()
        return response

    async def _write(self, response: web.StreamResponse, piece: bytes) -> None:
        writing = asyncio.ensure_future(response.write(piece))
        await asyncio.wait({writing}, timeout=BLOCKED_S)
        if not writing.done():
            self.blocked.set()
        await writing


@asynccontextmanager
async def upstream(*answers: Told, at: socket | None = None) -> AsyncIterator[StubUpstream]:
    """A server until the block is left. `at` is a socket that is bound already."""
    stub = StubUpstream(list(answers) or [CHAT])
    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", stub.handle)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0) if at is None else web.SockSite(runner, at)
    await site.start()
    stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield stub
    finally:
        await runner.cleanup()


def nowhere(*models: str, name: str = "nowhere", **options: Any) -> UpstreamSettings:
    """An upstream that refuses connections: nobody listens on the port of discard."""
    return UpstreamSettings(name=name, **{"url": "http://127.0.0.1:9/v1", "models": models or ("up-1",), **options})

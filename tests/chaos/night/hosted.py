"""A hosted API of three dialects, as a process, that answers wrongly when it is told to.

    python -m tests.chaos.night.hosted PORT

An answer says its number, and every tag <<tenant 1f2e>> of the prompt: whose prompt it answers. POST /wrong/WAY makes
answers wrong in one of WAYS from then on, POST /wrong/no right again.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import sys
from contextlib import suppress
from itertools import count
from typing import Any, Final

import orjson
from aiohttp import web

from tests.fakes.upstream import SSE, events, named

PROMPT_TOKENS, COMPLETION_TOKENS = 50, 7
WAYS: Final = ("noise", "html", "cut", "stall", "status", "framing", "utf8", "empty", "long")
STALL_S: Final = 20.0
TAG: Final = re.compile(rb"<<(?:north|south|east) [0-9a-f]+>>")

_numbers = count(secrets.randbits(40))  # none is given twice, whenever it was started
_wrong = ["no"]


def chat(text: str, streamed: bool) -> list[bytes]:
    base = {"id": "chatcmpl-1", "created": 1, "model": "up-1"}
    usage = {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": COMPLETION_TOKENS,
        "total_tokens": PROMPT_TOKENS + COMPLETION_TOKENS,
    }
    if not streamed:
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return [orjson.dumps({**base, "object": "chat.completion", "choices": [choice], "usage": usage})]
    base["object"] = "chat.completion.chunk"
    deltas = [({"role": "assistant", "content": text}, None), ({}, "stop")]
    chunks = [{**base, "choices": [{"index": 0, "delta": d, "finish_reason": why}]} for d, why in deltas]
    return [*events(*chunks, {**base, "choices": [], "usage": usage}), b"data: [DONE]\n\n"]


def message(text: str, streamed: bool) -> list[bytes]:
    usage = {"input_tokens": PROMPT_TOKENS, "output_tokens": COMPLETION_TOKENS}
    base: dict[str, Any] = {"id": "msg_1", "type": "message", "role": "assistant", "model": "up-2"}
    block = {"type": "text", "text": text}
    if not streamed:
        end = {"content": [block], "stop_reason": "end_turn", "stop_sequence": None, "usage": usage}
        return [orjson.dumps(base | end)]
    begun = {**base, "content": [], "stop_reason": None, "stop_sequence": None, "usage": {**usage, "output_tokens": 1}}
    delta = {"stop_reason": "end_turn", "stop_sequence": None}
    return named(
        {"type": "message_start", "message": begun},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": delta, "usage": {"output_tokens": COMPLETION_TOKENS}},
        {"type": "message_stop"},
    )


def content(text: str, streamed: bool) -> list[bytes]:
    usage = {"promptTokenCount": PROMPT_TOKENS, "candidatesTokenCount": COMPLETION_TOKENS}
    usage["totalTokenCount"] = PROMPT_TOKENS + COMPLETION_TOKENS
    candidate = {"content": {"role": "model", "parts": [{"text": text}]}, "finishReason": "STOP", "index": 0}
    made = {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "up-3"}
    return events(made) if streamed else [orjson.dumps(made)]


async def answer(http: web.Request) -> web.StreamResponse:
    body = await http.read()
    tags = " ".join(sorted({tag.decode(errors="replace") for tag in TAG.findall(body)}))
    text = f"number {next(_numbers)} for {tags}"
    gemini = "enerateContent" in http.path
    streamed = "stream" in http.path if gemini else bool(orjson.loads(body).get("stream"))
    make = content if gemini else message if http.path.endswith("/messages") else chat
    pieces, media = make(text, streamed), SSE if streamed else "application/json"
    wrong = _wrong[0]
    assert http.transport is not None
    if wrong == "status":
        return web.Response(status=500, body=b"<html>Internal Server Error</html>", content_type="text/html")
    if wrong == "html":
        return web.Response(body=b"<html>Welcome to this hotel's network</html>", content_type="text/html")
    if wrong == "empty":
        return web.Response(body=b"", content_type=media)
    if wrong == "noise":
        pieces = [bytes(range(256)) * 20]
    elif wrong == "utf8":
        pieces = [piece.replace(b"number", b"num\xff\xfeber") for piece in pieces]
    elif wrong == "long":
        pieces = [b"data: " + b"x" * (3 << 20) + b"\n\n", *pieces]
    response = web.StreamResponse(headers={"Content-Type": media})
    await response.prepare(http)
    if wrong in ("cut", "stall", "framing"):
        whole = b"".join(pieces)
        await response.write(whole[: len(whole) // 2])
        if wrong == "framing":
            http.transport.write(b"zz\r\n")
        if wrong == "stall":
            await asyncio.sleep(STALL_S)
        http.transport.close()
        return response
    with suppress(ConnectionResetError):  # a gateway that was killed meanwhile
        for piece in pieces:
            await response.write(piece)
        await response.write_eof()
    return response


async def go_wrong(http: web.Request) -> web.Response:
    _wrong[0] = http.match_info["way"]
    return web.Response()


async def main(port: int) -> None:
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/wrong/{way}", go_wrong)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))

"""Answers of a server with a small prefix cache, that publishes KV events as vLLM does."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from tests.fakes.kv_publisher import KvPublisher
from tests.fakes.lru_cache import LruCache


class CachedAnswers:
    """The handler of /v1/completions: `max_tokens` times one token, and true cached tokens."""

    def __init__(self, cache: LruCache, publisher: KvPublisher | None = None) -> None:
        self.cache, self.publisher = cache, publisher
        self.touches: list[int] = []  # cached tokens of requests of one token
        self.prefilled = 0

    async def __call__(self, http: web.Request) -> web.StreamResponse:
        body = orjson.loads(await http.read())
        if "priority" in body:
            return web.json_response({"error": {"message": "Priority scheduling is not enabled."}}, status=400)
        prompt, salt = body["prompt"], body.get("cache_salt", "")
        running = self.cache.begin(prompt, salt)
        await self._publish(prompt, salt, running.stored, running.evicted)
        self.cache.end(running)
        self.prefilled += len(prompt) - running.cached_tokens
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": running.cached_tokens}}
        choice: dict[str, Any] = {"index": 0, "text": "x", "token_ids": [44], "finish_reason": "length"}
        if not body.get("stream"):
            if body["max_tokens"] == 1 and len(prompt) > self.cache.block_size:
                self.touches.append(running.cached_tokens)
            return web.json_response({"choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        for event in ({"choices": [choice]}, {"choices": [], "usage": usage}):
            await response.write(b"data: %b\n\n" % orjson.dumps(event))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _publish(self, prompt: list[int], salt: str, stored: list[tuple[bytes, int]], gone: list[bytes]) -> None:
        size, events = self.cache.block_size, list[dict[str, Any]]()
        if gone:
            events.append({"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU"})
        keys = self.cache.keys(prompt, salt)
        for key, end in stored:
            at = end // size - 1
            event = {"type": "BlockStored", "block_hashes": [key], "parent_block_hash": keys[at - 1] if at else None}
            event |= {"token_ids": prompt[end - size : end], "block_size": size, "medium": "GPU"}
            events.append({**event, "extra_keys": [[salt]] if salt and not at else [None]})
        if events and self.publisher is not None:
            await self.publisher.publish(events)

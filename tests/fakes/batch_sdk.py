"""Batches through the real SDKs: their rows, and waiting until they have ended."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
from anthropic.types.messages import MessageBatch
from openai.types import Batch

from gateway.config import BatchSettings, FileSettings
from tests.fakes.gateway import Gateway
from tests.fakes.tuned import tuned
from tests.fakes.waiting import until

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
PARAMS: dict[str, Any] = BODY | {"max_tokens": 9}
ENDS = ("completed", "failed", "expired", "cancelled")


def settings(**more: Any) -> dict[str, Any]:
    """Of a gateway for tests, which has little to wait for."""
    return {
        "files": tuned(FileSettings, min_free_bytes=0),
        "batches": tuned(BatchSettings, **{"min_free_bytes": 0, "poll_s": 0.01, **more}),
    }


def row(custom_id: str, body: dict[str, Any] = BODY, url: str = CHAT) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def rows(*values: Any) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


async def submit(client: openai.AsyncOpenAI, *values: Any, url: str = CHAT, **more: Any) -> Batch:
    """A batch of these rows."""
    file = await client.files.create(file=("in.jsonl", rows(*values)), purpose="batch")
    asked: dict[str, Any] = {"input_file_id": file.id, "endpoint": url, "completion_window": "24h", **more}
    return await client.batches.create(**asked)


async def reached(client: openai.AsyncOpenAI, batch_id: str, *states: str, limit_s: float = 30.0) -> Batch:
    """The batch, once it is in one of these states."""
    found: list[Batch] = []

    async def look() -> bool:
        found[:] = [await client.batches.retrieve(batch_id)]
        return found[0].status in states

    await until(look, limit_s)
    return found[0]


async def content(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    """Rows of a file by their custom_id."""
    assert file_id is not None
    found = [json.loads(one) for one in (await client.files.content(file_id)).text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found}


async def ended(client: anthropic.AsyncAnthropic, batch_id: str) -> MessageBatch:
    """The message batch, once it has."""
    found: list[MessageBatch] = []

    async def look() -> bool:
        found[:] = [await client.messages.batches.retrieve(batch_id)]
        return found[0].processing_status == "ended"

    await until(look)
    return found[0]


def message(custom_id: str, **changed: Any) -> Any:
    return {"custom_id": custom_id, "params": PARAMS | changed}


async def idle(gateway: Gateway) -> None:
    """Until no line runs."""
    await until(lambda: gateway.worker.in_flight == 0)

"""A batch for a model of an upstream, with the OpenAI SDK and the command, over gateways of which one is killed."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fakes.batch_sdk import CHAT, ENDS, row, rows
from tests.fakes.redis_process import RedisProcess
from tests.fakes.server import Server, inside
from tests.fakes.upstream import CHAT as TOLD
from tests.fakes.upstream import StubUpstream, Told, error, upstream
from tests.fakes.waiting import until

PLACES = 4
LIMIT_S = 60.0
QUICK = ("--batches-lease-s", "1")


def config(stub: StubUpstream) -> str:
    lines = ["[[upstreams]]", 'name = "up"', f'url = "{stub.url}/v1"', 'key = "sk-upstream"', 'models = ["up-*"]']
    return "\n".join([*lines, f"batch_slots = {PLACES}"])


def asked(count: int) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": "Hi"}]
    return [row(f"q{n}", {"model": "up-1", "messages": messages, "seed": n}) for n in range(count)]


async def test_each_line_has_one_result_whatever_the_upstream_does_and_whoever_is_killed(
    tmp_path: Path, own_redis: RedisProcess
) -> None:
    stalling = [Told(then="stall")] * PLACES
    busy = [error(429, retry_after_ms="20"), error(500)]
    folders = ("--files-folder", str(tmp_path / "files"), "--batches-folder", str(tmp_path / "batches"))
    flags = ("--redis-url", own_redis.url, *folders, *QUICK)
    async with upstream(*stalling, *busy, TOLD) as stub:
        one = Server(tmp_path / "one", *flags, command="gateway", config=config(stub))
        async with inside(one), one.async_client() as client:
            file = await client.files.create(file=rows(*asked(20)), purpose="batch")
            made = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            await until(lambda: len(stub.got) == PLACES, LIMIT_S)
            one.process.kill()
        other = Server(tmp_path / "other", *flags, command="gateway", config=config(stub))
        async with inside(other):
            await check(other, made.id)
        assert "sk-upstream" not in "\n".join(one.lines + other.lines)
        sent = Counter(got.json["seed"] for got in stub.got)
        assert (len(sent), sent.total()) == (20, 20 + PLACES + len(busy))


async def check(server: Server, batch_id: str) -> None:
    """The batch ends with one answer for each line, and the command tells the same."""
    async with server.async_client() as client:

        async def has_ended() -> bool:
            return (await client.batches.retrieve(batch_id)).status in ENDS

        await until(has_ended, LIMIT_S)
        batch = await client.batches.retrieve(batch_id)
        assert (batch.status, batch.error_file_id) == ("completed", None)
        assert batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": 20, "completed": 20, "failed": 0}
        text = (await client.files.content(batch.output_file_id or "")).text
    told = [json.loads(one) for one in text.splitlines()]
    assert Counter(one["custom_id"] for one in told) == Counter(f"q{n}" for n in range(20))
    assert {one["response"]["body"]["choices"][0]["message"]["content"] for one in told} == {"Hello"}
    command = [sys.executable, "-m", "gateway.cli", "batch", "results", batch_id, "--url", server.url]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(LIMIT_S):
        out, _ = await process.communicate()
    assert (process.returncode, out.decode()) == (0, text)

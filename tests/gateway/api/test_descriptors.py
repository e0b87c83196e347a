"""A process with few file descriptors, asked over more connections than it may have."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest

from tests.fakes.gateway import LIMIT_S
from tests.fakes.waiting import until

ROOT = Path(__file__).parent.parent.parent.parent
FEW = 96
SERVER = f"""
import asyncio, resource, uvloop
resource.setrlimit(resource.RLIMIT_NOFILE, ({FEW}, {FEW}))
from tests.fakes.gateway import running

async def main():
    async with running() as gateway:
        print(gateway.port, flush=True)
        await asyncio.to_thread(input)

uvloop.run(main())
"""
CHAT = b'{"model":"demo","messages":[{"role":"user","content":"hi"}]}'


class Connection:
    """One that stays open. `heard` is what came on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    async def read(self, path: str) -> str:
        """The body of an answer that is 200."""
        head = await self.ask("GET", path)
        assert b" 200 " in head, head
        length = re.search(rb"content-length: (\d+)", head.lower())
        assert length is not None
        return (await self._reader.readexactly(int(length[1]))).decode()

    async def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The head of the answer."""
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        return await self._reader.readuntil(b"\r\n\r\n")

    async def heard(self) -> bytes:
        return await self._reader.read()

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


@pytest.mark.slow
async def test_connections_are_refused_before_descriptors_run_out_and_operators_have_some_left() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVER), cwd=ROOT, stdin=-1, stdout=-1, stderr=-1
    )
    assert process.stdout is not None
    assert process.stderr is not None
    async with asyncio.timeout(2 * LIMIT_S):
        port = int(await process.stdout.readline())

        async def connect() -> Connection:
            return Connection(*await asyncio.open_connection("127.0.0.1", port))

        first = await connect()
        assert b" 200 " in await first.ask("POST", "/v1/chat/completions", CHAT)
        # 1. Beyond the first watermark: only operators get an answer, and who was there before.
        held = [await connect() for _ in range(FEW // 2)]
        refused = await held[-1].ask("POST", "/v1/chat/completions", CHAT)
        assert b" 503 " in refused
        assert b"connection: close" in refused.lower()
        assert b"retry-after:" in refused.lower()
        operator, reader = await connect(), await connect()
        assert b" 200 " in await operator.ask("GET", "/health/liveness")
        assert json.loads(await reader.read("/admin/stats"))
        assert b" 200 " in await first.ask("POST", "/v1/chat/completions", CHAT)
        # 2. Beyond the second: nobody, however many come; none waits for a descriptor that there is not.
        more = [await connect() for _ in range(FEW)]
        assert (await more[-1].heard()).startswith(b"HTTP/1.1 503 ")
        assert b" 200 " in await operator.ask("GET", "/health/liveness")
        assert json.loads(await reader.read("/admin/stats"))
        refusals = re.search(
            r'malformed_requests_total\{reason="TooManyConnections"\} (\S+)', await reader.read("/metrics")
        )
        assert refusals is not None
        assert float(refusals[1]) > FEW / 2
        # 3. Once others have left, everybody is served again.
        for connection in (*held, *more):
            await connection.close()

        async def served() -> bool:
            connection = await connect()
            try:
                return b" 200 " in await connection.ask("POST", "/v1/chat/completions", CHAT)
            except (asyncio.IncompleteReadError, ConnectionError):
                return False
            finally:
                await connection.close()

        await until(served)
        for connection in (first, operator, reader):
            await connection.close()
        _, errors = await process.communicate(b"\n")
    assert process.returncode == 0
    assert b"Too many open files" not in errors
    assert b"connections are refused with 503" in errors

"""A whole Kvasir in processes of its own, for end-to-end tests: `kvasir serve` with flags, on a free port."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai

START_LIMIT_S = 120.0
STOP_LIMIT_S = 60.0
CLIENT_LIMIT_S = 60.0
WRITE_LIMIT_S = 2.0
TOLD_LINES, TOLD_REQUESTS = 40, 4
ADMIN_KEY = "admin-key-123"
"""Of servers that have keys; the others ask for none."""


class Server:
    """Context manager. `url` is known once inside; what the server printed is in `lines`.

    Every request reaches an engine, unless the flags or the config say something of the response cache.
    """

    def __init__(
        self,
        data_dir: Path,
        *flags: str,
        command: str = "serve",
        config: str | None = None,
        program: Sequence[str] = (sys.executable, "-m", "gateway.cli"),
    ) -> None:
        self.lines: list[str] = []
        self.block_tokens = 16  # of its engines' caches
        self.has_replicas = False
        self.ready_line = r"on (https?://\S+)"  # what it prints when it is up; an engine alone prints something else
        self._clients: dict[str, openai.OpenAI | anthropic.Anthropic] = {}
        self._changed = threading.Condition()
        self._said_all = False
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith("KVASIR_")}
        if "response_cache" not in (config or "") and not any("response-cache" in flag for flag in flags):
            self._environ["KVASIR_RESPONSE_CACHE_MODE"] = "off"
        self._arguments = [
            *program,
            command,
            "--port",
            "0",
            "--data-dir",
            str(data_dir),
            *flags,
        ]
        if config is not None:
            file = data_dir / "kvasir.toml"
            data_dir.mkdir(parents=True, exist_ok=True)
            file.write_text(config, encoding="utf-8")
            self._arguments += ["--config", str(file)]

    def __enter__(self) -> Server:
        self.process = subprocess.Popen(
            self._arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self._environ, bufsize=1
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            line = self.wait_for_line(self.ready_line, START_LIMIT_S)
        except BaseException:
            self.process.kill()
            self._close()
            raise
        url = re.search(self.ready_line, line)
        self.url = url[1].rstrip("/") if url and url.groups() else ""
        return self

    def __exit__(self, *exc: object) -> None:
        for client in self._clients.values():
            client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self._close()

    def _close(self) -> None:
        self.process.wait()
        self._reader.join(STOP_LIMIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def wait_for_line(self, pattern: str, limit_s: float = 30.0, *, after: int = 0) -> str:
        """The first line from index `after` on that matches. Raises TimeoutError, with everything printed so far."""
        found: list[str] = []

        def look() -> bool:
            found[:] = [line for line in self.lines[after:] if re.search(pattern, line)]
            return bool(found) or self._said_all

        with self._changed:
            self._changed.wait_for(look, limit_s)
        if not found:
            raise TimeoutError(f"no line like {pattern!r} in:\n" + "\n".join(self.lines))
        return found[0]

    def client(self, key: str = "none") -> openai.OpenAI:
        """One client per key, closed with the server. It does not try again: tests want to see the first answer."""
        found = self._clients.get(f"openai {key}")
        if not isinstance(found, openai.OpenAI):
            found = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=CLIENT_LIMIT_S)
            self._clients[f"openai {key}"] = found
        return found

    def anthropic(self, key: str = "none") -> anthropic.Anthropic:
        """As `client`, of the Anthropic API."""
        found = self._clients.get(f"anthropic {key}")
        if not isinstance(found, anthropic.Anthropic):
            found = anthropic.Anthropic(base_url=self.url, api_key=key, max_retries=0, timeout=CLIENT_LIMIT_S)
            self._clients[f"anthropic {key}"] = found
        return found

    def async_client(self, key: str = "none") -> openai.AsyncOpenAI:
        """A new one, to be closed by the caller."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=CLIENT_LIMIT_S)

    def get(self, path: str, key: str | None = None) -> Any:
        """A GET's body: parsed when it is JSON, as text otherwise."""
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {key}"} if key else {})
        with urllib.request.urlopen(request, timeout=30) as answer:
            body = answer.read().decode()
            return json.loads(body) if "json" in answer.headers["content-type"] else body

    def tell(self) -> str:
        """Of a failed test: what it printed last, and the lives of the latest requests, which it has written by now or
        never will."""
        threading.Event().wait(WRITE_LIMIT_S)
        told = self.lines[-TOLD_LINES:]
        try:
            rows = self.get(f"/admin/requests?limit={TOLD_REQUESTS}", ADMIN_KEY)["requests"]
            told += [json.dumps(self.get(f"/admin/requests/{row['row']}", ADMIN_KEY)) for row in rows]
        except (OSError, ValueError, KeyError, TypeError) as error:
            told.append(f"no requests: {error!r}")
        return "\n".join(told)

    def children(self, *names: str) -> list[int]:
        """Process ids of our direct children whose command line contains one of `names`."""
        pids = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in pids if any(name in Path(f"/proc/{pid}/cmdline").read_text() for name in names)]

    def wait_until(self, holds: Callable[[], bool], what: str, limit_s: float = 30.0) -> None:
        """Asks again and again, for what the server shows only when asked."""
        waiting = threading.Event()
        for _ in range(int(limit_s / 0.05)):
            if holds():
                return
            waiting.wait(0.05)
        raise TimeoutError(f"{what}: not so after {limit_s} s; the server printed:\n" + "\n".join(self.lines))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._said_all = True
            self._changed.notify_all()


@asynccontextmanager
async def inside(server: Server) -> AsyncIterator[None]:
    """While it starts and stops, this process answers as its upstream."""
    await asyncio.to_thread(server.__enter__)
    try:
        yield
    finally:
        await asyncio.to_thread(server.__exit__, None, None, None)

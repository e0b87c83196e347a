"""A real vLLM on a free port, from the environment that tests/bench/vllm_setup.py makes, and a tap in front of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from tests.fakes.ports import free_port
from tests.fakes.waiting import until

FOLDER = Path.home() / ".cache/kvasir/vllm"
EAGER = ("--enforce-eager",)
"""Of tests: compiling the demo model takes half of a start."""

HOW = "python -m tests.bench.vllm_setup sets up vLLM for the CPU in an environment of its own (about 3.5 GB)"
MODEL = Path(__file__).parent.parent.parent / "engine/demo/model"
START_LIMIT_S = 300.0
LOG_CHARS = 4000
STOP_LIMIT_S = 30.0


def installed() -> bool:
    return (FOLDER / "kvasir-complete").is_file()


class Vllm:
    """A vLLM that a test stops, kills and starts again in its place. Context manager: inside, its process was started,
    and `wait_ready` says when it answers. Serves the demo model as `name`.

    dtype        on a processor without AVX-512, float32 is seven times faster than bfloat16
    port         where it listens; a free one when None
    events       ports of KV events and of their replay; None publishes none
    cache_blocks of its KV cache, of 128 tokens, so that blocks are evicted soon; those of 1 GiB when None
    arguments    more of `vllm serve`
    """

    def __init__(
        self,
        log: Path,
        name: str,
        *,
        model: Path = MODEL,
        dtype: str = "bfloat16",
        port: int | None = None,
        events: tuple[int, int] | None = None,
        cache_blocks: int | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        port = free_port() if port is None else port
        command = [str(FOLDER / "bin/python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", name, "--port", str(port), "--host", "127.0.0.1", "--max-model-len", "2048"]
        command += ["--dtype", dtype, "--enable-prefix-caching", "--enable-prompt-tokens-details"]
        command += ["--max-num-seqs", "8", *arguments]
        if events is not None:
            config = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv"}
            config |= {"endpoint": f"tcp://*:{events[0]}", "replay_endpoint": f"tcp://*:{events[1]}"}
            command += ["--kv-events-config", json.dumps(config)]
        if cache_blocks is not None:  # on a CPU, --kv-cache-memory-bytes is not looked at
            command += ["--num-gpu-blocks-override", str(cache_blocks)]
        self.url = f"http://127.0.0.1:{port}"
        self._command, self._log = command, log

    def __enter__(self) -> Vllm:
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            error.add_note(f"{self._log}:\n{self._log.read_text(errors='replace')[-LOG_CHARS:]}")
        self._process.terminate()
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()  # its engine is a process of its own, and may be left

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def start(self) -> None:
        environ = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        environ.pop("PYTHONPATH", None)
        with self._log.open("a") as out:
            self._process = subprocess.Popen(
                self._command, stdout=out, stderr=subprocess.STDOUT, env=environ, start_new_session=True
            )

    def kill(self) -> None:
        """All of its processes, as a crash of the machine would."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """None of its processes does anything inside."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


@contextmanager
def vllm(log: Path, name: str, **options: Any) -> Iterator[str]:
    """Its URL. `options` of Vllm."""
    with Vllm(log, name, **options) as running:
        yield running.url


async def wait_ready(url: str) -> None:
    """Raises TimeoutError when it does not answer within START_LIMIT_S."""

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    await until(answers, START_LIMIT_S)


@asynccontextmanager
async def tap(url: str) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that passes everything on, and what it answered: the bytes of each body."""
    bodies: list[bytes] = []

    async def handle(http: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in http.headers.items() if name.lower() != "host"}
        async with session.request(http.method, url + http.path_qs, data=await http.read(), headers=headers) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(http)
            number = len(bodies)
            bodies.append(b"")
            async for piece in answer.content.iter_any():
                bodies[number] += piece
                await response.write(piece)
            await response.write_eof()
            return response

    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}", bodies
        finally:
            await runner.cleanup()

"""A `vllm` for a PATH of a test's own: `vllm serve MODEL --port ...` is a fake server that generates three tokens.

With "--die WORDS" it writes WORDS to stderr and ends, as a vLLM that cannot load its model. Its process ids and
arguments are appended to the file of the environment variable NOTES.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from itertools import pairwise
from pathlib import Path

import orjson
from aiohttp import web

from tests.fakes.replica_server import ReplicaServer

ROOT = Path(__file__).parent.parent.parent
TOKENS = [44, 71, 71]


def put_on_path(folder: Path) -> str:
    """The PATH whose `vllm` this is."""
    folder.mkdir(exist_ok=True)
    command = folder / "vllm"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m tests.fakes.vllm_command "$@"\n')
    command.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def is_running(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


async def complete(http: web.Request) -> web.StreamResponse:
    body = orjson.loads(await http.read())
    usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": {"cached_tokens": 0}}
    choices = [{"index": 0, "text": "x", "token_ids": TOKENS, "finish_reason": "length"}]
    if not body.get("stream"):
        return web.json_response({"choices": choices, "usage": usage})
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(http)
    await response.write(b"data: %b\n\n" % orjson.dumps({"choices": choices}))
    await response.write(b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps({"choices": [], "usage": usage}))
    return response


async def serve(arguments: list[str]) -> None:
    said = dict(pairwise(arguments))
    server = ReplicaServer(model=said["--served-model-name"], root=arguments[1], events_port=None, replay_port=None)
    server.completions, server.key = complete, os.environ["VLLM_API_KEY"]
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, said["--host"], int(said["--port"])).start()
    print("INFO: Application startup complete.", flush=True)
    await stop.wait()
    await runner.cleanup()


def main() -> None:
    arguments = sys.argv[1:]
    if notes := os.environ.get("NOTES"):
        with Path(notes).open("ab") as file:
            file.write(orjson.dumps({"pid": os.getpid(), "arguments": arguments}) + b"\n")
    if "--die" in arguments:
        print("INFO: loading", flush=True)
        sys.exit(arguments[arguments.index("--die") + 1])
    asyncio.run(serve(arguments))


if __name__ == "__main__":
    main()

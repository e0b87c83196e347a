"""Two real vLLM with the demo model behind two gateways on one Redis: what a fleet is, at its smallest."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.fakes import vllm_server
from tests.fakes.ports import free_ports
from tests.fakes.redis_process import RedisProcess
from tests.fakes.server import Server

MARKS = [pytest.mark.slow, pytest.mark.skipif(not vllm_server.installed(), reason=vllm_server.HOW)]
"""Of tests that start them."""

BLOCK_TOKENS = 32
"""The smallest that vLLM's attention on a CPU takes: twice ours."""

GRAMMARS = '{"backend": "guidance"}'
"""The backend of vLLM that takes every grammar of ours, Lark among them."""

DEMO = ("--dtype", "float32", "--kv-cache-bytes")
"""Of a bundled engine that has the same answers; the bytes follow."""

JOIN_LIMIT_S = 60.0


class Replicas(NamedTuple):
    """Real vLLM servers that answer."""

    servers: tuple[vllm_server.Vllm, ...]

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(one.url for one in self.servers)

    @property
    def flags(self) -> list[str]:
        """That a gateway uses them with."""
        return [part for number, url in enumerate(self.urls) for part in ("--replica", f"vllm:engine-{number}={url}")]


def chat_tokenizer(folder: Path) -> Path:
    """The demo model's files of its tokeniser, whose `eos_token` ends a turn as that of any chat model does: vLLM lets
    what is under a grammar end with no other token."""
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        shutil.copyfile(vllm_server.MODEL / name, folder / name)
    settings = json.loads((vllm_server.MODEL / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<|im_end|>"}))
    return folder


@contextmanager
def replicas(
    folder: Path, count: int = 2, *, blocks: int = 1024, arguments: Sequence[str] = vllm_server.EAGER
) -> Iterator[Replicas]:
    """`count` servers, each with a cache of `blocks` blocks."""
    tokenizer = chat_tokenizer(folder / "tokenizer")
    with ExitStack() as stack:
        servers = tuple(
            stack.enter_context(
                vllm_server.Vllm(
                    folder / f"vllm-{number}.log",
                    "demo",
                    dtype="float32",
                    events=(ports[0], ports[1]),
                    cache_blocks=blocks,
                    arguments=(
                        *("--tokenizer", str(tokenizer), "--block-size", str(BLOCK_TOKENS)),
                        *("--structured-outputs-config", GRAMMARS, *arguments),
                    ),
                )
            )
            for number in range(count)
            for ports in [free_ports(2)]
        )
        for one in servers:
            asyncio.run(vllm_server.wait_ready(one.url))
        yield Replicas(servers)


@contextmanager
def gateways(folder: Path, behind: Replicas, *flags: str, config: str | None = None) -> Iterator[tuple[Server, Server]]:
    """Two gateways that have joined all of them, on a Redis of their own."""
    with RedisProcess(folder) as redis, ExitStack() as stack:
        # Two vLLM on two cores keep a gateway from its answers for longer than it waits for Redis by default.
        shared = (*behind.flags, "--redis-url", redis.url, "--redis-timeout-s", "10", *flags)
        one, other = (
            stack.enter_context(Server(folder / name, *shared, command="gateway", config=config))
            for name in ("one", "other")
        )
        for server in (one, other):
            server.block_tokens, server.has_replicas = BLOCK_TOKENS, True
            for number in range(len(behind.urls)):
                server.wait_for_line(f"engine engine-{number} joined", JOIN_LIMIT_S)
        yield one, other


@contextmanager
def serving(
    folder: Path, behind: Replicas | None, *flags: str, engine: Sequence[str] = (), config: str | None = None
) -> Iterator[tuple[Server, ...]]:
    """One `kvasir serve` with the demo model, or two gateways with replicas. `engine`: flags of the bundled one."""
    if behind is None:
        with Server(folder, *flags, *engine, config=config) as running:
            yield (running,)
    else:
        with gateways(folder, behind, *flags, config=config) as pair:
            yield pair

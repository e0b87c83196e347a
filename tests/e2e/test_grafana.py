"""A real Prometheus scrapes a `kvasir serve` under load of all kinds: every query of the Grafana dashboard returns
something. `.ci/debian.sh` installs Prometheus; else it is skipped.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import aiohttp
import pytest

from tests.fakes import demo_traffic
from tests.fakes.ports import free_ports
from tests.fakes.replica_process import ReplicaProcess
from tests.fakes.server import Server, inside
from tests.fakes.upstream import upstream, whole_chat
from tests.fakes.waiting import until

PROMETHEUS = shutil.which("prometheus")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not there; .ci/debian.sh installs it"),
]

DASHBOARD = Path(__file__).parents[2] / "deploy/grafana/kvasir.json"
SMALL = ("--kv-cache-bytes", str(64 << 20), "--dtype", "float32")
RANGE = "30s"
"""In place of the one that Grafana takes for the width of a panel."""
LIMIT_S = 240.0
TIGHT_KEY = "tight-key-123456"
CONFIG = f"""
{demo_traffic.CONFIG}
[slo]
first_token_ms = 60000
inter_token_ms = 60000
[[tenants]]
name = "tight"
keys = ["{TIGHT_KEY}"]
requests_per_minute = 1
[[upstreams]]
name = "away"
url = "http://127.0.0.1:9/v1"
models = ["away-1"]
key = "sk-upstream"
"""


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """The URL of one that asks this gateway every second."""
    (port,) = free_ports(1)
    scrape = {"job_name": "kvasir", "static_configs": [{"targets": [target]}]}
    file = folder / "prometheus.json"  # JSON is YAML
    file.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}))
    address = f"127.0.0.1:{port}"
    command = [str(PROMETHEUS), f"--config.file={file}", f"--storage.tsdb.path={folder / 'series'}"]
    with subprocess.Popen(
        [*command, f"--web.listen-address={address}", "--log.level=error"], stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield f"http://{address}"
        finally:
            process.kill()


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[Server]:
    """With an engine, a replica, an upstream that answers and one that is away."""
    ports = free_ports(3)
    with ReplicaProcess((ports[0], ports[1], ports[2])) as replica:
        async with upstream(whole_chat()) as stub:
            up = f'[[upstreams]]\nname = "up"\nurl = "{stub.url}/v1"\nmodels = ["up-1"]\nkey = "sk-upstream"\n'
            flags = (*SMALL, "--replica", f"vllm:r0={replica.url}")
            server = Server(folder / "data", *flags, config=CONFIG + up)
            async with inside(server):
                await asyncio.to_thread(server.wait_for_line, "engine r0 joined", LIMIT_S)
                yield server


async def others(url: str, over: asyncio.Event) -> None:
    """What the traffic of the demo has none of: upstreams, a limit that is reached."""
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(LIMIT_S)) as session:
        while not over.is_set():
            for key, model in (("atlas-key-123", "up-1"), ("atlas-key-123", "away-1"), (TIGHT_KEY, "demo")):
                body = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": "Hi."}]}
                headers = {"Authorization": f"Bearer {key}"}
                async with session.post("/v1/chat/completions", json=body, headers=headers) as answer:
                    await answer.read()
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), 0.5)


async def numbers(session: aiohttp.ClientSession, query: str) -> list[float]:
    """That a query returns now, without those that are none, as of a division by nothing."""
    try:
        async with session.get("/api/v1/query", params={"query": query}) as answer:
            if answer.status == 503:  # it starts
                return []
            found = await answer.json()
    except aiohttp.ClientConnectionError:  # it has only just begun to
        return []
    assert found["status"] == "success", (query, found)
    values = [float(sample["value"][1]) for sample in found["data"]["result"]]
    return [value for value in values if not math.isnan(value)]


async def test_every_query_of_the_dashboard_returns_something(tmp_path: Path) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(queries) >= 30
    left, over = {query.replace("$__rate_interval", RANGE) for query in queries}, asyncio.Event()
    async with served(tmp_path) as server:
        await demo_traffic.batch(server.url, 3)
        with prometheus(tmp_path, server.url.removeprefix("http://")) as url:
            async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(LIMIT_S)) as session:

                async def all_answered() -> bool:
                    for query in sorted(left):
                        if await numbers(session, query):
                            left.discard(query)
                    return not left

                async with asyncio.TaskGroup() as group:
                    group.create_task(demo_traffic.load(server.url, over))
                    group.create_task(others(server.url, over))
                    try:
                        with suppress(TimeoutError):
                            await until(all_answered, LIMIT_S)
                    finally:
                        over.set()
                assert not left
                by_hit = "sum by (hit) (kvasir_first_token_seconds_count) > 0"
                assert len(await numbers(session, by_hit)) >= 3

"""The index of a real vLLM, by its KV events, against the cached tokens that vLLM itself reports."""

from __future__ import annotations

import random
import struct
import time
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from engine.protocol import Namespace, chain_digests
from gateway.config import ReplicaSettings
from gateway.index.memory_index import MemoryIndex
from gateway.replicas.calls import open_session
from gateway.replicas.follower import Follower
from gateway.replicas.servers import find_facts
from tests.fakes import vllm_server
from tests.fakes.fake_engine import make_hello
from tests.fakes.ports import free_ports
from tests.fakes.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not vllm_server.installed(), reason=vllm_server.HOW)]

CACHE_BLOCKS = 96
SPACE = Namespace(weights="demo@1", dtype="", kv_dtype="", block_size=16)


class Replica:
    """A follower of the server, and requests to it."""

    def __init__(self, session: aiohttp.ClientSession, follower: Follower, index: MemoryIndex, block_size: int) -> None:
        self.session = session
        self.follower = follower
        self.index = index
        self.block_size = block_size

    async def predict(self, prompt: list[int], salt: str) -> int:
        """Cached tokens by the index, once it is known to have all events."""
        asked_s = time.monotonic()
        await until(lambda: self.follower.trust == "exact" and self._known_s() > asked_s)
        root, packed = replace(SPACE, salt=salt).root(), struct.pack(f"<{len(prompt)}I", *prompt)
        held = self.index.prefix("r", chain_digests(root, packed, SPACE.block_size)) * SPACE.block_size
        return min(held, len(prompt) - 1) // self.block_size * self.block_size

    def _known_s(self) -> float:
        return time.monotonic() - float(self.follower.figures()["lag_s"])

    async def send(self, prompt: list[int], salt: str) -> int:
        """Cached tokens as reported."""
        body = {"model": "demo", "prompt": prompt, "max_tokens": 1, "cache_salt": salt}
        async with self.session.post("v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            usage = (await answer.json())["usage"]
        return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


async def test_the_index_predicts_what_vllm_reports_and_survives_its_restart(tmp_path: Path) -> None:
    (port, *events) = free_ports(3)
    more = {
        "dtype": "float32",
        "port": port,
        "events": tuple(events),
        "cache_blocks": CACHE_BLOCKS,
        "arguments": vllm_server.EAGER,
    }
    own = ReplicaSettings.model_validate({"name": "r", "kind": "vllm", "url": f"http://127.0.0.1:{port}"})
    chance = random.Random(16)
    prompts = [[chance.randrange(1000, 4000) for _ in range(chance.randint(200, 1500))] for _ in range(6)]
    noise = [[chance.randrange(1000, 4000) for _ in range(1024)] for _ in range(24)]
    async with open_session(own, None) as session:
        with vllm_server.vllm(tmp_path / "1.log", "demo", **more) as url:
            await vllm_server.wait_ready(url)
            facts = await find_facts(session, own)
            index = MemoryIndex()
            hello = make_hello(incarnation="r", namespace=SPACE, num_blocks=facts.num_blocks * facts.block_size // 16)
            follower = Follower(hello, facts.sources[0], index.apply)
            follower.start()
            replica = Replica(session, follower, index, facts.block_size)
            cached = 0
            for salt in ("one", "two"):
                for prompt in [*prompts, *prompts]:
                    predicted = await replica.predict(prompt, salt)
                    reported = await replica.send(prompt, salt)
                    assert predicted == reported
                    cached += reported
            assert cached > 2000
            for prompt in noise:
                await replica.send(prompt, "three")
            assert follower.figures()["removed_blocks"] > 0
            misses = 0
            for prompt in prompts:
                predicted = await replica.predict(prompt, "two")
                assert predicted == await replica.send(prompt, "two")
                misses += not predicted
            assert misses > 0
        await until(lambda: follower.trust == "degraded")
        with vllm_server.vllm(tmp_path / "2.log", "demo", **more) as url:
            await vllm_server.wait_ready(url)
            await until(lambda: follower.trust == "exact" and index.blocks("r") == 0, 10)
            for prompt in [*prompts[:2], *prompts[:2]]:
                assert await replica.predict(prompt, "one") == await replica.send(prompt, "one")
        await follower.stop()

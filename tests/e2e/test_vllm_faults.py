"""Faults of two real vLLM behind two gateways. Slow, and skipped where vLLM is not installed. What clients get is
compared with vLLM's own answers, and the index with the cached tokens that it reports."""

from __future__ import annotations

import asyncio
import hmac
import json
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import redis.asyncio

from engine.protocol import blocks_key, chain_digests, split_digests
from gateway.digests import derived_salt
from gateway.replicas.secret import KEY
from gateway.types import ANONYMOUS, Tenant
from tests.e2e.test_fleet_faults import ANSWER_S, INDEX_S, TOKENS, Fleet, joined_again
from tests.fakes import vllm_fleet
from tests.fakes.kv_publisher import BLOCK
from tests.fakes.redis_process import RedisProcess
from tests.fakes.replica_process import SPACE, ReplicaProcess
from tests.fakes.server import Server
from tests.fakes.vllm_fleet import BLOCK_TOKENS, Replicas
from tests.fakes.vllm_server import MODEL, Vllm, wait_ready
from tests.fakes.waiting import until

pytestmark = vllm_fleet.MARKS


class RealFleet(Fleet):
    """Two vLLM. What they have to answer is asked of the second before, under a salt that nothing else has."""

    def __init__(self, store: RedisProcess, replicas: Sequence[Vllm], gateways: Sequence[Server]) -> None:
        super().__init__(store, replicas, gateways)
        self._known: list[tuple[list[int], str]] = []
        self._sent: list[list[int]] = []

    async def learn(self, count: int = 12, tokens: int = TOKENS) -> list[tuple[list[int], str]]:
        """From now on clients ask with `count` prompts that no cache has under their salt. Returns them and the
        answers."""
        prompts = [self._ids(self._random.randint(160, 240)) for _ in range(count)]
        async with aiohttp.ClientSession() as session:
            answers = await asyncio.gather(
                *(self._directly(session, self.replicas[1], prompt, "apart", tokens) for prompt in prompts)
            )
        self._known = [(prompt, answer["choices"][0]["text"]) for prompt, answer in zip(prompts, answers, strict=True)]
        self._sent += prompts
        return self._known

    def _draw(self) -> tuple[list[int], str]:
        return self._random.choice(self._known)

    @staticmethod
    async def _directly(
        session: aiohttp.ClientSession, replica: ReplicaProcess | Vllm, prompt: list[int], salt: str, tokens: int
    ) -> Any:
        body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "cache_salt": salt}
        async with session.post(f"{replica.url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def index_is_cached(self) -> None:
        """INDEX_S from now, the index in Redis has of every prompt what each vLLM then reports as cached. Raises
        AssertionError. Nothing may be sent meanwhile."""
        clock = asyncio.get_running_loop().time
        end_s = clock() + INDEX_S
        await until(lambda: clock() > end_s, 2 * INDEX_S)
        async with aiohttp.ClientSession() as session, redis.asyncio.Redis.from_url(self.store.url) as client:
            secret = hmac.digest(await client.get(KEY), b"demo", "sha256").hex()
            salt = derived_salt(secret, Tenant(ANONYMOUS).salt)
            root = replace(SPACE, weights=f"{MODEL.name}@", salt=salt).root()
            async with session.get(f"{self.gateways[0].url}/admin/stats") as page:
                engines = {one["url"].rstrip("/"): one for one in (await page.json())["engines"]}
            for replica in self.replicas:
                engine = engines[replica.url]
                assert engine["state"] == "ready"
                held = set(await client.hkeys(blocks_key("demo", engine["incarnation"])))
                predicted, reported = [], []
                for prompt in self._sent:
                    chain = split_digests(chain_digests(root, struct.pack(f"<{len(prompt)}I", *prompt), BLOCK))
                    blocks = next((index for index, digest in enumerate(chain) if digest not in held), len(chain))
                    predicted.append(min(blocks * BLOCK, len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
                    usage = (await self._directly(session, replica, prompt, salt, 1))["usage"]
                    reported.append((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)
                assert predicted == reported
                assert any(predicted)


@asynccontextmanager
async def real_fleet(folder: Path, vllms: Replicas) -> AsyncIterator[RealFleet]:
    with vllm_fleet.gateways(folder, vllms) as pair:
        fleet = RealFleet(RedisProcess(folder), vllms.servers, pair)
        await fleet.learn()
        yield fleet


async def test_a_real_vllm_that_is_stopped_for_thirty_seconds_costs_no_answer(tmp_path: Path, vllms: Replicas) -> None:
    clock = asyncio.get_running_loop().time
    async with real_fleet(tmp_path, vllms) as fleet:
        async with fleet.load(6):
            lines = [len(gateway.lines) for gateway in fleet.gateways]
            with vllms.servers[0].stopped():
                end_s, answers = clock() + 30.0, fleet.answers
                await until(lambda: fleet.answers > answers + 6, ANSWER_S)
                await until(lambda: clock() > end_s, ANSWER_S)
            await joined_again(fleet, "engine-0", lines)
            fleet.engines.clear()
            await fleet.learn()
        assert fleet.engines == {"engine-0", "engine-1"}
        await fleet.index_is_cached()


async def test_a_real_vllm_killed_in_the_middle_of_a_stream_loses_no_token(tmp_path: Path, vllms: Replicas) -> None:
    async with real_fleet(tmp_path, vllms) as fleet, aiohttp.ClientSession() as session:
        prompt, right = max(await fleet.learn(4, 300), key=lambda one: len(one[1]))
        await fleet.learn()
        body = {"model": "demo", "prompt": prompt, "max_tokens": 300, "temperature": 0, "stream": True}
        lines = [len(gateway.lines) for gateway in fleet.gateways]
        async with fleet.load(6), session.post(f"{fleet.gateways[0].url}/v1/completions", json=body) as stream:
            name = stream.headers["x-kvasir-engine"]
            victim = vllms.servers[int(name[-1])]
            text = ""
            async for line in stream.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    text += "".join(choice["text"] for choice in event["choices"])
                    if victim.running and len(text) > 60:
                        victim.kill()
                        assert len(text) < len(right) / 2
            assert line == b"\n"
            assert text == right
            assert not victim.running
            answers = fleet.answers
            await until(lambda: fleet.answers > answers + 6, ANSWER_S)
        victim.start()
        await wait_ready(victim.url)
        await joined_again(fleet, name, lines)
        fleet.engines.clear()
        await fleet.learn()
        async with fleet.load(6):
            pass
        assert fleet.engines == {"engine-0", "engine-1"}
        await fleet.index_is_cached()

"""Faults of a fleet: two replicas behind two gateways on one Redis, and what is killed or stopped while requests run.

After each: every answer is the one of the model itself for the same ids, none is missing, and the index in Redis is
what the replicas hold. Requests are sent again to the other gateway only when the one that had them was killed.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis.asyncio
from tokenizers import Tokenizer

from engine.protocol import blocks_key
from engine.publish import VERSION_FIELD
from tests.fakes.ports import free_ports
from tests.fakes.redis_process import RedisProcess
from tests.fakes.replica_process import WORDS, ReplicaProcess, next_token, stopped
from tests.fakes.replica_server import DEMO
from tests.fakes.server import Server
from tests.fakes.vllm_server import Vllm
from tests.fakes.waiting import until

TOKENS = 30
CLIENTS = 6
JOIN_S = 60.0
INDEX_S = 10.0
ANSWER_S = 60.0
TEXTS = Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def expected(prompt: list[int]) -> str:
    """What the model says to it."""
    tokens = list(prompt)
    for _ in range(TOKENS):
        tokens.append(next_token(tokens))
    return str(TEXTS.decode(tokens[len(prompt) :], skip_special_tokens=False))


class Fleet:
    """Two of each."""

    def __init__(
        self, store: RedisProcess, replicas: Sequence[ReplicaProcess | Vllm], gateways: Sequence[Server]
    ) -> None:
        self.store, self.replicas, self.gateways = store, replicas, gateways
        self.killed: set[str] = set()  # URLs of gateways whose requests may be cut
        self.engines: set[str] = set()  # that answered
        self.answers = 0
        self._random = random.Random(16)
        self.ask_anew()

    def ask_anew(self) -> None:
        """From now on with prompts that no cache has, which go to both replicas."""
        self._heads = [self._ids(160) for _ in range(8)]

    def _ids(self, count: int) -> list[int]:
        return [self._random.choice(WORDS) for _ in range(count)]

    @asynccontextmanager
    async def load(self, least: int = 30) -> AsyncIterator[None]:
        """Clients that ask all the time inside, and at least `least` times behind a fault. Raises AssertionError for a
        wrong answer, or for none."""
        ending = False

        async def client(number: int) -> None:
            while not (ending and self.answers >= goal):
                await self._ask(session, number)

        goal = least
        limit = aiohttp.ClientTimeout(ANSWER_S)
        async with aiohttp.ClientSession(timeout=limit) as session, asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(client(number))
            await until(lambda: self.answers >= least, ANSWER_S)
            yield
            goal, ending = self.answers + least, True

    def _draw(self) -> tuple[list[int], str]:
        """A prompt, and what is to be answered."""
        prompt = self._random.choice(self._heads) + self._ids(self._random.randint(1, 80))
        return prompt, expected(prompt)

    async def _ask(self, session: aiohttp.ClientSession, number: int) -> None:
        prompt, right = self._draw()
        streamed = number % 2 == 0
        body = {"model": "demo", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": streamed}
        url = self.gateways[number % len(self.gateways)].url
        try:
            text = await self._answer(session, url, body)
        except (aiohttp.ClientError, ConnectionError):
            if url not in self.killed:
                raise
            other = next(one.url for one in self.gateways if one.url not in self.killed)
            text = await self._answer(session, other, body)
        assert text == right
        self.answers += 1

    async def _answer(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> str:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            self.engines.add(answer.headers["x-kvasir-engine"])
            if not body["stream"]:
                return str((await answer.json())["choices"][0]["text"])
            text, ended = "", False
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    text += "".join(choice["text"] for choice in event["choices"])
                ended = ended or line.startswith(b"data: [DONE]")
            if not ended:
                raise ConnectionError("the stream was cut")
            return text

    async def index_is_equal(
        self, replicas: Sequence[ReplicaProcess | Vllm], *, via: int = 0, limit_s: float = INDEX_S
    ) -> None:
        """Waits until the index of these in Redis is what they hold. Nothing may be sent meanwhile."""
        async with aiohttp.ClientSession() as session, redis.asyncio.Redis.from_url(self.store.url) as client:

            async def equal() -> bool:
                async with session.get(f"{self.gateways[via].url}/admin/stats") as page:
                    engines = {one["url"].rstrip("/"): one for one in (await page.json())["engines"]}
                for replica in replicas:
                    async with session.get(f"{replica.url}/resident") as page:
                        held = {bytes.fromhex(name) for name in await page.json()}
                    engine = engines[replica.url]
                    if engine["state"] != "ready":
                        return False
                    try:
                        fields = await client.hkeys(blocks_key("demo", engine["incarnation"]))
                    except redis.RedisError:
                        return False
                    if set(fields) - {VERSION_FIELD} != held:
                        return False
                return True

            await until(equal, limit_s)


@contextmanager
def two_of_each(folder: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        store = stack.enter_context(RedisProcess(folder))
        ports = free_ports(6)
        replicas = [
            stack.enter_context(ReplicaProcess((ports[at], ports[at + 1], ports[at + 2]), blocks=160)) for at in (0, 3)
        ]
        flags = [part for number, one in enumerate(replicas) for part in ("--replica", f"vllm:r{number}={one.url}")]
        flags += ["--redis-url", store.url]
        gateways = [stack.enter_context(Server(folder / name, *flags, command="gateway")) for name in ("one", "two")]
        for gateway in gateways:
            for number in range(2):
                gateway.wait_for_line(f"engine r{number} joined", JOIN_S)
        yield Fleet(store, replicas, gateways)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with two_of_each(tmp_path) as running:
        yield running


async def joined_again(fleet: Fleet, name: str, after: list[int]) -> None:
    for gateway, line in zip(fleet.gateways, after, strict=True):
        await asyncio.to_thread(gateway.wait_for_line, f"engine {name} joined", JOIN_S, after=line)


@pytest.mark.slow
async def test_a_replica_killed_and_started_in_its_place_costs_no_answer(fleet: Fleet) -> None:
    async with fleet.load():
        lines = [len(gateway.lines) for gateway in fleet.gateways]
        fleet.replicas[0].kill()
        answers = fleet.answers
        await until(lambda: fleet.answers > answers + 20)
        fleet.replicas[0].start()
        await joined_again(fleet, "r0", lines)
        fleet.engines.clear()
        fleet.ask_anew()
    assert fleet.engines == {"r0", "r1"}
    await fleet.index_is_equal(fleet.replicas)


@pytest.mark.slow
async def test_a_redis_killed_and_started_empty_costs_no_answer(fleet: Fleet) -> None:
    async with fleet.load():
        fleet.store.kill()
        answers = fleet.answers
        await until(lambda: fleet.answers > answers + 20)
        await asyncio.to_thread(fleet.store.start)
    await fleet.index_is_equal(fleet.replicas)


@pytest.mark.slow
async def test_a_gateway_killed_that_follows_the_streams_is_replaced_by_the_other(fleet: Fleet) -> None:
    async with fleet.load():
        held = {
            gateway.url: sum(
                one["replica"]["index"]["holder"]
                for one in (await asyncio.to_thread(gateway.get, "/admin/stats"))["engines"]
            )
            for gateway in fleet.gateways
        }
        assert sum(held.values()) == 2
        victim = max(fleet.gateways, key=lambda gateway: held[gateway.url])
        other = next(gateway for gateway in fleet.gateways if gateway is not victim)
        fleet.killed.add(victim.url)
        victim.process.kill()
        answers = fleet.answers
        await until(lambda: fleet.answers > answers + 20)
    await fleet.index_is_equal(fleet.replicas, via=fleet.gateways.index(other))


@pytest.mark.slow
async def test_a_replica_that_is_stopped_for_thirty_seconds_costs_no_answer(fleet: Fleet) -> None:
    async with fleet.load():
        lines = [len(gateway.lines) for gateway in fleet.gateways]
        with stopped(fleet.replicas[0].process):
            began_s = asyncio.get_running_loop().time()
            answers = fleet.answers
            await until(lambda: fleet.answers > answers + 20, ANSWER_S)
            await until(lambda: asyncio.get_running_loop().time() > began_s + 30.0, ANSWER_S)
        await joined_again(fleet, "r0", lines)
        fleet.ask_anew()
    await fleet.index_is_equal(fleet.replicas)


async def test_a_replica_with_another_template_answers_to_its_own_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    for file in DEMO.iterdir():
        if file.name == "chat_template.jinja":
            (folder / file.name).write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
        elif file.suffix != ".safetensors":
            shutil.copyfile(file, folder / file.name)
    one, other = (free_ports(3) for _ in range(2))
    with (
        ReplicaProcess((one[0], one[1], one[2])) as plain,
        ReplicaProcess((other[0], other[1], other[2]), tokenizer=folder) as strange,
        Server(tmp_path / "one", "--replica", f"vllm:r0={plain.url}", command="gateway") as straight,
        Server(tmp_path / "two", "--replica", f"vllm:r1={strange.url}", command="gateway") as crooked,
    ):
        prompts = []
        messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
        for server, name, replica in ((straight, "r0", plain), (crooked, "r1", strange)):
            await asyncio.to_thread(server.wait_for_line, f"engine {name} joined", JOIN_S)
            async with server.async_client() as client, aiohttp.ClientSession(replica.url) as session:
                answer = await client.chat.completions.create(
                    model="demo", messages=messages, max_tokens=TOKENS, temperature=0
                )
                async with session.post("/tokenize", json={"model": "demo", "messages": messages}) as rendered:
                    prompts.append((await rendered.json())["tokens"])
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == len(prompts[-1])
            assert answer.choices[0].message.content == expected(prompts[-1])
        assert prompts[0] != prompts[1]

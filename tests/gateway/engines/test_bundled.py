"""The client of one engine, against an engine that does as the test says, and against the real server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest

from engine.protocol import (
    BlockEvents,
    Hello,
    Load,
    Sampling,
    SequenceUpdate,
    StepFrame,
    TokenizerFiles,
    chain_digests,
    split_digests,
)
from engine.tls import between
from gateway.engines.bundled import BundledEngine
from gateway.engines.connection import Connection
from gateway.errors import DeadlineError, EngineFailedError, EngineLostError
from gateway.index.memory_index import MemoryIndex
from gateway.types import EncodedPrompt, Group, Request, Tenant, TokenPrompt
from tests.fakes.certificates import Authority
from tests.fakes.fake_engine import TOKENIZER, FakeEngine, make_hello
from tests.fakes.oracle_runner import choose_answer
from tests.fakes.small_engine import VOCAB, small_engine
from tests.fakes.waiting import until

LIMIT_S = 30.0
QUICK = {"connect_timeout_s": 1.0, "longest_retry_s": 0.1}
TENANT = Tenant("acme")


@dataclass
class Client:
    """A BundledEngine and what it told its surroundings."""

    engine: BundledEngine = field(init=False)
    memory: MemoryIndex = field(default_factory=MemoryIndex)
    tokenizers: list[tuple[str, TokenizerFiles]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    heard: list[BundledEngine] = field(default_factory=list)

    async def on_tokenizer(self, hello: Hello, files: TokenizerFiles) -> None:
        self.tokenizers.append((hello.model, files))

    def on_lost(self, incarnation: str) -> None:
        self.memory.drop(incarnation)
        self.lost.append(incarnation)

    async def joined(self) -> None:
        await asyncio.wait_for(self.engine.wait_joined(), LIMIT_S)


def engine_of(client: Client, url: str, **options: Any) -> BundledEngine:
    """One that tells the client everything, and was not started."""
    told = {
        "on_tokenizer": client.on_tokenizer,
        "on_blocks": client.memory.apply,
        "on_lost": client.on_lost,
        "on_load": client.heard.append,
        "prefix": client.memory.prefix,
    }
    return BundledEngine("engine-1", url, **{**told, **QUICK, **options})


@asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[Client]:
    client = Client()
    client.engine = engine_of(client, url, **options)
    client.engine.start()
    try:
        yield client
    finally:
        await client.engine.stop()


def prompt_of(hello: Hello, tokens: list[int], salt: str = TENANT.salt) -> EncodedPrompt:
    packed = array("I", tokens).tobytes()
    root = replace(hello.namespace, salt=salt).root()
    return EncodedPrompt(packed, chain_digests(root, packed, hello.namespace.block_size))


def request(max_tokens: int = 4, limit_s: float = LIMIT_S, **sampling: Any) -> Request:
    now = time.monotonic()
    sampled = Sampling(max_tokens, temperature=0.0, **sampling)
    return Request("r", TENANT, "demo", TokenPrompt(b""), sampled, received_s=now, deadline_s=now + limit_s)


async def answer(engine: BundledEngine, tokens: list[int], **options: Any) -> list[SequenceUpdate]:
    asked = request(**options)
    async with aclosing(engine.generate(prompt_of(engine.hello, tokens), asked.sampling, asked)) as updates:
        return [update async for update in updates]


def tokens_in(updates: list[SequenceUpdate]) -> list[int]:
    return [token for update in updates for token in update.tokens]


# -- joining ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["tcp", "unix"])
async def test_an_engine_joins_with_its_tokeniser_and_answers(place: str, tmp_path: Path) -> None:
    listen = "127.0.0.1:0" if place == "tcp" else f"unix:{tmp_path / 'e'}"
    async with FakeEngine(listen) as fake, connected(fake.url) as client:
        assert not client.engine.joined
        with pytest.raises(EngineLostError):
            _ = client.engine.hello
        await client.joined()
        assert client.engine.hello == fake.hello
        assert client.tokenizers == [("demo", fake.behaviour.tokenizer)]
        updates = await answer(client.engine, [1] * 40, max_tokens=6)
        assert tokens_in(updates) == [5, 6, 7, 8, 5, 6]
        assert updates[-1].finish == "length"
        (submit,) = fake.submits
        assert (submit.salt, submit.request_id, submit.lane) == (TENANT.salt, "r", "online")
        assert submit.digests == prompt_of(fake.hello, [1] * 40).digests
        assert (client.engine.in_flight, fake.aborts) == (0, [])


async def test_an_engine_is_told_which_answers_are_to_one_prompt(tmp_path: Path) -> None:
    async with FakeEngine(f"unix:{tmp_path / 'e'}") as fake, connected(fake.url) as client:
        await client.joined()
        groups = [Group(2), Group(3)]
        for group in (*groups, groups[0]):
            asked = replace(request(), group=group)
            async with aclosing(client.engine.generate(prompt_of(fake.hello, [1]), asked.sampling, asked)) as updates:
                assert [update async for update in updates]
        await answer(client.engine, [1])
        first, other, second, alone = (submit.group for submit in fake.submits)
        assert first == second != other
        assert (first and first.size, other and other.size, alone) == (2, 3, None)


async def test_an_engine_that_comes_later_is_found(tmp_path: Path) -> None:
    async with connected(f"unix:{tmp_path / 'e'}") as client:
        assert client.engine.load == Load()
        async with FakeEngine(f"unix:{tmp_path / 'e'}"):
            await client.joined()


async def test_the_secret_is_presented(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with FakeEngine(secret="sesame") as fake:
        async with connected(fake.url, secret="sesame") as client:
            await client.joined()
        async with connected(fake.url, secret="wrong"):
            await until(
                lambda: any("not there yet (as while it starts): 401" in record.message for record in caplog.records)
            )
        assert "sesame" not in caplog.text


async def test_a_tokeniser_is_fetched_once_and_again_only_when_it_is_another() -> None:
    async with FakeEngine() as fake, connected(fake.url) as client:
        await client.joined()
        first = client.engine.hello.incarnation
        await fake.restart()
        await until(lambda: client.engine.joined and client.engine.hello.incarnation != first)
        assert fake.tokenizer_requests == 1
        other = replace(fake.behaviour.tokenizer, add_bos=True)
        fake.behaviour.tokenizer = other
        await fake.restart(tokenizer=other.fingerprint())
        await until(lambda: client.engine.joined and client.engine.hello.tokenizer == other.fingerprint())
        assert [files for _, files in client.tokenizers] == [TOKENIZER, other]


async def test_an_engine_does_not_join_with_a_tokeniser_that_is_not_its_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with FakeEngine(hello=make_hello(tokenizer="another")) as fake, connected(fake.url) as client:
        await until(lambda: any("not the one" in record.message for record in caplog.records))
        assert not client.engine.joined
        assert client.tokenizers == []


async def test_an_engine_does_not_join_before_its_tokeniser_is_loaded() -> None:
    loaded = asyncio.Event()

    async def load(hello: Hello, files: TokenizerFiles) -> None:
        await loaded.wait()

    async with FakeEngine() as fake, connected(fake.url, on_tokenizer=load) as client:
        await until(lambda: fake.connections == 1)
        await fake.change_blocks(BlockEvents(stored=b"a" * 16))
        await until(lambda: client.memory.blocks(fake.hello.incarnation) == 1)  # the stream is read meanwhile
        assert not client.engine.joined
        loaded.set()
        await client.joined()


@pytest.mark.parametrize(
    "first",
    [StepFrame([], Load()), BlockEvents(reset=True), make_hello(version=99)],
    ids=["a step", "blocks", "another version"],
)
async def test_a_peer_that_does_not_begin_with_our_hello_never_joins(
    first: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fake = FakeEngine()
    fake.hello = first
    async with fake, connected(fake.url) as client:
        await until(lambda: "not there yet" in caplog.text)
        assert not client.engine.joined


# -- losing -----------------------------------------------------------------------------------------------------------


async def test_a_lost_connection_fails_everything_in_flight_and_comes_back() -> None:
    async with FakeEngine(silent=True) as fake, connected(fake.url) as client:
        await client.joined()
        asked = [asyncio.create_task(answer(client.engine, [n] * 20)) for n in range(1, 6)]
        await fake.wait_for(lambda: len(fake.submits) == 5)
        assert client.engine.in_flight == 5
        await fake.cut()
        results = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), LIMIT_S)
        assert [isinstance(result, EngineLostError) and result.died for result in results] == [True] * 5
        await client.joined()
        fake.behaviour.silent = False
        assert tokens_in(await answer(client.engine, [9] * 20)) == [5, 6, 7, 8]


async def test_a_restarted_engine_replaces_the_old_incarnation_and_its_blocks() -> None:
    async with FakeEngine() as fake, connected(fake.url) as client:
        await client.joined()
        await answer(client.engine, [1] * 40)
        old, digests = fake.hello, prompt_of(fake.hello, [1] * 40).digests
        await until(lambda: client.memory.prefix(old.incarnation, digests) == 2)
        await fake.restart()
        await until(lambda: client.engine.joined and client.engine.hello == fake.hello)
        assert client.lost == [old.incarnation]
        assert client.memory.prefix(old.incarnation, digests) == 0
        assert client.memory.find(digests, [fake.hello.incarnation]) == {fake.hello.incarnation: 0}


async def test_a_peer_that_hangs_is_noticed_and_its_requests_fail(tmp_path: Path) -> None:
    async with FakeEngine(silent=True) as fake:
        proxy = _Proxy(fake.url)
        async with proxy, connected(proxy.url, connect_timeout_s=0.2) as client:
            await client.joined()
            asked = asyncio.create_task(answer(client.engine, [1] * 20))
            await fake.wait_for(lambda: len(fake.submits) == 1)
            proxy.frozen = True
            with pytest.raises(EngineLostError):
                await asyncio.wait_for(asked, LIMIT_S)
            assert not client.engine.joined


async def test_an_engine_with_https_is_joined_where_both_have_certificates_of_one_ca(tmp_path: Path) -> None:
    one, other = Authority(), Authority()
    engine = between(one.issue(tmp_path / "engine", use=None), serves=True)
    gateway = between(one.issue(tmp_path / "gateway", use=None), serves=False)
    stranger = between(other.issue(tmp_path / "stranger", use=None), serves=False)
    assert engine is not None
    async with FakeEngine() as fake, _Proxy(fake.url, engine.listening()) as proxy:
        async with connected(proxy.url, certificate=gateway) as client:
            await client.joined()
            assert (await answer(client.engine, [1] * 20))[-1].finish == "length"
        for certificate in (stranger, None):
            async with connected(proxy.url, certificate=certificate) as client:
                await until(lambda client=client: client.engine.why)
                assert "certificate verify failed" in client.engine.why


async def test_the_loss_of_an_engine_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "gateway.engines.bundled")
    failures: list[BaseException] = []
    tell_away = BundledEngine._log_away
    monkeypatch.setattr(
        BundledEngine, "_log_away", lambda self, error: (failures.append(error), tell_away(self, error))[1]
    )
    async with FakeEngine() as fake, connected(fake.url) as client:
        await client.joined()
        await fake.die()
        await until(lambda: not client.engine.joined)
        await until(lambda: len(failures) >= 4)
        await fake.restart()
        await client.joined()
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "INFO"]


async def test_an_engine_that_said_it_would_end_is_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway.engines.bundled")
    async with FakeEngine() as fake, connected(fake.url) as client:
        await client.joined()
        await fake.report(draining=True)
        await until(lambda: client.engine.load.draining)
        await fake.die()
        await until(lambda: "has ended" in caplog.text)
    assert {record.levelname for record in caplog.records} == {"INFO"}


# -- generating -------------------------------------------------------------------------------------------------------


async def test_closing_aborts_exactly_once_and_late_updates_are_dropped() -> None:
    async with FakeEngine(interval_s=0.005) as fake, connected(fake.url) as client:
        await client.joined()
        asked = request(max_tokens=10_000)
        async with aclosing(client.engine.generate(prompt_of(fake.hello, [1] * 20), asked.sampling, asked)) as updates:
            async for _ in updates:
                break
        assert client.engine.in_flight == 0
        await fake.wait_for(lambda: bool(fake.aborts))
        await fake.send(StepFrame([SequenceUpdate(fake.submits[0].seq, [1], finish="length")], Load(waiting=3)))
        await until(lambda: client.engine.load.waiting == 3)
        assert fake.aborts == [fake.submits[0].seq]


async def test_a_generator_that_is_never_started_sends_nothing() -> None:
    async with FakeEngine() as fake, connected(fake.url) as client:
        await client.joined()
        asked = request()
        await client.engine.generate(prompt_of(fake.hello, [1] * 20), asked.sampling, asked).aclose()
        await answer(client.engine, [2] * 20)
        assert len(fake.submits) == 1


async def test_cancelling_the_reader_aborts_the_sequence() -> None:
    async with FakeEngine(silent=True) as fake, connected(fake.url) as client:
        await client.joined()
        asked = asyncio.create_task(answer(client.engine, [1] * 20))
        await fake.wait_for(lambda: len(fake.submits) == 1)
        asked.cancel()
        await fake.wait_for(lambda: fake.aborts == [fake.submits[0].seq])
        assert client.engine.in_flight == 0


async def test_the_deadline_holds_even_if_the_engine_says_nothing() -> None:
    async with FakeEngine(silent=True) as fake, connected(fake.url) as client:
        await client.joined()
        with pytest.raises(DeadlineError):
            await answer(client.engine, [1] * 20, limit_s=0.05)
        await fake.wait_for(lambda: len(fake.aborts) == 1)


async def test_an_error_is_the_sequences_own() -> None:
    async with FakeEngine(silent=True) as fake, connected(fake.url) as client:
        await client.joined()
        asked = [asyncio.create_task(answer(client.engine, [n] * 20)) for n in (1, 2)]
        await fake.wait_for(lambda: len(fake.submits) == 2)
        failed = SequenceUpdate(fake.submits[0].seq, finish="error", error="not finite")
        done = SequenceUpdate(fake.submits[1].seq, [7], finish="stop", stop_id=0)
        await fake.send(StepFrame([failed, done], Load()))
        assert (await asked[0])[-1].error == "not finite"
        assert (await asked[1])[-1] == done


async def test_what_a_draining_engine_refuses_may_be_tried_elsewhere() -> None:
    async with FakeEngine(silent=True) as fake, connected(fake.url) as client:
        await client.joined()
        asked = asyncio.create_task(answer(client.engine, [1] * 20))
        await fake.wait_for(lambda: len(fake.submits) == 1)
        refused = SequenceUpdate(fake.submits[0].seq, finish="abort", error="the engine is draining")
        await fake.send(StepFrame([refused], Load(draining=True)))
        with pytest.raises(EngineLostError, match="draining") as caught:
            await asked
        assert not caught.value.died


async def test_updates_that_waited_arrive_as_one() -> None:
    async with FakeEngine(silent=True) as fake, connected(fake.url) as client:
        await client.joined()
        asked = request()
        async with aclosing(client.engine.generate(prompt_of(fake.hello, [1] * 20), asked.sampling, asked)) as updates:
            first = asyncio.ensure_future(anext(updates))
            await fake.wait_for(lambda: len(fake.submits) == 1)
            seq = fake.submits[0].seq
            await fake.send(StepFrame([SequenceUpdate(seq, [1], cached_tokens=16, queue_ms=1.0)], Load()))
            assert (await first).tokens == [1]
            for token in (2, 3):
                await fake.send(StepFrame([SequenceUpdate(seq, [token])], Load()))
            await fake.send(StepFrame([SequenceUpdate(seq, [4], finish="stop", stop_id=9)], Load(waiting=7)))
            await until(lambda: client.engine.load.waiting == 7)
            assert await anext(updates) == SequenceUpdate(seq, [2, 3, 4], finish="stop", stop_id=9)


def test_a_reader_slower_than_the_buffer_allows_is_given_up() -> None:
    connection = Connection("e", make_hello(), buffer_updates=100)
    asked = request()

    async def run() -> None:
        stream = connection.open(EncodedPrompt(b"", b""), asked.sampling, asked, cost=0)
        for _ in range(101):
            connection.dispatch(StepFrame([SequenceUpdate(stream.seq, [1])], Load()))
        with pytest.raises(EngineFailedError, match="too slowly"):
            await stream.take()

    asyncio.run(run())


# -- load -------------------------------------------------------------------------------------------------------------


def test_the_load_counts_what_was_sent_since_the_last_report() -> None:
    async def run() -> None:
        client = Client()
        engine = engine_of(client, "http://nowhere")
        engine._hello = hello = make_hello()
        engine._connection = connection = Connection("e", hello, 100)
        prompt = prompt_of(hello, [1] * 160)
        client.memory.apply(hello.incarnation, BlockEvents(stored=prompt.digests[: 16 * 4]))
        asked = request()
        running = [asyncio.create_task(anext(engine.generate(prompt, asked.sampling, asked))) for _ in range(3)]
        await asyncio.sleep(0)
        assert (engine.load.waiting, engine.load.prefill_backlog) == (3, 3 * (160 - 64))
        # The frame of a step that was under way does not know of them, the one after it does.
        connection.dispatch(StepFrame([], Load(running=1)))
        assert (engine.load.running, engine.load.waiting) == (1, 3)
        connection.dispatch(StepFrame([], Load(waiting=3, prefill_backlog=300)))
        assert (engine.load.waiting, engine.load.prefill_backlog) == (3, 300)
        assert engine.in_flight == 3
        name = asked.tenant.name
        assert engine.prefilling == {name: 3 * (160 - 64)}
        connection.dispatch(StepFrame([SequenceUpdate(1, tokens=[1])], Load(waiting=2)))
        assert engine.prefilling == {name: 2 * (160 - 64)}
        connection.fail(EngineLostError("gone"))
        ended = await asyncio.gather(*running, return_exceptions=True)
        assert [type(one) for one in ended] == [SequenceUpdate, EngineLostError, EngineLostError]
        assert engine.prefilling == {}

    asyncio.run(run())


# -- against the real server ------------------------------------------------------------------------------------------


async def test_hundreds_of_sequences_over_the_real_server_with_readers_that_leave_at_random(tmp_path: Path) -> None:
    """Every answer is what the naive twin says, every leaver frees its blocks, and memory ends up with the table."""
    source = random.Random(3)

    async def one(client: Client, hello: Hello, number: int) -> None:
        tokens = [source.randrange(3)] * source.randrange(1, 40) + [number % VOCAB] * source.randrange(1, 60)
        count, leaves_at = source.randrange(1, 30), source.choice([None, None, 0, 1, 5])
        asked = request(max_tokens=count, limit_s=60)
        got: list[int] = []
        await asyncio.sleep(source.random() * 0.5)
        async with aclosing(client.engine.generate(prompt_of(hello, tokens), asked.sampling, asked)) as updates:
            async for update in updates:
                got += update.tokens
                if leaves_at is not None and len(got) >= leaves_at:
                    break
        expected = choose_answer(TENANT.salt, tokens, VOCAB, count, frozenset())
        assert got == expected[: len(got)]
        assert leaves_at is not None or len(got) == len(expected)

    listen = f"unix:{tmp_path / 'e'}"
    async with small_engine(listen, num_blocks=120, max_sequences=16) as small, connected(small.url) as client:
        await client.joined()
        await asyncio.wait_for(asyncio.gather(*(one(client, small.hello, number) for number in range(300))), 60)
        assert client.engine.in_flight == 0
        await until(lambda: small.pool.num_live == 0)
        held = set(split_digests(small.pool.prefixes.snapshot().stored))
        await until(lambda: client.memory._held[small.hello.incarnation] == held)
        await until(lambda: client.engine.load.live_blocks == 0)


# -- helpers ----------------------------------------------------------------------------------------------------------


class _Proxy:
    """Passes bytes on until it is frozen; connections stay open then, and nothing moves, as with a stopped process.
    It may end TLS."""

    def __init__(self, target: str, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._target = target.removeprefix("http://").split(":")
        self.frozen = False
        self.url = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> _Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._tls)
        self.url = f"http{'s' if self._tls else ''}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:  # aborted, because what waits in a frozen one would never be sent
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self._tasks.append(asyncio.create_task(self._carry(reader, writer)))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._target[0], int(self._target[1]))
        self._writers.append(back)
        await asyncio.gather(self._pass_on(reader, back), self._pass_on(there, writer))

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                if self.frozen:
                    await asyncio.Event().wait()
                target.write(data)
        finally:
            target.close()


def test_the_load_is_the_engines_own_with_what_was_sent_since() -> None:
    client = Client()
    engine = engine_of(client, "http://nowhere:1")
    connection = engine._connection = Connection("e", make_hello(), 16)
    numbers = {item.name: number for number, item in enumerate(fields(Load), 1)}
    connection.load = Load(**numbers | {"draining": True})  # type: ignore[arg-type]
    assert engine.load == connection.load
    connection.unseen = {1: (0, 100, "online"), 2: (0, 20, "batch")}
    load = connection.load
    assert engine.load == replace(
        load,
        waiting=load.waiting + 2,
        prefill_backlog=load.prefill_backlog + 120,
        batch_waiting=load.batch_waiting + 1,
        batch_backlog=load.batch_backlog + 20,
    )

"""The engine's server over its real loop: what a gateway sees on the wire."""

from __future__ import annotations

import asyncio
import socket as sockets
import threading

import aiohttp
import pytest
from aiohttp import WSMsgType
from aiohttp.test_utils import make_mocked_request

from engine.protocol import (
    HEALTH_PATH,
    PURGE_PATH,
    SECRET_HEADER,
    STATS_PATH,
    STREAM_PATH,
    TOKENIZER_PATH,
    Abort,
    BlockEvents,
    Hello,
    StepFrame,
    TokenizerFiles,
    split_digests,
)
from tests.fakes.fake_engine import TOKENIZER
from tests.fakes.oracle_runner import choose_answer
from tests.fakes.small_engine import VOCAB, Stream, small_engine
from tests.fakes.waiting import until


def finished(message: object) -> bool:
    return isinstance(message, StepFrame) and any(update.finish for update in message.updates)


def tokens_of(messages: list[object], seq: int = 1) -> list[int]:
    frames = [message for message in messages if isinstance(message, StepFrame)]
    return [token for frame in frames for update in frame.updates if update.seq == seq for token in update.tokens]


async def test_hello_comes_first_then_the_blocks_then_the_load() -> None:
    async with small_engine() as engine, engine.stream() as stream:
        assert await stream.receive() == engine.hello
        assert await stream.receive() == BlockEvents(reset=True)
        load = await stream.receive()
        assert isinstance(load, StepFrame)
        assert load.load.free_blocks == 200


async def test_a_sequence_is_answered_frame_by_frame_and_its_blocks_are_told_first() -> None:
    prompt = [number % VOCAB for number in range(60)]
    async with small_engine() as engine, engine.stream() as stream:
        submit = engine.submit(1, prompt, max_tokens=6)
        await stream.send(submit)
        messages = await stream.until(finished)
        assert tokens_of(messages) == choose_answer("", prompt, VOCAB, 6, frozenset())
        frames = [message for message in messages if isinstance(message, StepFrame) and message.updates]
        assert [len(frame.updates[0].tokens) for frame in frames] == [1] * 6
        assert frames[0].updates[0].cached_tokens == 0
        assert frames[-1].updates[0].finish == "length"
        first_block = next(i for i, m in enumerate(messages) if isinstance(m, BlockEvents) and m.stored)
        assert first_block < messages.index(frames[0])
        await stream.send(engine.submit(2, prompt))
        again = await stream.until(finished)
        first = next(m for m in again if isinstance(m, StepFrame) and m.updates)
        assert first.updates[0].cached_tokens == 48


async def test_two_gateways_get_their_own_sequences_and_both_hear_of_every_block() -> None:
    async with small_engine() as engine, engine.stream() as one, engine.stream() as other:
        await one.send(engine.submit(1, [1] * 40))
        await other.send(engine.submit(1, [2] * 40))
        heard = [await stream.until(finished) for stream in (one, other)]
        for number, messages in enumerate(heard, 1):
            assert tokens_of(messages) == choose_answer("", [number] * 40, VOCAB, 4, frozenset())
        await until(lambda: len(engine.server.gateways.table) == 4)


async def test_a_snapshot_and_the_changes_after_it_are_the_table_at_every_moment() -> None:
    """Gateways come while a small pool is being filled and evicted; whatever they hear adds up to the table."""
    async with small_engine(num_blocks=24) as engine, engine.stream() as busy:
        held: list[set[bytes]] = []

        async def listen(stream: Stream) -> None:
            mine: set[bytes] = set()
            held.append(mine)
            while True:
                message = await stream.receive()
                if isinstance(message, BlockEvents):
                    if message.reset:
                        assert not mine
                    removed, stored = split_digests(message.removed), split_digests(message.stored)
                    assert mine.issuperset(removed), "an event was lost"
                    mine.difference_update(removed)
                    assert mine.isdisjoint(stored), "an event came twice"
                    mine.update(stored)

        async with asyncio.TaskGroup() as group:
            listeners = [group.create_task(listen(busy))]
            streams = []
            for round_ in range(30):
                for seq in range(4):
                    await busy.send(engine.submit(10 * round_ + seq, [(round_ * 7 + seq) % VOCAB] * 70, max_tokens=3))
                context = engine.stream()
                streams.append(context)
                listeners.append(group.create_task(listen(await context.__aenter__())))
            await until(lambda: engine.loop.stats()["finished"]["length"] == 120)
            await until(lambda: len(held) == 31 and all(mine == set(engine.server.gateways.table) for mine in held))
            for listener in listeners:
                listener.cancel()
        for context in streams:
            await context.__aexit__(None, None, None)
        assert set(engine.server.gateways.table) == set(split_digests(engine.pool.prefixes.snapshot().stored))


async def test_an_abort_ends_one_sequence_and_the_rest_goes_on() -> None:
    async with small_engine() as engine, engine.stream() as stream:
        engine.runner.permits = threading.Semaphore(3)
        await stream.send(engine.submit(1, [1] * 40, max_tokens=1500))
        await stream.send(engine.submit(2, [2] * 40, max_tokens=30))
        await stream.until(lambda message: bool(tokens_of([message], 1)))
        await stream.send(Abort(1))
        await engine.step_until(
            lambda: engine.loop.stats()["finished"] == {"stop": 0, "length": 1, "abort": 1, "error": 0}
        )
        await stream.until(finished)
        await until(lambda: engine.pool.num_live == 0)


async def test_a_gateway_that_goes_away_takes_its_sequences_with_it() -> None:
    async with small_engine() as engine:
        engine.runner.permits = threading.Semaphore(20)
        async with engine.stream() as stream:
            for seq in range(5):
                await stream.send(engine.submit(seq, [seq] * 40, max_tokens=1500))
            await stream.until(lambda message: bool(tokens_of([message], 4)))
        await engine.step_until(lambda: engine.loop.stats()["finished"]["abort"] == 5)
        await until(lambda: engine.pool.num_live == 0 and len(engine.server.gateways) == 0)


async def test_a_gateway_that_does_not_read_is_hung_up_on() -> None:
    async with small_engine(send_buffer_bytes=1 << 18) as engine, engine.stream() as good:

        async def read_on() -> None:
            while not finished(await good.receive()):
                pass

        reading = asyncio.create_task(read_on())
        address = ("127.0.0.1", int(engine.url.rsplit(":", 1)[1]))
        with sockets.socket() as deaf:
            deaf.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 4096)
            deaf.setblocking(False)
            await asyncio.get_running_loop().sock_connect(deaf, address)
            request = f"GET {STREAM_PATH} HTTP/1.1\r\nHost: e\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            request += "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
            await asyncio.get_running_loop().sock_sendall(deaf, request.encode())
            await until(lambda: len(engine.server.gateways) == 2)

            def sent_until_it_is_gone() -> bool:  # block events go to everybody
                engine.server._on_blocks(BlockEvents(stored=bytes(1 << 16), removed=bytes(1 << 16)))
                return len(engine.server.gateways) == 1

            await until(sent_until_it_is_gone)
        await good.send(engine.submit(1, [3] * 40))
        await asyncio.wait_for(reading, 30)


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "reason"),
    [([1, VOCAB], 1, "ids of this model are below 500"), ([1] * 2040, 100, "context"), ([], 1, "empty")],
)
async def test_what_cannot_be_computed_is_refused_alone(tokens: list[int], max_tokens: int, reason: str) -> None:
    async with small_engine() as engine, engine.stream() as stream:
        await stream.send(engine.submit(1, tokens, max_tokens))
        refused = (await stream.until(finished))[-1]
        assert isinstance(refused, StepFrame)
        assert refused.updates[0].finish == "error"
        assert reason in (refused.updates[0].error or "")
        await stream.send(engine.submit(2, [1, 2, 3]))
        assert len(tokens_of(await stream.until(finished), 2)) == 4


@pytest.mark.parametrize("data", [b"", b"\x00", b"\xff" * 40, b'\x0e\x00\x00\x00{"op":"dance"}'])
async def test_a_gateway_that_talks_nonsense_is_hung_up_on_and_the_engine_stays(data: bytes) -> None:
    async with small_engine() as engine:
        async with engine.stream() as stream:
            await stream.socket.send_bytes(data)
            async with asyncio.timeout(30):
                while (await stream.socket.receive()).type is WSMsgType.BINARY:
                    pass
        async with engine.stream() as stream:
            await stream.send(engine.submit(2, [1, 2, 3]))
            assert len(tokens_of(await stream.until(finished), 2)) == 4


async def test_without_the_secret_only_the_health_is_shown() -> None:
    async with small_engine(secret="sesame") as engine:
        for path in (STREAM_PATH, TOKENIZER_PATH, STATS_PATH):
            for headers in ({}, {SECRET_HEADER: "sesam"}, {SECRET_HEADER: "sésame"}):
                async with engine.session.get(path, headers=headers) as answer:
                    assert answer.status == 401, path
        async with engine.session.get(HEALTH_PATH) as answer:
            assert (answer.status, await answer.json()) == (200, {"status": "ready"})
        async with engine.session.get(TOKENIZER_PATH, headers={SECRET_HEADER: "sesame"}) as answer:
            assert answer.status == 200
        async with engine.stream(headers={SECRET_HEADER: "sesame"}) as stream:
            assert isinstance(await stream.receive(), Hello)


async def test_tokeniser_and_counters_can_be_had() -> None:
    async with small_engine() as engine:
        async with engine.session.get(TOKENIZER_PATH) as answer:
            assert TokenizerFiles.from_json(await answer.json()) == TOKENIZER
        async with engine.session.get(STATS_PATH) as answer:
            stats = await answer.json()
        assert stats["gateways"] == 0
        assert stats["submitted"] == 0


async def test_a_draining_engine_finishes_what_runs_refuses_the_rest_and_says_so() -> None:
    async with small_engine() as engine, engine.stream() as busy, engine.stream() as idle:
        await busy.send(engine.submit(1, [1] * 40, max_tokens=200))
        await busy.until(lambda message: bool(tokens_of([message])))
        engine.server.drain()
        await idle.until(lambda message: isinstance(message, StepFrame) and message.load.draining)
        await idle.send(engine.submit(1, [2] * 40))
        refused = (await idle.until(finished))[-1]
        assert isinstance(refused, StepFrame)
        assert "draining" in (refused.updates[0].error or "")
        last = (await busy.until(finished))[-1]
        assert isinstance(last, StepFrame)
        assert last.updates[0].finish == "length"
        assert await asyncio.to_thread(engine.loop.wait_idle, 10)
        async with engine.session.get(HEALTH_PATH) as answer:
            assert (answer.status, await answer.json()) == (503, {"status": "draining"})


async def test_a_gateway_without_work_hears_of_the_load_of_others() -> None:
    async with small_engine() as engine, engine.stream() as busy, engine.stream() as idle:
        loads: list[int] = []

        async def listen() -> None:
            while True:
                if isinstance(message := await idle.receive(), StepFrame):
                    loads.append(message.load.running)

        listening = asyncio.create_task(listen())
        await busy.send(engine.submit(1, [1] * 40, max_tokens=500))
        await engine.step_until(lambda: 1 in loads)
        await busy.send(Abort(1))
        await engine.step_until(lambda: loads[-1] == 0)
        listening.cancel()


async def test_the_stream_is_sent_without_delay() -> None:
    async with small_engine() as engine, engine.stream() as stream:
        for transport in (stream.socket.get_extra_info("socket"),):
            assert transport.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY)
        (socket,) = engine.server._sockets
        assert socket.get_extra_info("socket").getsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY)


async def test_a_secret_is_needed_to_open_a_stream() -> None:
    async with small_engine(secret="sesame") as engine:
        with pytest.raises(aiohttp.WSServerHandshakeError, match="401"):
            async with engine.stream():
                pass


async def test_a_purge_makes_the_engine_forget_one_scope_and_tells_its_gateways() -> None:
    a, b = "tenant:1:a;", "tenant:1:b;"
    async with small_engine(secret="s3") as engine, engine.stream(headers={SECRET_HEADER: "s3"}) as stream:
        for seq, salt in enumerate((a, b), 1):
            await stream.send(engine.submit(seq, [7] * 40, salt=salt))
            await stream.until(finished)
        assert len(engine.server.gateways.table) == 4
        async with engine.session.post(PURGE_PATH, json={"salt_prefix": a}, headers={SECRET_HEADER: ""}) as answer:
            assert answer.status == 401
        async with engine.session.post(PURGE_PATH, json={"salt_prefix": a}, headers={SECRET_HEADER: "s3"}) as answer:
            report = await answer.json()
        assert report["complete"]
        assert report["tiers"]["device"]["blocks"] == 2
        assert len(engine.server.gateways.table) == 2
        cached = []
        for seq, salt in enumerate((a, b), 3):
            await stream.send(engine.submit(seq, [7] * 40, salt=salt))
            told = [m for m in await stream.until(finished) if isinstance(m, StepFrame) and m.updates]
            cached.append(told[0].updates[0].cached_tokens)
        assert cached == [0, 32]


@pytest.mark.parametrize("prefix", [None, 1, "", ";", "tenant:1:a", "x" * 5000 + ";"])
async def test_a_purge_of_everybody_or_of_half_a_name_is_refused(prefix: object) -> None:
    async with small_engine() as engine, engine.session.post(PURGE_PATH, json={"salt_prefix": prefix}) as answer:
        assert answer.status == 400


async def test_a_gateway_that_hung_up_before_the_handshake_is_no_error() -> None:
    """As after a partition: the request is read when its connection is closed already, and nothing can be written."""
    upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
    upgrade["Sec-WebSocket-Key"] = "MDEyMzQ1Njc4OWFiY2RlZg=="
    async with small_engine() as engine:
        request = make_mocked_request("GET", STREAM_PATH, upgrade)
        assert request.transport is not None
        request.transport.is_closing.return_value = True  # type: ignore[attr-defined]
        response = await engine.server._stream(request)
        assert not response.prepared

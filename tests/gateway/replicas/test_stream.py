"""One server's event stream: in order, without a gap that is not told of, over real ZeroMQ sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.replicas.base import EventSource
from gateway.replicas.stream import EventStream, StreamTimes
from tests.fakes.kv_publisher import KvPublisher
from tests.fakes.waiting import until

TIMES = StreamTimes(beat_s=0.2, answer_s=0.3)


class Heard:
    """A sink: what was passed on since the last begin, and what was told."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.begins: list[str] = []
        self.problem: str | None = None

    def begin(self, missing: str) -> None:
        self.begins.append(missing)
        self.payloads = []

    def payload(self, payload: bytes) -> None:
        assert self.begins
        self.payloads.append(payload)

    def answering(self, problem: str) -> None:
        self.problem = problem


@asynccontextmanager
async def listening(source: EventSource, times: StreamTimes = TIMES) -> AsyncIterator[tuple[Heard, EventStream]]:
    heard = Heard()
    stream = EventStream(source, heard, times)
    stream.start()
    try:
        yield heard, stream
    finally:
        await stream.stop()


async def send(publisher: KvPublisher, first: int, last: int) -> None:
    for number in range(first, last + 1):
        await publisher.send(b"%d" % number)


def run(first: int, last: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, last + 1)]


@pytest.mark.parametrize("topic_in_replay", [True, False])
async def test_what_was_published_before_comes_by_replay_and_then_the_rest(topic_in_replay: bool) -> None:
    async with KvPublisher(topic_in_replay=topic_in_replay) as publisher:
        await send(publisher, 0, 99)
        async with listening(publisher.source) as (heard, stream):
            await until(lambda: heard.payloads == run(0, 99))
            await until(lambda: stream.figures()["connections"] == 1)
            await send(publisher, 100, 149)
            await until(lambda: heard.payloads == run(0, 149))
            assert heard.begins == [""]
            await until(lambda: heard.problem == "")
            assert stream.figures()["last_sequence"] == 149


async def test_a_server_without_any_batch_is_known_to_hold_nothing() -> None:
    async with KvPublisher() as publisher, listening(publisher.source) as (heard, _):
        await until(lambda: heard.problem == "")
        assert heard.begins == [""]
        await publisher.send(b"0")
        await until(lambda: heard.payloads == [b"0"])
        assert heard.begins == [""]


async def test_dropped_frames_are_repaired_by_replay() -> None:
    async with KvPublisher(seed=3) as publisher, listening(publisher.source) as (heard, stream):
        await until(lambda: stream.figures()["connections"] == 1 and heard.problem == "")
        publisher.drop = 0.05
        for start in range(0, 1000, 50):
            await send(publisher, start, start + 49)
            await asyncio.sleep(0)
        await until(lambda: len(heard.payloads) == 1000)
        assert heard.payloads == run(0, 999)
        assert heard.begins == [""]


async def test_a_lost_last_batch_is_found_without_another_one() -> None:
    async with KvPublisher() as publisher, listening(publisher.source) as (heard, stream):
        await until(lambda: stream.figures()["connections"] == 1 and heard.problem == "")
        publisher.drop = 1.0
        await send(publisher, 0, 2)
        await until(lambda: heard.payloads == run(0, 2))
        assert stream.figures()["gaps"] == 0


async def test_batches_that_a_replay_lacks_in_the_middle_are_asked_for_again() -> None:
    async with KvPublisher() as publisher:
        await send(publisher, 0, 99)
        publisher.drop_replayed = set(range(40, 60))
        async with listening(publisher.source) as (heard, _):
            await until(lambda: heard.payloads == run(0, 99))
            assert publisher.asked[:2] == [0, 39]
            assert heard.begins == [""]


async def test_a_replay_without_its_end_marker_is_asked_for_again() -> None:
    async with KvPublisher() as publisher:
        await send(publisher, 0, 99)
        publisher.drop_ends = 2
        async with listening(publisher.source) as (heard, _):
            await until(lambda: heard.problem == "")
            assert heard.payloads == run(0, 99)
            assert publisher.asked[:3] == [0, 99, 99]
            assert heard.begins == [""]


async def test_a_replay_of_more_batches_than_a_server_can_send_at_once_comes_in_parts() -> None:
    """A ROUTER holds 1000 messages for a reader and drops the others, end marker included."""
    async with KvPublisher() as publisher:
        await send(publisher, 0, 2999)
        publisher.most_replayed = 1000
        async with listening(publisher.source) as (heard, _):
            await until(lambda: heard.problem == "")
            assert heard.payloads == run(0, 2999)
            assert heard.begins == [""]
            assert len(publisher.asked) > 3


async def test_a_replay_that_begins_later_is_told_of() -> None:
    async with KvPublisher(buffer=10) as publisher:
        await send(publisher, 0, 99)
        async with listening(publisher.source) as (heard, stream):
            await until(lambda: heard.payloads == run(90, 99))
            assert heard.begins == ["KV events 0 to 89 are lost: the server does not have them any more"]
            assert stream.figures()["lost"] == 90
            await until(lambda: heard.problem == "")


async def test_a_restart_is_known_by_numbers_that_go_backwards() -> None:
    slow = StreamTimes(beat_s=60, answer_s=1)
    async with KvPublisher() as publisher, listening(publisher.source, slow) as (heard, stream):
        await until(lambda: stream.figures()["connections"] == 1 and heard.problem == "")
        await send(publisher, 0, 9)
        await until(lambda: heard.payloads == run(0, 9))
        await publisher.restart()
        await until(lambda: stream.figures()["disconnections"] == 1)
        await until(lambda: stream.figures()["connections"] == 2)
        await send(publisher, 1000, 1001)
        await until(lambda: heard.payloads == run(1000, 1001))
        assert heard.begins[-1] == ""
        assert stream.figures()["restarts"] == 1


@pytest.mark.parametrize("batches", [0, 5, 10, 11, 50])
async def test_a_restart_is_known_whatever_its_numbers_are(batches: int) -> None:
    """Nothing is published after it: the heart-beat finds another batch under the last number, or none."""
    async with KvPublisher() as publisher, listening(publisher.source) as (heard, stream):
        await until(lambda: heard.problem == "")
        await send(publisher, 0, 9)
        await until(lambda: heard.payloads == run(0, 9))
        await publisher.restart(batches)
        await until(lambda: stream.figures()["restarts"] == 1 and heard.begins[-1] == "")
        await until(lambda: heard.problem == "" and len(heard.payloads) == batches)
        assert heard.payloads == [payload for _, payload in publisher.buffer]


async def test_a_silent_server_is_told_of_and_goes_on_where_it_was() -> None:
    async with KvPublisher() as publisher, listening(publisher.source) as (heard, _):
        await send(publisher, 0, 9)
        await until(lambda: heard.payloads == run(0, 9) and heard.problem == "")
        publisher.answers = False
        await until(lambda: bool(heard.problem))
        assert heard.problem == f"{publisher.source.replay} does not answer"
        await send(publisher, 10, 12)
        await until(lambda: heard.payloads == run(0, 12))
        publisher.answers = True
        await until(lambda: heard.problem == "")
        assert heard.begins == [""]


async def test_a_gap_that_nothing_repairs_is_told_of_until_all_is_read_again() -> None:
    async with KvPublisher() as publisher, listening(publisher.source) as (heard, stream):
        await send(publisher, 0, 9)
        await until(lambda: heard.payloads == run(0, 9) and stream.figures()["connections"] == 1)
        publisher.answers = False
        publisher.drop = 1.0
        await send(publisher, 10, 12)
        publisher.drop = 0.0
        await send(publisher, 13, 14)
        await until(lambda: heard.payloads == run(13, 14))
        assert heard.begins[-1] == f"KV events 10 to 12 are lost: {publisher.source.replay} does not answer"
        publisher.answers = True
        await until(lambda: heard.problem == "" and heard.payloads == run(0, 14))
        assert heard.begins[-1] == ""


async def test_a_server_without_replay_is_complete_from_its_first_batch_on() -> None:
    async with KvPublisher() as publisher:
        source = publisher.source._replace(replay=None)
        async with listening(source) as (heard, stream):
            await until(lambda: stream.figures()["connections"] == 1)
            assert heard.problem
            await until(lambda: bool(heard.problem))

            async def arrived() -> bool:  # the subscription takes a while, and nothing says when it is there
                if not heard.payloads:
                    publisher.sequence = 0
                    await publisher.send(b"0")
                return bool(heard.payloads)

            await until(arrived)
            assert set(heard.begins) <= {"", "the server restarted, and has not sent its first KV events again"}
            await publisher.send(b"1")
            await until(lambda: heard.payloads[-1] == b"1")
            assert heard.problem == ""
            publisher.sequence = 5
            await publisher.send(b"5")
            await until(lambda: heard.payloads == [b"5"])
            assert heard.begins[-1].startswith("KV events 2 to 4 are lost: ")


async def test_frames_that_are_none_are_passed_over() -> None:
    async with KvPublisher() as publisher, listening(publisher.source) as (heard, stream):
        await until(lambda: stream.figures()["connections"] == 1 and heard.problem == "")
        await publisher._pub.send_multipart([b"kv", b"short", b"x"])
        await publisher._pub.send_multipart([b"kv"])
        await publisher.send(b"0")
        await until(lambda: heard.payloads == [b"0"])
        await until(lambda: stream.figures()["malformed"] == 2)


async def test_an_endpoint_that_is_none_is_one_clear_line(caplog: pytest.LogCaptureFixture) -> None:
    async with listening(EventSource("nonsense", None)) as (heard, _):
        await until(lambda: bool(heard.problem))
        assert "KV events of nonsense cannot be followed: " in caplog.text

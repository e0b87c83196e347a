"""What is hot, and that a replica which has joined computes it while it has nothing else to do."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from engine.protocol import DIGEST_BYTES, TOKEN_BYTES, Hello, Load, Namespace, Sampling, SequenceUpdate, chain_digests
from gateway.errors import EngineFailedError
from gateway.replicas import warming
from gateway.replicas.prefix_leases import LeaseBudget
from gateway.replicas.touching import LeaseKeeper
from gateway.replicas.warming import HALF_LIFE_S, MAX_COUNTED, HotPrefixes, Warmer
from gateway.types import EncodedPrompt, Request, Scope, Tenant, TokenPrompt
from tests.fakes.clock import Clock
from tests.fakes.fake_engine import make_hello
from tests.fakes.waiting import until

BLOCK = 16
NAMESPACE = Namespace(weights="w", dtype="", kv_dtype="", block_size=BLOCK, salt="s")
HELLO = replace(make_hello(), namespace=NAMESPACE, num_blocks=1000)


def prompt(*parts: tuple[int, int]) -> EncodedPrompt:
    """Parts of so many blocks, each of one token."""
    tokens = array("I", [token for token, blocks in parts for _ in range(blocks * BLOCK)]).tobytes()
    return EncodedPrompt(tokens, chain_digests(NAMESPACE.root(), tokens, BLOCK))


def request(tenant: str = "north", **more: Any) -> Request:
    sampling = Sampling(max_tokens=1)
    return Request("r", Tenant(tenant), HELLO.model, TokenPrompt(b""), sampling, 0.0, 1e9, **more)


class Book:
    """Hot prefixes, and requests that reuse them."""

    def __init__(self, **limits: int) -> None:
        self.clock = Clock()
        self.hot = HotPrefixes(clock=self.clock, **limits)

    def reused(self, encoded: EncodedPrompt, blocks: int, times: int = 1, **more: Any) -> None:
        for _ in range(times):
            self.hot.reused(HELLO, request(**more), encoded, blocks * BLOCK)

    def lengths(self) -> list[int]:
        """In blocks, hottest first."""
        return [len(one.digests) // DIGEST_BYTES for one in self.hot.hottest(NAMESPACE)]


def test_a_system_prompt_that_conversations_share_is_hot_and_their_ends_are_not() -> None:
    book = Book()
    for number in range(5):
        book.reused(prompt((1, 40), (100 + number, 3)), 40)
    assert book.lengths() == [40]
    [one] = book.hot.hottest(NAMESPACE)
    assert one.tokens == prompt((1, 40)).tokens
    assert one.digests == prompt((1, 40)).digests


def test_a_prefix_inside_of_a_longer_one_is_kept_where_it_is_reused_much_more_often() -> None:
    book = Book()
    for number in range(8):
        book.reused(prompt((1, 40), (2 + number % 4, 60)), 100)  # four tool lists behind one system prompt
    lengths = book.lengths()
    assert lengths.count(100) == 4
    assert len(lengths) == 5
    assert 20 <= min(lengths) <= 40  # a length that is counted


def test_what_saved_more_is_hotter_and_cools_with_time() -> None:
    book = Book()
    book.reused(prompt((1, 40)), 40, times=4)
    book.reused(prompt((2, 200)), 200, times=4)
    assert book.lengths() == [200, 40]
    book.clock.now_s += 3 * HALF_LIFE_S
    book.reused(prompt((1, 40)), 40, times=4)
    assert book.lengths() == [40, 200]


def test_what_is_not_to_be_kept_is_not() -> None:
    book = Book()
    book.reused(prompt((1, 40)), 40, times=4, use_cache=False)
    book.reused(prompt((1, 40)), 40, times=4, prewarm=True)
    book.reused(prompt((1, 40)), 3, times=4)
    book.reused(prompt((1, 40)), 40)
    assert book.lengths() == []


def test_memory_is_bounded_by_bytes_and_by_number() -> None:
    each = 40 * (BLOCK * TOKEN_BYTES + DIGEST_BYTES)
    book = Book(max_bytes=8 * each)
    for number in range(20):
        book.reused(prompt((number, 40)), 40, times=3 + number)
        assert book.hot.num_bytes <= 8 * each
        assert book.hot.num_bytes == sum(one.num_bytes for one in book.hot.hottest(NAMESPACE))
    assert len(book.lengths()) >= 6
    kept = [one.tokens[0] for one in book.hot.hottest(NAMESPACE)]
    assert kept == sorted(kept, reverse=True)
    for number in range(MAX_COUNTED // 5):
        book.reused(prompt((1000 + number, 20)), 20)
    assert len(book.hot._counted) <= MAX_COUNTED
    assert book.hot.num_bytes == sum(one.num_bytes for one in book.hot.hottest(NAMESPACE))


def test_a_purge_of_a_tenant_takes_what_is_hot_of_it() -> None:
    book = Book()
    book.reused(prompt((1, 40)), 40, times=3, tenant="north")
    book.reused(prompt((2, 40)), 40, times=3, scope=Scope(namespace="shared"))
    book.hot.forget(Tenant("north").salt)
    [one] = book.hot.hottest(NAMESPACE)
    assert one.tokens == prompt((2, 40)).tokens
    assert book.hot.num_bytes == one.num_bytes


# -- the replica -------------------------------------------------------------------------------------------------------


@dataclass
class FakeReplica:
    """Answers at once, or when `hold` is set."""

    name: str = "r"
    url: str = "http://r.test"
    hello: Hello = HELLO
    load: Load = field(default_factory=Load)
    joined: bool = True
    draining: bool = False
    is_own: bool = True
    in_flight: int = 0
    fails: bool = False
    got: list[tuple[EncodedPrompt, Request]] = field(default_factory=list)
    warmed_tokens: int = 0
    aborted: int = 0
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    leases: Any = field(default_factory=lambda: LeaseKeeper("r", LeaseBudget(), None, int, bool, lambda *_: 0))

    def warmed(self, num_tokens: int) -> None:
        self.warmed_tokens += num_tokens

    async def generate(
        self, prompt: EncodedPrompt, sampling: Sampling, request: Request
    ) -> AsyncGenerator[SequenceUpdate, None]:
        self.got.append((prompt, request))
        self.in_flight += 1
        try:
            if self.fails:
                raise EngineFailedError("no")
            await self.hold.wait()
            yield SequenceUpdate(0, [7], finish="length", cached_tokens=0)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.in_flight -= 1


@dataclass
class Warming:
    book: Book = field(default_factory=Book)
    replica: FakeReplica = field(default_factory=FakeReplica)
    waiting: int = 0
    held: int = 0
    looks: int = 0

    def replicas(self) -> list[FakeReplica]:
        self.looks += 1
        return [self.replica]

    async def looked(self, times: int = 3) -> None:
        end = self.looks + times
        await until(lambda: self.looks >= end)


@asynccontextmanager
async def warming_of(*hot: tuple[int, int], **state: Any) -> AsyncIterator[Warming]:
    one = Warming()
    one.replica.hold.set()
    for token, blocks in hot:
        one.book.reused(prompt((token, blocks)), blocks, times=3)
    for name, value in state.items():
        setattr(one if hasattr(one, name) else one.replica, name, value)
    warmer = Warmer(one.book.hot, one.replicas, lambda: one.waiting, lambda *_: one.held, one.book.clock)
    warmer.start()
    try:
        yield one
    finally:
        await warmer.stop()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "LOOK_S", 0.01)
    monkeypatch.setattr(warming, "GIVE_WAY_S", 0.01)


async def test_a_new_replica_computes_the_hottest_first_each_once() -> None:
    async with warming_of((1, 40), (2, 300)) as one:
        await until(lambda: one.replica.warmed_tokens == 340 * BLOCK)
        await one.looked()
        assert [len(each.tokens) for each, _ in one.replica.got] == [300 * BLOCK * 4, 40 * BLOCK * 4]
        sent = one.replica.got[0][1]
        assert (sent.lane, sent.salt, sent.prewarm) == ("batch", Tenant("north").salt, True)
        assert sent.sampling.max_tokens == 1


async def test_a_server_that_began_anew_is_warmed_again() -> None:
    async with warming_of((1, 40)) as one:
        await until(lambda: len(one.replica.got) == 1)
        one.replica.hello = replace(HELLO, incarnation="another")
        await until(lambda: len(one.replica.got) == 2)


@pytest.mark.parametrize(
    "state",
    [
        {"waiting": 1},
        {"held": 40},
        {"joined": False},
        {"draining": True},
        {"is_own": False},
        {"in_flight": 1},
        {"load": Load(running=1)},
        {"load": Load(waiting=1)},
        {"hello": replace(HELLO, num_blocks=79)},
        {"hello": replace(HELLO, namespace=replace(NAMESPACE, weights="other"))},
    ],
)
async def test_nothing_is_computed_that_is_not_wanted(state: dict[str, Any]) -> None:
    async with warming_of((1, 40), **state) as one:
        await one.looked(5)
        assert one.replica.got == []


async def test_no_more_than_its_share_of_the_cache_is_filled() -> None:
    hot = [(token, 100) for token in range(1, 9)]
    async with warming_of(*hot) as one:
        await until(lambda: one.replica.warmed_tokens == 500 * BLOCK)
        await one.looked(5)
        assert len(one.replica.got) == 5


@pytest.mark.parametrize("comes", ["waiting", "in_flight", "load"])
async def test_it_is_given_up_when_a_request_comes(comes: str) -> None:
    async with warming_of((1, 40)) as one:
        one.replica.hold.clear()
        one.replica.got.clear()
        one.book.reused(prompt((5, 50)), 50, times=3)
        await until(lambda: one.replica.in_flight == 1)
        if comes == "waiting":
            one.waiting = 1
        elif comes == "in_flight":
            one.replica.in_flight += 1
        else:
            one.replica.load = Load(running=2)
        await until(lambda: one.replica.aborted == 1)


async def test_a_refusal_is_no_failure_of_the_gateway(caplog: pytest.LogCaptureFixture) -> None:
    async with warming_of((1, 40), (2, 50), fails=True) as one:
        await until(lambda: len(one.replica.got) == 2)
        await one.looked()
    assert one.replica.warmed_tokens == 0
    assert "task" not in caplog.text

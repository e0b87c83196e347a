"""The engine's loop over tiers: it does not wait for nothing, and an idle one finds what is wrong and says so."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from engine.loop import EngineLoop
from engine.protocol import Breakpoint, Sampling, StepFrame, Submit
from engine.sequence import Step
from tests.fakes.scheduler_bench import digests_of, expected, pack, prompt
from tests.fakes.tier_bench import TierBench, make

LIMIT_S = 30.0


class Desk:
    """A loop on its thread over tiers with real copy threads, and what it answered."""

    def __init__(self, num_blocks: int) -> None:
        self.bench: TierBench = make(num_blocks)
        self.said = threading.Condition()
        self.answers: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}
        self.between: Callable[[], object] = lambda: None  # called before each step
        self.checks = 0
        self.loop = EngineLoop(
            self.bench.scheduler, self, on_frames=self.on_frames, on_blocks=lambda events: None, idle_check_s=0.01
        )
        check = self.loop._check_invariants

        def count() -> None:
            try:
                check()
            finally:
                with self.said:
                    self.checks += 1
                    self.said.notify_all()

        self.loop._check_invariants = count  # type: ignore[method-assign]

    def find_not_finite(self, blocks: list[int]) -> list[int]:
        return []

    def run(self, step: Step) -> list[int | None]:
        self.between()
        return self.bench.runner.run(step)

    def on_frames(self, frames: dict[str, StepFrame]) -> None:
        with self.said:
            for update in (update for frame in frames.values() for update in frame.updates):
                self.answers.setdefault(update.seq, []).extend(update.tokens)
                if update.finish:
                    self.ended[update.seq] = update.finish
            self.said.notify_all()

    def wait_for(self, holds: Callable[[], bool]) -> None:
        with self.said:
            assert self.said.wait_for(holds, LIMIT_S)

    def submit(self, seq: int, tokens: list[int], max_tokens: int = 2, ttl_s: float | None = None) -> None:
        points = () if ttl_s is None else (Breakpoint(len(tokens), ttl_s),)
        self.loop.submit("g", Submit(seq, pack(tokens), digests_of(tokens), Sampling(max_tokens), breakpoints=points))

    def ask(self, seq: int, tokens: list[int], ttl_s: float | None = None) -> None:
        self.submit(seq, tokens, ttl_s=ttl_s)
        self.wait_for(lambda: seq in self.ended)
        assert self.answers[seq] == expected(tokens, 2)

    def do(self, change: Callable[[], object]) -> None:
        """On the loop's thread, when everything is copied; then waits until that was checked."""
        assert self.loop.wait_idle(LIMIT_S)
        self.loop._intake.post(change)
        checks = self.checks
        self.wait_for(lambda: self.checks > checks)


@contextmanager
def running(num_blocks: int = 64) -> Iterator[Desk]:
    desk = Desk(num_blocks)
    desk.loop.start()
    try:
        yield desk
    finally:
        assert desk.loop.stop(LIMIT_S)


def device(bench: TierBench) -> None:
    bench.pool.allocate(1)


def slot(bench: TierBench) -> None:
    bench.tiers.pools[1].allocate(1)


def disk(bench: TierBench) -> None:
    bench.tiers.pools[1]._num_evictable += 1


def queue(bench: TierBench) -> None:
    assert bench.tiers._saving is not None
    bench.tiers._saving._queued_bytes += 1


def claim(bench: TierBench) -> None:
    bench.scheduler.claims._claims[None] = None  # type: ignore[index, assignment]


def unpinned(bench: TierBench) -> None:
    (lease,) = bench.scheduler.leases
    assert lease.block is not None
    bench.tiers.pools[lease.tier].end_lease(lease.block)


def pinned_twice(bench: TierBench) -> None:
    (lease,) = bench.scheduler.leases
    assert lease.block is not None
    bench.tiers.pools[lease.tier].lease(lease.block)


def miscounted(bench: TierBench) -> None:
    bench.scheduler.leases._pins._trees[0]._counts[7] = 1


def strange(bench: TierBench) -> None:
    (lease,) = bench.scheduler.leases
    lease.digest = bytes(16)


def unknown_tenant(bench: TierBench) -> None:
    bench.scheduler.leases._pins._tenant_trees.clear()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (device, "1 blocks are live and no sequence is left"),
        (slot, "disk: 1 slots are live and nothing is copied"),
        (disk, "disk: live, evictable and leaf blocks are"),
        (queue, "bytes are queued, counted as"),
        (claim, "no sequence is left"),
        (unpinned, "of tier 1, which is not leased"),
        (pinned_twice, "1 leases end in tier 1, and its blocks count 2"),
        (miscounted, "leases keep 0 blocks of tier 0, counted as 1"),
        (strange, "which holds something else"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_an_idle_engine_counts_and_logs_what_is_wrong_in_any_tier(
    harm: Callable[[TierBench], None], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with running() as desk:
        desk.ask(1, prompt(40), ttl_s=600.0)
        desk.do(lambda: None)
        assert desk.bench.scheduler.leases.stats()["blocks"] == {"device": 0, "disk": 10}
        assert desk.loop.stats()["invariant_violations"] == 0
        desk.do(lambda: harm(desk.bench))
        assert desk.loop.stats()["invariant_violations"] >= 1
        errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert any(said in line for line in errors), errors


def test_a_check_that_fails_itself_is_counted_and_ends_nothing() -> None:
    with running() as desk:
        desk.ask(1, prompt(40), ttl_s=600.0)
        desk.do(lambda: unknown_tenant(desk.bench))
        assert desk.loop.wait_idle(LIMIT_S)
        assert desk.loop.stats()["errors"] > 0
        desk.ask(2, prompt(40, 1))
        assert desk.loop.alive


def test_a_lease_that_cannot_end_does_not_end_an_idle_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as desk:
        desk.ask(1, prompt(40), ttl_s=600.0)
        leases, failed = desk.bench.scheduler.leases, threading.Event()

        def fail(*_: object) -> None:
            failed.set()
            raise RuntimeError("a book that is inconsistent")

        def end_soon() -> None:
            (lease,) = leases
            lease.expires_s = desk.loop._clock() + 0.2
            leases._ends[:] = [(lease.expires_s, lease.number, lease)]

        monkeypatch.setattr(leases, "_remove", fail)
        assert desk.loop.wait_idle(LIMIT_S)
        desk.loop._intake.post(end_soon)
        assert failed.wait(LIMIT_S)
        desk.ask(2, prompt(40, 1))
        assert desk.loop.stats()["errors"] == 1
        assert desk.loop.alive


def test_a_sequence_that_cannot_be_taken_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as desk:
        with monkeypatch.context() as patch:
            patch.setattr(desk.bench.scheduler.claims, "open", lambda *_: 1 / 0)
            desk.submit(1, prompt(40))
            desk.wait_for(lambda: 1 in desk.ended)
        assert desk.ended[1] == "abort", "another engine may take it"
        desk.ask(2, prompt(40))
        assert desk.loop.stats()["errors"] == 1


def test_a_loop_whose_last_save_has_just_ended_goes_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The save has a rest while steps run, and holds the blocks that the second sequence needs."""
    monkeypatch.setattr("engine.loop.BLOCKED_CHECK_S", 1e6)
    monkeypatch.setattr("engine.tiers.copying.time", SimpleNamespace(monotonic=itertools.count(0, 1000).__next__))
    with running(num_blocks=10) as desk:
        loop, both, steps = desk.loop, threading.Event(), itertools.count(1)

        def wait() -> None:
            """The third step begins when both sequences are there, and the copy was made that the first one began."""
            assert both.wait(LIMIT_S)
            if next(steps) == 3 and not desk.bench.tiers.tiers[1].counters.saved:
                with loop._intake._changed:
                    assert loop._intake._changed.wait_for(lambda: bool(loop._intake._commands), LIMIT_S)

        desk.between = wait
        desk.submit(1, prompt(20), max_tokens=4)
        desk.submit(2, prompt(34, 1), max_tokens=1)
        both.set()
        desk.wait_for(lambda: 2 in desk.ended)
        assert desk.answers[2] == expected(prompt(34, 1), 1)

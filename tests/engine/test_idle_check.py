"""The engine's loop over tiers: it does not wait for nothing, and an idle one finds what is wrong and says so."""

from __future__ import annotations

import itertools
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

LIMIT_S = 20.0


class Desk:
    """A loop on its thread over tiers with real copy threads, and what it answered."""

    def __init__(self, num_blocks: int, host: int) -> None:
        self.bench: TierBench = make(num_blocks, host=host)
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
        self.loop._post(change)
        checks = self.checks
        self.wait_for(lambda: self.checks > checks)


@contextmanager
def running(num_blocks: int = 64, host: int = 32) -> Iterator[Desk]:
    desk = Desk(num_blocks, host)
    desk.loop.start()
    try:
        yield desk
    finally:
        assert desk.loop.stop(LIMIT_S)


def test_a_loop_whose_last_save_has_just_ended_goes_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The save has a rest while steps run, and holds the blocks that the second sequence needs."""
    monkeypatch.setattr("engine.loop.BLOCKED_CHECK_S", 1e6)
    monkeypatch.setattr("engine.stores.time", SimpleNamespace(monotonic=itertools.count(0, 1000).__next__))
    with running(num_blocks=10, host=0) as desk:
        loop, both, steps = desk.loop, threading.Event(), itertools.count(1)

        def wait() -> None:
            """The third step begins when both sequences are there, and the copy was made that the first one began."""
            assert both.wait(LIMIT_S)
            if next(steps) == 3 and not desk.bench.tiers.tiers[1].counters.saved:
                with loop._changed:
                    assert loop._changed.wait_for(lambda: bool(loop._commands), LIMIT_S)

        desk.between = wait
        desk.submit(1, prompt(20), max_tokens=4)
        desk.submit(2, prompt(34, 1), max_tokens=1)
        both.set()
        desk.wait_for(lambda: 2 in desk.ended)
        assert desk.answers[2] == expected(prompt(34, 1), 1)

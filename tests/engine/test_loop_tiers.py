"""The loop over tiers, with its real threads: who waits for a copy waits without turning, and nobody else does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from engine.loop import EngineLoop
from engine.protocol import BlockEvents, Sampling, SequenceUpdate, StepFrame, Submit, split_digests
from engine.tiers.copying import BlockKey
from tests.fakes.scheduler_bench import digests_of, expected, pack, prompt
from tests.fakes.tier_bench import FakeDisk, make

LIMIT_S = 30.0


class GatedDisk(FakeDisk):
    """A disk that takes its time: nothing is read or written while the gate is closed."""

    def __init__(self, files: dict[bytes, Any]) -> None:
        super().__init__(files)
        self.gate, self.asked = threading.Event(), threading.Event()
        self.gate.set()

    def read(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> Any:
        self.wait()
        return super().read(slots, keys)

    def write(self, slots: Sequence[int], keys: Sequence[BlockKey], payload: Any) -> None:
        self.wait()
        super().write(slots, keys, payload)

    def wait(self) -> None:
        self.asked.set()
        assert self.gate.wait(LIMIT_S)


class Desk:
    """A loop over a disk that holds the prompt of an earlier run, and what it said."""

    def __init__(self) -> None:
        first = make()
        first.ask(1, prompt(40))
        self.disk = GatedDisk(first.disk.files)
        self.bench = make(files=self.disk, prefixes=first.runner.prefixes)
        self.said = threading.Condition()
        self.updates: dict[int, list[SequenceUpdate]] = {}
        self.told: dict[bytes, str] = {}
        self.turns = 0
        schedule = self.bench.scheduler.schedule

        def count(now: float) -> Any:
            self.turns += 1
            return schedule(now)

        self.bench.scheduler.schedule = count  # type: ignore[method-assign]
        self.loop = EngineLoop(
            self.bench.scheduler,
            self.bench.runner,
            on_frames=self.on_frames,
            on_blocks=self.on_blocks,
            idle_check_s=0.01,
        )

    def on_frames(self, frames: dict[str, StepFrame]) -> None:
        with self.said:
            for frame in frames.values():
                for update in frame.updates:
                    self.updates.setdefault(update.seq, []).append(update)
            self.said.notify_all()

    def on_blocks(self, events: BlockEvents) -> None:
        with self.said:
            for digest in split_digests(events.removed):
                del self.told[digest]
            self.told |= dict.fromkeys(split_digests(events.stored), events.tier)

    def submit(self, seq: int, tokens: list[int]) -> None:
        self.loop.submit("g", Submit(seq, pack(tokens), digests_of(tokens), Sampling(4)))

    def wait_for(self, holds: Callable[[], bool]) -> None:
        with self.said:
            assert self.said.wait_for(holds, LIMIT_S)

    def answer(self, seq: int) -> list[int]:
        self.wait_for(lambda: any(update.finish for update in self.updates.get(seq, [])))
        return [token for update in self.updates[seq] for token in update.tokens]


@contextmanager
def running() -> Iterator[Desk]:
    desk = Desk()
    desk.loop.start()
    try:
        assert desk.loop.wait_restored(LIMIT_S)
        yield desk
    finally:
        desk.disk.gate.set()
        assert desk.loop.wait_idle(LIMIT_S)
        assert desk.loop.stop(LIMIT_S)
    stats = desk.loop.stats()
    assert (stats["errors"], stats["invariant_violations"]) == (0, 0)
    desk.bench.told |= desk.told  # type: ignore[arg-type]
    desk.bench.listen()
    desk.bench.check_contents()


def test_what_an_earlier_run_left_is_told_and_found() -> None:
    with running() as desk:
        digests = split_digests(digests_of(prompt(40)))
        assert {desk.told[digest] for digest in digests} == {"disk"}
        desk.submit(1, prompt(40))
        assert desk.answer(1) == expected(prompt(40))
        assert desk.updates[1][0].cached_tokens == 36
        assert {desk.told[digest] for digest in digests[:9]} == {"device"}


def test_a_loop_whose_only_sequence_waits_for_a_copy_does_not_turn() -> None:
    with running() as desk:
        desk.disk.gate.clear()
        desk.disk.asked.clear()
        desk.submit(1, prompt(40))
        assert desk.disk.asked.wait(LIMIT_S)
        turns = desk.turns
        assert not desk.loop.wait_idle(0.05)
        assert desk.turns - turns <= 1
        desk.disk.gate.set()
        assert desk.answer(1) == expected(prompt(40))
        assert desk.updates[1][0].cached_tokens == 36


def test_others_are_answered_while_one_waits_for_a_slow_disk() -> None:
    with running() as desk:
        desk.disk.gate.clear()
        desk.submit(1, prompt(40))
        for seq in range(2, 6):
            desk.submit(seq, prompt(20, seq))
        for seq in range(2, 6):
            assert desk.answer(seq) == expected(prompt(20, seq))
        assert 1 not in desk.updates
        desk.disk.gate.set()
        assert desk.answer(1) == expected(prompt(40))


def test_a_drain_waits_for_what_is_still_to_be_saved() -> None:
    with running() as desk:
        desk.disk.gate.clear()
        desk.submit(1, prompt(20, 7))
        assert desk.answer(1) == expected(prompt(20, 7))
        desk.loop.drain()
        assert not desk.loop.wait_idle(0.05)
        assert split_digests(digests_of(prompt(20, 7)))[0] not in desk.disk.files
        desk.disk.gate.set()
        assert desk.loop.wait_idle(LIMIT_S)
        assert split_digests(digests_of(prompt(20, 7)))[0] in desk.disk.files


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_that_is_stopped_does_not_wait_for_a_hung_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.tiers.copying.CLOSE_LIMIT_S", 0.05)
    desk = Desk()
    desk.loop.start()
    assert desk.loop.wait_restored(LIMIT_S)
    desk.disk.gate.clear()
    desk.submit(1, prompt(40))
    assert desk.disk.asked.wait(LIMIT_S)
    assert desk.loop.stop(LIMIT_S)
    assert desk.updates[1][-1].error == "the engine was stopped"
    desk.disk.gate.set()

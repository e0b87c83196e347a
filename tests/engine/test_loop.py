"""The engine's loop on its thread: commands in, frames and block events out, whatever the model does."""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine.loop import NO_OWNER, EngineLoop
from engine.protocol import BlockEvents, Breakpoint, Load, Sampling, SequenceUpdate, StepFrame, Submit, split_digests
from engine.sequence import Step
from tests.fakes.oracle_runner import OracleRunner, choose_answer
from tests.fakes.scheduler_bench import VOCAB, digests_of, expected, make, pack, prompt

LIMIT_S = 30.0
SECRET_TOKENS = prompt(10)


class Gate:
    """A runner that waits in the middle of a step until it is let through, when it is closed."""

    def __init__(self, runner: OracleRunner) -> None:
        self.inner = runner
        self.entered = threading.Event()
        self.open = threading.Event()
        self.open.set()
        self.answer: Callable[[Step], list[int | None]] = runner.run

    def close(self) -> None:
        self.entered.clear()
        self.open.clear()

    def find_not_finite(self, blocks: list[int]) -> list[int]:
        return []

    def run(self, step: Step) -> list[int | None]:
        self.entered.set()
        assert self.open.wait(LIMIT_S)
        return self.answer(step)


class Desk:
    """A loop with a fake model, and everything that it said."""

    def __init__(self, **changes: Any) -> None:
        loop_options = {name: changes.pop(name) for name in ("max_pending", "idle_check_s") if name in changes}
        self.bench = make(changes.pop("num_blocks", 64), **changes)
        self.gate = Gate(self.bench.runner)
        self.said = threading.Condition()
        self.updates: dict[tuple[str, int], list[SequenceUpdate]] = {}
        self.loads: list[tuple[str, Load]] = []
        self.resident: set[bytes] = set()
        self.order: list[str] = []
        self.loop = EngineLoop(
            self.bench.scheduler, self.gate, on_frames=self.on_frames, on_blocks=self.on_blocks, **loop_options
        )

    def on_frames(self, frames: dict[str, StepFrame]) -> None:
        with self.said:
            self.order.append("frames")
            for owner, frame in frames.items():
                self.loads.append((owner, frame.load))
                for update in frame.updates:
                    self.updates.setdefault((owner, update.seq), []).append(update)
            self.said.notify_all()

    def on_blocks(self, events: BlockEvents) -> None:
        with self.said:
            self.order.append("blocks")
            self.resident -= set(split_digests(events.removed))
            self.resident |= set(split_digests(events.stored))

    def submit(self, seq: int, tokens: list[int], *, owner: str = "g", lane: Any = "online", **sampling: Any) -> None:
        sampling.setdefault("max_tokens", 4)
        self.loop.submit(owner, Submit(seq, pack(tokens), digests_of(tokens), Sampling(**sampling), lane=lane))

    def wait_for(self, holds: Callable[[], bool]) -> None:
        with self.said:
            assert self.said.wait_for(holds, LIMIT_S)

    def end_of(self, seq: int, owner: str = "g") -> SequenceUpdate:
        """The last update of a sequence, when it is there."""

        def ended() -> bool:
            return any(update.finish for update in self.updates.get((owner, seq), []))

        self.wait_for(ended)
        return self.updates[owner, seq][-1]

    def answer(self, seq: int, owner: str = "g") -> list[int]:
        self.end_of(seq, owner)
        return [token for update in self.updates[owner, seq] for token in update.tokens]


@contextmanager
def running(**changes: Any) -> Iterator[Desk]:
    desk = Desk(**changes)
    desk.loop.start()
    try:
        yield desk
    finally:
        desk.gate.open.set()
        assert desk.loop.stop(LIMIT_S)
        pool = desk.bench.pool
        assert pool.check_invariants() == []
        assert pool.num_live == 0
        assert desk.resident == set(split_digests(pool.prefixes.snapshot().stored))


def test_a_sequence_is_answered_step_by_step() -> None:
    with running() as desk:
        desk.submit(1, prompt(40))
        assert desk.answer(1) == expected(prompt(40))
        first, *rest = desk.updates["g", 1]
        assert first.cached_tokens == 0
        assert first.queue_ms is not None
        assert first.prefill_ms is not None
        assert all(update.cached_tokens is None for update in rest)
        desk.submit(2, prompt(40), owner="other")
        assert desk.answer(2, "other") == expected(prompt(40))
        assert desk.updates["other", 2][0].cached_tokens == 36


def test_blocks_are_told_before_the_frames_of_their_step() -> None:
    with running() as desk:
        desk.submit(1, prompt(40), max_tokens=1)
        desk.end_of(1)
        assert desk.order == ["blocks", "frames"]
        assert len(desk.resident) == 10


def test_frames_carry_load_and_measured_rates() -> None:
    with running() as desk:
        desk.submit(1, prompt(40), max_tokens=8)
        desk.end_of(1)
        owner, load = desk.loads[-1]
        assert owner == "g"
        assert load == desk.loop.load
        assert load.prefill_tokens_per_s > 0
        assert load.decode_tokens_per_s > 0
        assert (load.running, load.waiting, load.live_blocks) == (0, 0, 0)
        assert load.free_blocks + load.cached_blocks == 64


def test_a_refused_sequence_is_answered_with_the_reason() -> None:
    with running() as desk:
        desk.submit(1, [])
        assert "empty" in (desk.end_of(1).error or "")


def test_more_pending_submits_than_the_limit_are_refused_without_being_kept() -> None:
    desk = Desk(max_pending=2)
    for seq in range(3):
        desk.submit(seq, prompt(10, seq))
    desk.loop.start()
    assert "just arrived" in (desk.end_of(2).error or "")
    assert desk.answer(1) == expected(prompt(10, 1))
    desk.submit(3, prompt(10, 3))
    assert desk.answer(3) == expected(prompt(10, 3))
    assert desk.loop.stop(LIMIT_S)


def test_a_failing_step_ends_its_sequences_and_the_next_one_works(caplog: pytest.LogCaptureFixture) -> None:
    with running() as desk:
        desk.bench.runner.fails = True
        desk.submit(1, SECRET_TOKENS)
        update = desk.end_of(1)
        assert update.error == "the engine could not compute a step (RuntimeError)"
        assert desk.resident == set()
        desk.submit(2, prompt(20, 1))
        assert desk.answer(2) == expected(prompt(20, 1))
        assert desk.loop.stats()["failed_steps"] == 1
        (record,) = [record for record in caplog.records if record.name == "engine.loop"]
        assert record.exc_info is not None
        assert ", ".join(map(str, SECRET_TOKENS)) not in record.getMessage()


def test_results_that_do_not_match_the_step_fail_it() -> None:
    with running() as desk:
        desk.gate.answer = lambda step: []
        desk.submit(1, prompt(10))
        assert desk.end_of(1).finish == "error"
        desk.gate.answer = desk.bench.runner.run
        desk.submit(2, prompt(10))
        assert desk.answer(2) == expected(prompt(10))


def test_an_error_in_the_scheduler_ends_all_sequences_but_not_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as desk:
        with monkeypatch.context() as patch:
            patch.setattr(desk.bench.scheduler, "schedule", lambda now: 1 / 0)
            desk.submit(1, prompt(10))
            assert desk.end_of(1).error == "the engine had an internal error"
        desk.submit(2, prompt(10))
        assert desk.answer(2) == expected(prompt(10))
        assert desk.loop.alive
        assert desk.loop.stats()["errors"] == 1


def test_a_failing_callback_does_not_stop_the_loop() -> None:
    with running() as desk:
        deliver = desk.on_blocks
        desk.loop._on_blocks = lambda events: (deliver(events), 1 / 0)[0]
        desk.submit(1, prompt(10), max_tokens=1)
        assert desk.answer(1) == expected(prompt(10), 1)
        assert desk.loop.stats()["errors"] == 1


def test_an_abort_while_a_step_runs_frees_once_and_says_nothing() -> None:
    with running() as desk:
        desk.gate.close()
        desk.submit(1, prompt(10), max_tokens=30)
        desk.submit(2, prompt(10, 1), owner="other", max_tokens=30)
        assert desk.gate.entered.wait(LIMIT_S)
        desk.loop.abort("g", 1)
        desk.loop.abort_owner("other")
        desk.loop.abort_owner("other")
        desk.gate.open.set()
        assert desk.loop.wait_idle(LIMIT_S)
        assert not any(update.finish for updates in desk.updates.values() for update in updates)
        assert desk.bench.pool.num_live == 0
        assert desk.loop.stats()["finished"]["abort"] == 2


def test_load_is_told_when_an_abort_changed_it() -> None:
    with running() as desk:
        desk.gate.close()
        desk.submit(1, prompt(10), max_tokens=30)
        assert desk.gate.entered.wait(LIMIT_S)
        desk.loop.abort("g", 1)
        desk.gate.open.set()
        desk.wait_for(lambda: bool(desk.loads) and desk.loads[-1][1].running == 0)
        assert desk.loads[-1][0] == NO_OWNER


def test_draining_refuses_the_new_and_finishes_the_old() -> None:
    with running(max_sequences=1) as desk:
        desk.gate.close()
        desk.submit(1, prompt(10))
        desk.submit(2, prompt(10, 1))
        assert desk.gate.entered.wait(LIMIT_S)
        desk.loop.drain()
        desk.submit(3, prompt(10, 2))
        assert not desk.loop.wait_idle(0)
        desk.gate.open.set()
        assert desk.loop.wait_idle(LIMIT_S)
        assert "draining" in (desk.end_of(3).error or "")
        assert desk.answer(1) == expected(prompt(10))
        assert desk.answer(2) == expected(prompt(10, 1))
        assert desk.loop.load.draining


def test_stopping_ends_what_is_left_with_an_error() -> None:
    with running() as desk:
        desk.gate.close()
        desk.submit(1, prompt(10), max_tokens=30)
        assert desk.gate.entered.wait(LIMIT_S)
        assert not desk.loop.stop(0)
        desk.gate.open.set()
        assert desk.loop.stop(LIMIT_S)
        assert desk.end_of(1).error == "the engine was stopped"
        assert not desk.loop.alive


def test_a_loop_that_never_started_stops() -> None:
    assert Desk().loop.stop()


def test_an_idle_loop_waits_and_does_not_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(idle_check_s=0.01) as desk:
        checked, turns = threading.Event(), list[int]()
        check, schedule = desk.bench.pool.check_invariants, desk.bench.scheduler.schedule
        monkeypatch.setattr(desk.bench.pool, "check_invariants", lambda: (checked.set(), check())[1])
        monkeypatch.setattr(desk.bench.scheduler, "schedule", lambda now: (turns.append(1), schedule(now))[1])
        desk.submit(1, prompt(10), max_tokens=1)
        assert checked.wait(LIMIT_S)
        assert desk.loop.wait_idle(LIMIT_S)
        assert len(turns) == 1


def test_an_unsound_pool_is_logged_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running(idle_check_s=0.01) as desk:
        checked = threading.Event()
        monkeypatch.setattr(
            desk.bench.pool, "check_invariants", lambda: (checked.set(), ["block 7 is in two places"])[1]
        )
        desk.submit(1, prompt(10), max_tokens=1)
        assert checked.wait(LIMIT_S)
        assert desk.loop.wait_idle(LIMIT_S)
        assert desk.loop.stats()["invariant_violations"] >= 1
        assert any(r.levelno == logging.ERROR and "block 7" in r.getMessage() for r in caplog.records)
        monkeypatch.undo()


def test_stats_are_json() -> None:
    with running() as desk:
        desk.submit(1, prompt(40))
        desk.end_of(1)
        stats = json.loads(json.dumps(desk.loop.stats()))
        assert stats["finished"] == {"stop": 0, "length": 1, "abort": 0, "error": 0}
        assert (stats["submitted"], stats["prompt_tokens"], stats["prefilled_tokens"]) == (1, 40, 40)
        assert (stats["decoded_tokens"], stats["steps"], stats["invariant_violations"]) == (3, 4, 0)


def test_an_idle_loop_tells_when_a_lease_has_ended() -> None:
    with running(idle_check_s=0.01) as desk:
        points = (Breakpoint(30, 1.0),)
        desk.loop.submit("g", Submit(1, pack(prompt(40)), digests_of(prompt(40)), Sampling(4), breakpoints=points))
        desk.end_of(1)
        assert desk.updates["g", 1][0].lease_write_tokens == 30
        desk.wait_for(lambda: desk.loads[-1][1].leased_blocks == 0 and desk.loop.load.leased_blocks == 0)
        assert max(load.leased_blocks for _, load in desk.loads) == 7
        stats = json.loads(json.dumps(desk.loop.stats()))["leases"]
        assert (stats["kept"], stats["granted"], stats["expired"], stats["blocks"]) == (0, 1, 1, {"device": 0})
        assert desk.loop.stats()["invariant_violations"] == 0


def test_many_gateways_at_once_get_their_own_answers() -> None:
    with running(num_blocks=24, max_sequences=5, context_tokens=80, idle_check_s=0.0) as desk:
        aborted: set[tuple[str, int]] = set()

        def gateway(owner: str) -> None:
            rng = random.Random(owner)
            for seq in range(40):
                desk.submit(
                    seq, prompt(rng.randint(1, 40), rng.randrange(3)), owner=owner, max_tokens=rng.randint(1, 20)
                )
                if rng.random() < 0.3:
                    aborted.add((owner, seq))
                    desk.loop.abort(owner, seq)

        threads = [threading.Thread(target=gateway, args=(f"g{number}",)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert desk.loop.wait_idle(LIMIT_S)
        for owner in ("g0", "g1", "g2", "g3"):
            rng = random.Random(owner)
            for seq in range(40):
                tokens = prompt(rng.randint(1, 40), rng.randrange(3))
                max_tokens = rng.randint(1, 20)
                rng.random()
                if (owner, seq) not in aborted:
                    assert desk.answer(seq, owner) == choose_answer("", tokens, VOCAB, max_tokens, frozenset())
        assert desk.loop.stats()["invariant_violations"] == 0


def test_a_step_of_the_batch_lane_is_given_up_when_somebody_comes_to_the_online_lane() -> None:
    with running() as desk:
        desk.gate.close()
        desk.submit(1, prompt(40), lane="batch", max_tokens=3)
        assert desk.gate.entered.wait(LIMIT_S)
        desk.submit(2, prompt(20, 1), max_tokens=2)
        desk.gate.open.set()
        assert desk.answer(2) == expected(prompt(20, 1), 2)
        assert desk.answer(1) == expected(prompt(40), 3)
        assert [{seq for seq, *_ in step} for step in desk.bench.runner.steps[:3]] == [{1}, {2}, {1, 2}]
        assert desk.loop.stats()["steps_given_up"] == 1


def test_nothing_is_given_up_for_the_batch_lane_nor_what_the_online_lane_prefills() -> None:
    with running() as desk:
        for seq, lane, newcomer in ((1, "batch", "batch"), (3, "online", "online")):
            desk.gate.close()
            desk.submit(seq, prompt(40, seq), lane=lane)
            assert desk.gate.entered.wait(LIMIT_S)
            desk.submit(seq + 1, prompt(20, seq + 1), lane=newcomer)
            desk.gate.open.set()
            assert desk.answer(seq) == expected(prompt(40, seq))
            assert desk.answer(seq + 1) == expected(prompt(20, seq + 1))
        assert desk.loop.stats()["steps_given_up"] == 0


def test_the_batch_lane_goes_on_however_often_somebody_comes() -> None:
    """Whoever comes while a step of the batch lane is computed has no prompt to speak of, and is gone at once."""
    with running() as desk:
        seqs = iter(range(2, 1000))
        run = desk.gate.inner.run

        def interrupted(step: Step) -> list[int | None]:
            if any(work.sequence.lane == "batch" for work in step.work):
                desk.submit(next(seqs), prompt(1), max_tokens=1)
            return run(step)

        desk.gate.answer = interrupted
        desk.submit(1, prompt(60), lane="batch", max_tokens=8)
        assert desk.answer(1) == expected(prompt(60), 8)
        assert desk.loop.stats()["steps_given_up"] >= 8

"""The one thread that owns the model: commands -> schedule -> run -> commit -> publish.

Everything that touches sequences, blocks or the model happens on this thread, so nothing of it needs a lock. Other
threads post commands and are answered through two callbacks. A step that fails ends the sequences it served and nothing
else. Knows nothing about HTTP or tensors; engine/server.py drives it, engine/intake.py is where other threads meet it,
engine/compute/runner.py is the model.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.intake import Intake
from engine.protocol import BlockEvents, Load, StepFrame, Submit
from engine.scheduler import Scheduler
from engine.sequence import Step, StepGivenUp
from engine.tiers.copying import CopyThread
from engine.tiers.tier import PurgeReport
from engine.utilisation import Rate, Utilisation

if TYPE_CHECKING:
    from engine.compute.runner import ModelRunner

log = logging.getLogger(__name__)

GRAMMAR_CHECK_S = 0.002
"""While nothing can run before a process of a grammar says something, the loop looks again after so many seconds."""

BLOCKED_CHECK_S = 1.0
"""While every sequence waits for a copy between tiers, and none is done, the loop looks again after so many seconds."""

IDLE_CHECK_S = 1.0
"""The pool is recounted after so many idle seconds, not at once: the next request may be on its way."""

MAX_GIVEN_UP = 4
"""Steps of the batch lane in a row that are given up for the online lane; the next one runs to its end."""

STOPPED = "the engine was stopped"

NO_OWNER = ""
"""Owner of a frame that has no updates: only the load changed."""


class EngineLoop:
    """Runs sequences of all gateways on one thread of its own.

    on_blocks   what became findable or ceased to be; called before the frames of the same step
    on_frames   owner -> what a step did for its sequences; also called with NO_OWNER when only the load changed
    utilisation of the machine, where that is counted
    max_pending submits that are posted and not yet taken; more are refused, like those beyond max_waiting

    Both callbacks run on the loop's thread, at most once per step (on_blocks once for each tier), and must not block.
    Every method may be called from any thread; none but `stop` and `wait_idle` waits for a step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        *,
        on_frames: Callable[[dict[str, StepFrame]], None],
        on_blocks: Callable[[BlockEvents], None],
        utilisation: Utilisation | None = None,
        max_pending: int = 4096,
        clock: Callable[[], float] = time.monotonic,
        idle_check_s: float = IDLE_CHECK_S,
    ) -> None:
        self._scheduler = scheduler
        self._tiers = scheduler.tiers
        self._runner = runner
        scheduler.tables.find_not_finite = runner.find_not_finite
        self._on_frames = on_frames
        self._on_blocks = on_blocks
        self._intake = Intake(max_pending=max_pending, restored=self._tiers.disk is None)
        self._clock = clock
        self._idle_check_s = idle_check_s
        self._blocked = False  # sequences are left, and none can run before a copy is done

        self._prefill_rate = Rate()
        self._decode_rate = Rate()
        self._utilisation = utilisation
        self._load = self._measure()
        self._given_up = 0  # steps in a row, of those that could be
        self._failed_steps = 0
        self._errors = 0
        self._invariant_violations = 0
        self._started_s = clock()
        self._busy_s = 0.0
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    # -- for other threads --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread, that of the disk, and what compiles grammars. Once."""
        self._tiers.start(lambda name: CopyThread(name, self._intake.post), self._clock())
        if self._scheduler.grammars is not None:
            self._scheduler.grammars.start()
        self._thread.start()

    def submit(self, owner: str, message: Submit) -> None:
        """Hands over a new sequence. One that cannot be taken is answered with an update that finishes it with an
        error, like every other failure."""
        self._intake.submit(partial(self._take, owner, message, self._clock()), online=message.lane == "online")

    def abort(self, owner: str, seq: int) -> None:
        """Ends a sequence, if it is still there. Answered by nothing."""
        self._intake.post(partial(self._scheduler.abort, owner, seq))

    def abort_owner(self, owner: str) -> None:
        """Ends every sequence of a gateway. Answered by nothing."""
        self._intake.post(partial(self._scheduler.abort_owner, owner))

    def purge(self, prefix: str, deliver: Callable[[PurgeReport | None], None]) -> None:
        """Makes everything whose salt begins so unfindable, in all tiers. Calls `deliver` on the loop's thread when it
        is gone from disk too and the index has it; with None when it cannot be done now. See Scheduler.purge."""

        def report_later(report: PurgeReport | None) -> None:
            self._intake.post(partial(deliver, report))  # in a later turn: this one has not updated the index yet

        self._intake.post(partial(self._scheduler.purge, prefix, report_later))

    def drain(self) -> None:
        """From now on new sequences are refused; those that are here run to their end. See `wait_idle`."""
        self._intake.drain()
        self._intake.post(lambda: None)  # so that gateways hear of it

    def wait_idle(self, timeout_s: float) -> bool:
        """Blocks until no sequence is left, nothing is to be saved and no command waits. False when it took too
        long."""
        return self._intake.wait_idle(timeout_s)

    def wait_restored(self, timeout_s: float) -> bool:
        """Blocks until what the last run left on disk can be found. False when that takes longer."""
        return self._intake.wait_restored(timeout_s)

    def stop(self, timeout_s: float | None = None) -> bool:
        """Ends the thread after its current step; sequences that are left end with an error. False when the step
        takes longer than `timeout_s`. A loop that was never started is stopped at once."""
        self._intake.stop()
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        """Whether the thread runs: an engine whose loop is gone is not healthy."""
        return self._thread.is_alive()

    @property
    def load(self) -> Load:
        """As of the last step."""
        return self._load

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and the load; values for JSON."""
        return {
            **asdict(self._scheduler.counters),
            "evictions": self._scheduler.pool.evictions,
            "failed_steps": self._failed_steps,
            "errors": self._errors,
            "invariant_violations": self._invariant_violations,
            "num_blocks": self._scheduler.pool.num_blocks,
            "block_size": self._scheduler.pool.block_size,
            "uptime_s": self._clock() - self._started_s,
            "busy_s": self._busy_s,
            "leases": self._scheduler.leases.stats(),
            "load": asdict(self._load),
            "tiers": self._tiers.stats(),
            **({} if self._utilisation is None else {"utilisation": self._utilisation.stats()}),
        }

    # -- the loop's own thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait():
                try:
                    self._turn()
                except Exception:
                    self._errors += 1
                    log.exception("an error in the engine's loop: every sequence is ended")
                    self._scheduler.fail_all("the engine had an internal error")
                    self._publish()
            self._scheduler.fail_all(STOPPED)
            self._publish()
        finally:
            self._tiers.close()
            if self._scheduler.grammars is not None:
                self._scheduler.grammars.close()
            self._intake.close()

    def _wait(self) -> bool:
        """Returns as soon as there is something to do; False when that is to stop."""
        if self._tiers.pump_wanted:
            return not self._intake.stopping
        if self._scheduler.has_work:
            if self._blocked:
                self._sleep(GRAMMAR_CHECK_S if self._waits_for_grammars else BLOCKED_CHECK_S)
        elif self._waits_for_grammars:
            self._sleep(GRAMMAR_CHECK_S)
        elif not self._sleep(self._idle_check_s):
            if self._tiers.idle and not self._scheduler.num_held:
                self._obey(self._check_invariants, "the check of an idle engine")
            while not self._sleep(self._until_leases_change()):
                self._obey(self._tend_leases, "the end of a lease")
        return not self._intake.stopping

    @property
    def _waits_for_grammars(self) -> bool:
        return self._scheduler.grammars is not None and self._scheduler.grammars.waits

    def _tend_leases(self) -> None:
        self._scheduler.leases.expire(self._clock())
        self._tiers.pump(self._clock())
        self._publish()  # an idle engine, too, says what it keeps

    def _until_leases_change(self) -> float | None:
        """Seconds until one ends, or they are to be written; None when neither is going to happen."""
        times = [at_s for at_s in (self._scheduler.leases.next_end_s(), self._tiers.next_s) if at_s is not None]
        return min(max(0.0, min(times) - self._clock()), threading.TIMEOUT_MAX) if times else None

    def _sleep(self, timeout_s: float | None) -> bool:
        """Waits for a command. False when none came in time."""
        idle = not self._scheduler.has_work and self._tiers.saved and not self._scheduler.num_held
        return self._intake.sleep(timeout_s, idle=idle, restored=self._tiers.ready)

    def _turn(self) -> None:
        # 1. Commands, in the order in which they came.
        for command in self._intake.take_commands():
            self._obey(command)
        if self._scheduler.grammars is not None:
            self._obey(self._scheduler.grammars.pump, "the processes of grammars")
        # 2. What to compute, 3. compute it, 4. what it means for each sequence.
        began_s = self._clock()
        step = self._scheduler.schedule(began_s)
        if step is not None:
            self._compute(step, began_s)
        # 5. What was computed is saved in the background. 6. Tell the gateways.
        self._tiers.pump(self._clock(), steps_run=step is not None and self._scheduler.has_work)
        # A save that had a rest may just have let go of blocks. Masks that are late say when they are there.
        self._blocked = step is None and (self._tiers.busy or self._scheduler.waits_for_masks)
        self._publish()

    def _take(self, owner: str, message: Submit, arrived_s: float, refusal: str | None) -> None:
        try:
            self._scheduler.submit(owner, message, arrived_s, refusal=refusal)
        except Exception:
            self._errors += 1
            log.exception("a sequence could not be taken")
            self._scheduler.abort(owner, message.seq)
            self._scheduler.submit(owner, message, arrived_s, refusal="the engine had an internal error")

    def _obey(self, command: Callable[[], object], name: str = "a command of a gateway") -> None:
        """What fails is counted and logged, and ends nothing else."""
        try:
            command()
        except Exception:
            self._errors += 1
            log.exception("%s failed", name)

    def _compute(self, step: Step, began_s: float) -> None:
        can_give_up = self._scheduler.can_give_up(step)
        if can_give_up and self._given_up < MAX_GIVEN_UP:
            step = replace(step, unwanted=lambda: self._intake.online_arrived)
        try:
            results = self._runner.run(step)
            if len(results) != step.num_results:
                raise RuntimeError(f"{len(results)} results for {step.num_results} works and forks")
        except StepGivenUp:
            self._given_up += 1
            self._scheduler.give_up(step)
            return
        except Exception as error:
            self._failed_steps += 1
            log.exception("a step of %d sequences and %d rows failed", step.num_results, step.num_rows)
            self._scheduler.fail(step, f"the engine could not compute a step ({type(error).__name__})")
            return
        if can_give_up:
            self._given_up = 0
        now_s = self._clock()
        counters = self._scheduler.counters
        prefilled, decoded = counters.prefilled_tokens, counters.decoded_tokens
        self._scheduler.commit(step, results, now_s)
        self._busy_s += now_s - began_s
        self._scheduler.learn(step, now_s - began_s)
        if self._utilisation is not None:
            self._utilisation.add(step, now_s - began_s)
        if prefilled := counters.prefilled_tokens - prefilled:
            self._prefill_rate.add(prefilled, now_s - began_s)
        if decoded := counters.decoded_tokens - decoded:
            self._decode_rate.add(decoded, now_s - began_s)

    def _publish(self) -> None:
        """Blocks first: when a gateway reads the end of an answer, its blocks are in the index."""
        for events in self._tiers.residency.take():
            self._obey(partial(self._on_blocks, events), "a callback of the engine's loop")
        load, before = self._measure(), self._load
        self._load = load
        frames = {owner: StepFrame(updates, load) for owner, updates in self._scheduler.take_updates().items()}
        if not frames and load != before:
            frames = {NO_OWNER: StepFrame([], load)}
        if frames:
            self._obey(partial(self._on_frames, frames), "a callback of the engine's loop")

    def _measure(self) -> Load:
        return replace(
            self._scheduler.load(),
            prefill_tokens_per_s=self._prefill_rate.per_s,
            decode_tokens_per_s=self._decode_rate.per_s,
            draining=self._intake.draining,
        )

    def _check_invariants(self) -> None:
        """Recounts the pools of all tiers, the queues and the leases. Nothing runs and nothing is copied, so nothing is
        live."""
        scheduler = self._scheduler
        wrong = [f"device: {line}" for line in scheduler.pool.check_invariants()]
        wrong += [*self._tiers.check_invariants(), *scheduler.leases.check_invariants()]
        if scheduler.pool.num_live or len(scheduler.tables) or len(scheduler.claims) or scheduler.num_groups:
            wrong.append(f"{scheduler.pool.num_live} blocks are live and no sequence is left")
        self._invariant_violations += len(wrong)
        for line in wrong[:10]:
            log.error("an idle engine is inconsistent: %s", line)

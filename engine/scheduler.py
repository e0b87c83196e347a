"""Decides what the next step computes, and what a finished step means for each sequence.

Continuous batching under one token budget: every running decode gets its token, prefills get what is left, cut on a
canonical grid so that a warm answer is computed like a cold one. The online lane goes before the batch lane, within a
lane first come, first served. Who runs out of blocks is recomputed later: the youngest first.

              submit                admit                      commit: stop, length, not finite
    gateway ---------> waiting ----------------> running ----------------------------------------> finished
                          ^                         |
                          '-------- preempt --------'          abort ends a sequence anywhere

Pure bookkeeping: no threads, no clock, no model. engine/loop.py calls it from its one thread: schedule, then commit or
fail, then take_updates. engine/tables.py keeps the blocks of the sequences.
"""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice

from engine.blocks import BlockPool
from engine.claims import Claims
from engine.config import EngineSettings
from engine.leases import Leases
from engine.plan import Plan, choose_cut, is_prefill
from engine.protocol import TOKEN_BYTES, FinishReason, Lane, Load, Namespace, SequenceUpdate, Submit, split_digests
from engine.refusals import LANES, Limits, find_mistake
from engine.sequence import NOT_FINITE, Sequence, Status, Step
from engine.tables import BlockTables, digests_fit
from engine.tiers import Tier, Tiers

log = logging.getLogger(__name__)

COPY_WAIT_S = 2.0
"""So long a sequence waits for copies between tiers to give blocks back, before leases do, when nothing else will."""


@dataclass(slots=True)
class Counters:
    """What happened since the start; sequences, tokens or events, as the name says."""

    submitted: int = 0
    refused: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})
    not_finite: int = 0
    preemptions: int = 0
    shared_waits: int = 0  # times a waiting sequence was passed over while another computed their common prefix
    shared_tokens: int = 0  # of cached_tokens, those that another computed after the sequence had arrived
    steps: int = 0
    prompt_tokens: int = 0  # of sequences at their first admission
    cached_tokens: int = 0  # of those, reused
    prefilled_tokens: int = 0  # computed, recomputation after preemption included
    decoded_tokens: int = 0


class Scheduler:
    """Sequences of all gateways, from submit to finish.

    context_tokens  prompt and completion together
    vocab_size      token ids are below it
    eos_ids         end a sequence unless its sampling ignores them
    tiers           the pool's and those below it; the pool's alone when not given
    """

    def __init__(
        self,
        pool: BlockPool,
        namespace: Namespace,
        settings: EngineSettings,
        *,
        context_tokens: int,
        vocab_size: int,
        eos_ids: tuple[int, ...] = (),
        tiers: Tiers | None = None,
    ) -> None:
        assert namespace.block_size == pool.block_size, "the namespace and the pool disagree about the block size"
        self.pool = pool
        self.tiers = tiers or Tiers([Tier("gpu", pool)])
        assert self.tiers.pools[0] is pool, "the first tier is the pool"
        self.tables = BlockTables(pool, namespace, self.tiers)
        self.leases = Leases(
            pool,
            share=settings.lease_share,
            tenant_share=settings.lease_tenant_share,
            max_leases=settings.max_leases,
        )
        for tier in self.tiers.lower:
            self.leases.add_tier(tier.name, tier.pool)
        self.tiers.on_saved = self.leases.saved
        self.tiers.on_lost = self.leases.drop_lost
        self.counters = Counters()
        self.claims = Claims(self.leases, pool.block_size)
        self._limits = Limits(
            context_tokens=context_tokens,
            room_tokens=pool.num_blocks * pool.block_size,
            vocab_size=vocab_size,
            lease_max_s=settings.lease_max_s,
        )
        self._context_tokens = context_tokens
        self._eos_ids = frozenset(eos_ids)
        self._max_waiting = settings.max_waiting
        self._step_tokens = settings.step_tokens
        self._max_running = min(settings.max_sequences, settings.step_tokens)  # every decode fits in a step
        self._grid = min(settings.prefill_grid_tokens, settings.step_tokens)
        self._prefills_first = False
        self._waiting_since_s: float | None = None  # the head of a queue for copies, while nothing runs

        self._sequences: dict[str, dict[int, Sequence]] = {}  # owner -> seq -> sequence that is not finished
        self._waiting: dict[Lane, OrderedDict[Sequence, None]] = {lane: OrderedDict() for lane in LANES}
        self._running: dict[Lane, dict[Sequence, None]] = {lane: {} for lane in LANES}
        self._waiting_tokens = 0
        self._updates: dict[str, list[SequenceUpdate]] = {}

    # -- commands -----------------------------------------------------------------------------------------------------

    def submit(self, owner: str, message: Submit, arrived_s: float, *, refusal: str | None = None) -> Sequence | None:
        """Queues a new sequence, or answers it with its last update and returns None: finish "error" for one that can
        never run, "abort" for one that there is no room for now, or that comes with a `refusal`."""
        self.counters.submitted += 1
        tokens: array[int] = array("I")
        if len(message.tokens) % TOKEN_BYTES == 0:
            tokens.frombytes(message.tokens)
        if refusal is None and self.num_waiting >= self._max_waiting:
            refusal = f"the engine is full: {self._max_waiting} sequences wait already"
        mistake = None
        if refusal is None and message.seq in self._sequences.get(owner, {}):
            mistake = f"sequence number {message.seq} is in use"
        elif refusal is None:
            mistake = find_mistake(message, tokens, self._limits)
        if refusal or mistake:
            self.counters.refused += 1
            finish: FinishReason = "abort" if refusal else "error"
            self._update(owner, SequenceUpdate(message.seq, finish=finish, error=refusal or mistake))
            return None
        if not message.use_cache:
            digests = []
        elif digests_fit(message.digests, len(tokens), self.pool.block_size):
            digests = split_digests(message.digests)
        else:
            digests = self.tables.chain(message.tokens, message.salt)
        sequence = Sequence(
            owner=owner,
            seq=message.seq,
            tokens=tokens,
            num_prompt=len(tokens),
            digests=digests,
            sampling=message.sampling,
            salt=message.salt,
            lane=message.lane,
            request_id=message.request_id,
            tenant=message.tenant,
            breakpoints=tuple(sorted(message.breakpoints, key=lambda point: point.tokens)),
            use_cache=message.use_cache,
            arrived_s=arrived_s,
            findable_tokens=self.tiers.count_findable(digests) * self.pool.block_size,
        )
        self.claims.open(sequence, message.tokens)
        self._sequences.setdefault(owner, {})[message.seq] = sequence
        self._waiting[sequence.lane][sequence] = None
        self._waiting_tokens += sequence.num_tokens
        return sequence

    def abort(self, owner: str, seq: int) -> bool:
        """Ends a sequence at any time, without an update, and frees its blocks. False when there is none."""
        sequence = self._sequences.get(owner, {}).get(seq)
        if sequence is None:
            return False
        self._end(sequence, "abort")
        return True

    def abort_owner(self, owner: str) -> int:
        """Aborts everything that a gateway sent, and drops what was not yet told to it. Returns how many there were."""
        sequences = list(self._sequences.get(owner, {}).values())
        for sequence in sequences:
            self._end(sequence, "abort")
        self._updates.pop(owner, None)
        return len(sequences)

    def fail_all(self, error: str) -> None:
        """Ends every sequence with an error update."""
        for sequence in [s for by_seq in self._sequences.values() for s in by_seq.values()]:
            self._fail(sequence, error)

    # -- a step -------------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> Step | None:
        """The next step, or None when there is nothing to do, or nothing before a copy between tiers is done. Ends in
        `commit` or `fail` before the next call.

        now  monotonic second; becomes scheduled_s of sequences that are served for the first time
        """
        self.leases.expire(now)
        plan = Plan(self._step_tokens, now)
        if self._prefills_first:
            self._plan_prefills(plan)
            self._plan_decodes(plan)
        else:
            self._plan_decodes(plan)
            self._plan_prefills(plan)
        if not plan.work:  # everything was preempted, or nothing ran: whoever waits longest has the pool to itself
            self._plan_prefills(plan)
        # A prefill that decodes leave too little room for goes first the next time, and decodes take what it leaves.
        self._prefills_first = plan.too_small and not plan.has_prefill
        if not plan.work:
            assert not self.has_work or self.tiers.busy, "sequences are left and none can run"
            return None
        self.counters.steps += 1
        return plan.step()

    def commit(self, step: Step, results: list[int | None], now: float) -> None:
        """Takes the results of a step that succeeded, one for each work: tokens are appended, full blocks become
        findable, sequences that are at their end are finished."""
        assert len(results) == len(step.work), f"{len(results)} results for {len(step.work)} works"
        for work, result in zip(step.work, results, strict=True):
            sequence = work.sequence
            if sequence.status is not Status.RUNNING:
                continue  # aborted since it was scheduled
            if result == NOT_FINITE:
                self._fail_not_finite(sequence)
                continue
            if is_prefill(work):
                self.counters.prefilled_tokens += work.count
            else:
                self.counters.decoded_tokens += 1
            sequence.num_computed = work.start + work.count
            self.tables.register(sequence)
            self.claims.register(sequence, now)
            if work.samples and is_prefill(work):
                self.tables.save(sequence)
            if work.samples:
                assert result is not None, "work that samples has no token"
                self._append(sequence, result, now)

    def fail(self, step: Step, error: str) -> None:
        """The step did not succeed: its sequences end with an error, and nothing that it wrote becomes findable."""
        for work in step.work:
            if work.sequence.status is Status.RUNNING:
                self._fail(work.sequence, error)

    def take_updates(self) -> dict[str, list[SequenceUpdate]]:
        """What has to be told to each owner since the last call."""
        updates, self._updates = self._updates, {}
        return updates

    # -- numbers ------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.num_waiting or self.num_running)

    @property
    def num_waiting(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    @property
    def num_running(self) -> int:
        return sum(len(running) for running in self._running.values())

    def load(self) -> Load:
        """How busy the engine is; the rates and `draining` are the loop's to fill in."""
        running = (s for lane in LANES for s in self._running[lane])
        backlog = sum(left for s in running if (left := s.num_tokens - s.num_computed) > 1)
        return Load(
            waiting=self.num_waiting,
            running=self.num_running,
            prefill_backlog=self._waiting_tokens + backlog,
            free_blocks=self.pool.num_free,
            cached_blocks=self.pool.num_cached,
            live_blocks=self.pool.num_live,
            leased_blocks=self.leases.num_blocks(),
        )

    # -- planning: decodes --------------------------------------------------------------------------------------------

    def _plan_decodes(self, plan: Plan) -> None:
        size, work = self.pool.block_size, plan.work
        decodes = [s for lane in LANES for s in self._running[lane] if len(s.tokens) - s.num_computed == 1]
        for sequence in decodes:
            if plan.budget < 1:
                return
            if sequence.status is not Status.RUNNING or sequence in work:
                continue
            if len(sequence.block_table) * size >= len(sequence.tokens) or self._grow(sequence, plan):
                plan.add(sequence, 1)

    def _grow(self, sequence: Sequence, plan: Plan) -> bool:
        """Makes room for the sequence's next token, at the cost of younger ones. False when it cannot go on now."""
        while (fresh := self.tables.grow(sequence)) is None:
            if self.tables.blocks_for(sequence.num_tokens) > self.pool.num_blocks:
                self._finish(sequence, "length")
                return False
            if self.num_running == 1 and self.leases.give_way(plan.now):
                continue
            victim = self._choose_victim()
            plan.preempted = True
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        plan.add_fresh(fresh)
        return True

    def _choose_victim(self) -> Sequence:
        """The youngest running sequence of the batch lane, else of the online lane. There must be one."""
        running = self._running["batch"] or self._running["online"]
        return max(reversed(running), key=lambda sequence: sequence.arrived_s)  # of equals the last admitted

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        """Back to the head of its lane, to be recomputed. Registered blocks stay findable until they are evicted."""
        plan.drop(sequence)
        self.tables.release(sequence)
        del self._running[sequence.lane][sequence]
        sequence.status = Status.WAITING
        sequence.preemptions += 1
        self.counters.preemptions += 1
        queue = self._waiting[sequence.lane]
        queue[sequence] = None
        queue.move_to_end(sequence, last=False)
        self._waiting_tokens += sequence.num_tokens

    # -- planning: prefills -------------------------------------------------------------------------------------------

    def _plan_prefills(self, plan: Plan) -> None:
        for lane in LANES:
            for sequence in list(self._running[lane]):
                if sequence not in plan.work and sequence.num_tokens - sequence.num_computed > 1:
                    self._plan_chunk(sequence, plan)
            self._admit(lane, plan)

    def _plan_chunk(self, sequence: Sequence, plan: Plan) -> bool:
        start, end = sequence.num_computed, sequence.num_tokens
        cut = choose_cut(start, end, plan.budget, self._grid, forced=not plan.work)
        if cut is None:
            plan.too_small = True
            return False
        plan.add(sequence, cut - start)
        return True

    def _admit(self, lane: Lane, plan: Plan) -> None:
        """Lets waiting sequences run, first come, first served, until slots, blocks or the budget are used up."""
        computing = self._computed_next(lane)
        for sequence in list(islice(self._waiting[lane], self._max_running)):
            if plan.budget < 1 or plan.blocked or (plan.preempted and plan.work):
                return
            if any(i < len(sequence.digests) and sequence.digests[i] == digest for i, digest in computing):
                self.counters.shared_waits += 1
                continue
            if self.tiers.is_restoring(sequence.digests, plan.now):
                continue
            if not self._make_room(sequence, plan):
                plan.blocked = True
                return
            if sequence.status is Status.WAITING:
                continue  # for a part of its prefix that is on its way from a lower tier
            if not self._plan_chunk(sequence, plan):
                return  # it has its blocks, and starts when the budget reaches its first cut
            computing = self._computed_next(lane)

    def _make_room(self, sequence: Sequence, plan: Plan) -> bool:
        """Admits a sequence if there are a slot and blocks for it; the online lane takes them from the batch lane.
        A sequence whose prefix comes back from a lower tier keeps waiting, and has the room that it needs."""
        while True:
            has_slot = self.num_running + self.tiers.count_restoring(plan.now) < self._max_running
            if has_slot:
                # Every sequence that runs may want one more block before one of them ends.
                headroom = self.num_running
                if restored := self.tables.restore(sequence, headroom, plan.now):
                    plan.drop_fresh(restored)
                    return True
                fresh = self.tables.admit(sequence, headroom)
                if fresh is not None:
                    self._start(sequence, plan.now)
                    plan.add_fresh(fresh)
                    return True
            if sequence.lane == "online" and self._running["batch"]:
                self._preempt(self._choose_victim(), plan)
            elif self.num_running or not has_slot or self._waits_for_copies(plan.now):
                return False  # whoever runs or is copied will end
            elif not self.leases.give_way(plan.now):
                return False  # what is left is being copied, and takes its time

    def _waits_for_copies(self, now: float) -> bool:
        """Whether copies may make room soon: they let go of blocks, and a lease of what was saved moves down. Not for
        longer than COPY_WAIT_S: a disk may hang, and leases never stop an engine."""
        if not self.tiers.busy:
            return False
        if self._waiting_since_s is None:
            self._waiting_since_s = now
        return now - self._waiting_since_s < COPY_WAIT_S

    def _start(self, sequence: Sequence, now: float) -> None:
        self._waiting_since_s = None
        del self._waiting[sequence.lane][sequence]
        self._waiting_tokens -= sequence.num_tokens
        self._running[sequence.lane][sequence] = None
        sequence.status = Status.RUNNING
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.num_computed
            self.counters.prompt_tokens += sequence.num_prompt
            self.counters.cached_tokens += sequence.num_computed
            self.counters.shared_tokens += max(0, sequence.num_computed - sequence.findable_tokens)
        self.claims.admit(sequence, now)

    def _computed_next(self, lane: Lane) -> list[tuple[int, bytes]]:
        """Index and digest of the block that each running prefill computes next.

        A waiting sequence that needs such a block too lets the other compute it. Digests are chained: where they agree
        the prefixes agree, or somebody forged a collision and waits in vain for some steps. Batch prefills may be
        starved for long, so the online lane does not wait for them.
        """
        found: list[tuple[int, bytes]] = []
        for upper in LANES[: LANES.index(lane) + 1]:
            for sequence in self._running[upper]:
                index = sequence.num_computed // self.pool.block_size
                if sequence.num_tokens - sequence.num_computed > 1 and index < len(sequence.digests):
                    found.append((index, sequence.digests[index]))
        return found

    # -- results ------------------------------------------------------------------------------------------------------

    def _append(self, sequence: Sequence, token: int, now: float) -> None:
        update = SequenceUpdate(sequence.seq)
        if not sequence.num_generated:
            self._describe_start(sequence, update, now)
        sampling = sequence.sampling
        if token in sampling.stop_ids or (token in self._eos_ids and not sampling.ignore_eos):
            update.stop_id = token
            self._finish(sequence, "stop", update)
            return
        sequence.tokens.append(token)
        update.tokens.append(token)
        if sequence.num_generated >= sampling.max_tokens or sequence.num_tokens >= self._context_tokens:
            self._finish(sequence, "length", update)
        else:
            self._update(sequence.owner, update)

    def _describe_start(self, sequence: Sequence, update: SequenceUpdate, now: float | None) -> None:
        update.cached_tokens = sequence.cached_tokens
        self.claims.describe(sequence, update)
        if sequence.scheduled_s is not None:
            update.queue_ms = max(0.0, (sequence.scheduled_s - sequence.arrived_s) * 1000)
            if now is not None:
                update.prefill_ms = max(0.0, (now - sequence.scheduled_s) * 1000)

    def _fail_not_finite(self, sequence: Sequence) -> None:
        self.counters.not_finite += 1
        forgotten = self.tables.quarantine(sequence)
        self.leases.drop_lost()
        log.error(
            "numbers that are not finite: sequence ended, %d blocks unregistered (request %s)",
            forgotten,
            sequence.request_id or "-",
        )
        self._fail(sequence, "the model computed numbers that are not finite")

    def _fail(self, sequence: Sequence, error: str) -> None:
        self._finish(sequence, "error", SequenceUpdate(sequence.seq, error=error))

    def _finish(self, sequence: Sequence, reason: FinishReason, update: SequenceUpdate | None = None) -> None:
        """Ends a sequence and tells its owner."""
        update = update or SequenceUpdate(sequence.seq)
        update.finish = reason
        if not sequence.num_generated and update.cached_tokens is None:
            self._describe_start(sequence, update, None)
        self._end(sequence, reason)
        self._update(sequence.owner, update)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """The only way out: takes a sequence out of everything it is in, and its blocks with it."""
        by_seq = self._sequences[sequence.owner]
        del by_seq[sequence.seq]
        if not by_seq:
            del self._sequences[sequence.owner]
        if sequence.status is Status.RUNNING:
            del self._running[sequence.lane][sequence]
            self.tables.release(sequence)
        else:
            del self._waiting[sequence.lane][sequence]
            self._waiting_tokens -= sequence.num_tokens
        self.claims.close(sequence)
        sequence.status = Status.FINISHED
        sequence.finish = reason
        self.counters.finished[reason] += 1

    def _update(self, owner: str, update: SequenceUpdate) -> None:
        self._updates.setdefault(owner, []).append(update)

"""Decides what the next step computes: which sequences run, wait, and give their blocks back.

Continuous batching: every running decode gets its token, prefills share what is left of a step and are cut anywhere: a
token's keys and values depend on its prefix alone. Beside decodes, and while several tenants are in the online queue,
what is left is a time, because the others wait for the step that runs (`Pace`). Within a queue tenants take turns by
prefilled tokens (`Turns`); of one tenant the prompt is first that would be done first if each had the engine to itself,
so that short ones pass long ones, and none for ever. When blocks run out sequences are preempted and recomputed later:
the youngest first, batch before online. Leases give way last.

The batch queue is not in a step that prefills for the online queue. Its own prefills are cut small, because online
arrivals wait for the step that runs.

Pure bookkeeping, no model and no clock. engine/scheduler.py makes a step of a plan; engine/tables.py has the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from engine.config import EngineSettings
from engine.leases.claims import Claims
from engine.protocol import LANES, MIN_TAIL_TOKENS, Lane
from engine.queues import Queues, Turns
from engine.sequence import Copy, Counters, Sequence, Status, Step, Work
from engine.speculation import CATCH_UP, LEAST_AHEAD, Candidate, Drafter, ModelDrafts, RowCost, choose_drafts, follow
from engine.tables import BlockTables

COPY_WAIT_S = 2.0
"""So long a sequence waits for copies between tiers to give blocks back, before leases do, when nothing else will."""

BATCH_TURN_STEPS = 8
"""After so many steps in a row that prefill for the online lane, the decodes of the batch lane are in one, too: they
hold blocks, and come to an end when they go on."""

LEAST_TOKENS = 4 * MIN_TAIL_TOKENS
"""Of a step's prefills, however short of time it is; fewer tokens say nothing about how long one takes."""

SCORED_TOKENS = 256
"""Of one step, where a prompt's log probabilities are wanted: each token brings a row of the whole vocabulary."""


class Pace:
    """How long steps take, learned from them. A step that takes much longer than expected counts as twice as long."""

    def __init__(self) -> None:
        self.token_s = 0.0  # of one prefilled token beside what a step takes anyway; 0 before anything was prefilled
        self._decode_s: dict[int, float] = {}  # of a step without prefills, by the bits of its number of rows

    def learn(self, step: Step, seconds: float) -> None:
        """A step took so long."""
        prefilled = sum(work.count for work in step.work if work.is_prefill)
        rows = sum(work.num_rows for work in step.work if not work.is_prefill)
        if not prefilled:
            self._decode_s[rows.bit_length()] = follow(self.decode_s(rows), seconds)
        elif prefilled >= LEAST_TOKENS:
            beside = max(seconds - self.decode_s(rows), seconds / 4)
            self.token_s = follow(self.token_s, beside / prefilled)

    def decode_s(self, rows: int) -> float:
        """Of a step of so many decodes, or of fewer where such a step has not been; 0 where that is not known."""
        return next((self._decode_s[n] for n in range(rows.bit_length(), 0, -1) if n in self._decode_s), 0.0)


@dataclass(slots=True)
class _Admission:
    """Which waiting sequences of a queue may be admitted in a step.

    computing   index and digest of the block that each running prefill computes next
    most_held   blocks of the tenant whose sequence finds no room; only those with fewer are admitted past it, so it
                waits for its own sequences, and for those of tenants that hold as much
    """

    computing: list[tuple[int, bytes]]
    is_open: bool
    most_held: int | None = None


class Planner:
    """Fills one plan for each step."""

    def __init__(
        self, queues: Queues, tables: BlockTables, claims: Claims, counters: Counters, settings: EngineSettings
    ) -> None:
        self._queues = queues
        self._tables = tables
        self._tiers = tables.tiers
        self._claims = claims
        self._leases = claims.leases
        self._counters = counters
        self._block_size = tables.pool.block_size
        self._max_running = settings.max_sequences
        self._settings, self._pace = settings, Pace()
        self._turns: dict[Lane, Turns] = {lane: Turns() for lane in LANES}
        self._row_cost = RowCost() if settings.speculation == "prompt-lookup" else None
        self._model_drafts = ModelDrafts() if settings.draft_model is not None else None
        self._batch_passed = 0  # steps in a row that the batch lane was not in
        self._waiting_since_s: float | None = None  # the head of a queue for copies, while nothing runs

    def plan(self, now: float) -> Plan:
        """What the next step computes; empty when there is nothing to do, or nothing before a copy is done."""
        plan = Plan(now)
        if self._batch_passed == BATCH_TURN_STEPS:
            self._batch_passed = 0
            self._plan_decodes("batch", plan)
        self._plan_queue("online", plan)
        if plan.has_prefill:
            self._batch_passed += 1
        else:
            self._batch_passed = 0
            self._plan_queue("batch", plan)
        if plan.is_empty:  # everything was preempted, or nothing ran: the oldest sequence has the pool to itself
            plan.blocked = False
            for lane in LANES:
                if not plan.has_prefill:
                    self._plan_prefills(lane, plan)
        if self._row_cost is not None:
            self._plan_drafts(plan, self._row_cost)
        return plan

    def learn(self, step: Step, seconds: float) -> None:
        """A step took so long."""
        self._pace.learn(step, seconds)
        if self._row_cost is None or step.forks or any(work.is_prefill for work in step.work):
            return
        model, rows = self._model_drafts, step.num_rows
        if model is not None and any(work.wanted for work in step.work):
            model.took(step.drafting.seconds)
            rows += model.rows
        elif model is not None:
            model.rested(seconds)
        self._row_cost.add(rows, seconds - step.drafting.seconds)

    def _plan_queue(self, lane: Lane, plan: Plan) -> None:
        self._plan_decodes(lane, plan)
        self._plan_forks(lane, plan)
        self._plan_prefills(lane, plan)

    def _prefill_budget(self, lane: Lane, plan: Plan) -> int:
        """Tokens. A time where others wait: for their next token, or for their turn."""
        settings, pace, decodes = self._settings, self._pace, plan.work
        budget = min(settings.step_tokens, settings.batch_step_tokens if lane == "batch" else settings.step_tokens)
        online = any(sequence.lane == "online" for sequence in decodes)
        if pace.token_s and (online or self._queues.has_several_tenants("online")):
            decode_s = pace.decode_s(len(decodes)) if online else 0.0
            limit_s = min(settings.step_ms / 1000, decode_s * settings.prefill_per_decode or settings.step_ms)
            budget = min(budget, int(limit_s / pace.token_s))
        return max(budget, LEAST_TOKENS)

    def _done_alone_s(self, sequence: Sequence) -> float:
        """When its prompt would have been computed if it had had the engine to itself; the batch queue is in order."""
        if sequence.lane == "batch":
            return 0.0
        known = max(sequence.num_computed, sequence.findable_tokens)
        return sequence.arrived_s + (sequence.num_tokens - known) * self._pace.token_s

    # -- decodes ------------------------------------------------------------------------------------------------------

    def _plan_decodes(self, lane: Lane, plan: Plan) -> None:
        """One token for each sequence whose prompt is computed."""
        size, work = self._block_size, plan.work
        decodes = [s for s in self._queues.running(lane) if len(s.tokens) - s.num_computed == 1 and s.can_sample]
        for sequence in decodes:
            if sequence.status is not Status.RUNNING or sequence in work:
                continue
            if len(sequence.block_table) * size >= len(sequence.tokens) or self._grow(sequence, plan):
                plan.add(sequence, 1)

    def _grow(self, sequence: Sequence, plan: Plan) -> bool:
        """Makes room for the sequence's next token, at the cost of younger ones. False when it cannot go on now."""
        while (fresh := self._tables.grow(sequence)) is None:
            if self._queues.num_running == 1 and self._leases.give_way(plan.now):
                continue
            victim = self._queues.choose_victim()
            plan.preempted = True
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        plan.add_fresh(fresh)
        return True

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        """Back to the head of its queue, to be recomputed. Registered blocks stay findable until they are evicted."""
        plan.work.pop(sequence, None)
        self._tables.release(sequence)
        self._queues.put_back(sequence)
        self._counters.preemptions += 1

    # -- drafts -------------------------------------------------------------------------------------------------------

    def _plan_drafts(self, plan: Plan, cost: RowCost) -> None:
        """What decodes may go on with, as far as it is worth its rows. Only sequences without a grammar draft: the mask
        behind a draft is not known."""
        decodes = [work for work in plan.work.values() if not work.is_prefill]
        works = [work for work in decodes if work.sequence.matcher is None]
        guesses = [self._guess(work.sequence) for work in works]
        if not works:
            return
        counts = choose_drafts([chances for _, chances in guesses], *cost.line(len(decodes)), len(decodes))
        for work, (guess, _), count in zip(works, guesses, counts, strict=True):
            if count and (count := self._room_ahead(work.sequence, count, plan)):
                plan.work[work.sequence] = replace(work, drafts=tuple(guess[:count]))
        if self._model_drafts is not None and cost.is_known:
            others = [work for work in works if not plan.work[work.sequence].drafts]
            self._ask_model(self._model_drafts, others, len(decodes), plan, cost)

    def _ask_model(self, model: ModelDrafts, works: list[Work], num_decodes: int, plan: Plan, cost: RowCost) -> None:
        """What the draft model is to draft."""
        asked: list[tuple[Sequence, int]] = []
        candidates: list[Candidate] = []
        for work in works:
            s = work.sequence
            left = s.sampling.max_tokens - s.num_generated - 1
            if left > 0 and s.drafter is not None:
                asked.append((s, left))
                ahead = min(left, max(LEAST_AHEAD, s.num_generated))
                behind = min(s.num_tokens - s.follow_end, CATCH_UP)
                candidates.append(Candidate(s.drafter.followed_chance, behind, ahead))
        if not asked:
            return
        counts = model.choose(candidates, *cost.line(num_decodes), num_decodes)
        for (s, left), count in zip(asked, counts, strict=True):
            if wanted := self._room_ahead(s, min(count, left), plan):
                plan.work[s] = replace(plan.work[s], wanted=wanted)

    def _guess(self, sequence: Sequence) -> tuple[list[int], list[float]]:
        """What a sequence may go on with, and the chance of each token; another one is sampled behind them."""
        left = sequence.sampling.max_tokens - sequence.num_generated - 1
        if left < 1:
            return [], []
        drafter = sequence.drafter = sequence.drafter or Drafter(self._model_drafts)
        guess = drafter.guess(sequence)[:left]
        return guess, drafter.chances(len(guess))

    def _room_ahead(self, sequence: Sequence, count: int, plan: Plan) -> int:
        """Positions behind its last token, `count` at most, that its blocks have room for. It gets one more block for
        them, which it will need soon, unless every sequence that runs could not have one then."""
        room = len(sequence.block_table) * self._block_size - sequence.num_tokens
        if count > room and self._tables.pool.available > self._queues.num_running:
            plan.add_fresh(self._tables.grow(sequence, room + 1) or [])
            room += self._block_size
        return min(room, count)

    # -- forks --------------------------------------------------------------------------------------------------------

    def _plan_forks(self, lane: Lane, plan: Plan) -> None:
        """Siblings of a sequence whose prompt is computed take its blocks, and sample from its row of logits."""
        for source in list(self._queues.running(lane)):
            if source.siblings is None or source.siblings.row is None:
                continue
            if source.num_computed == source.num_tokens:  # a fork whose mask was late
                if source.can_sample:
                    plan.fork(source)
            elif source.num_tokens - source.num_computed == 1 and not plan.blocked and not plan.preempted:
                for fork in source.siblings.waiting:
                    if not self._make_room(fork, plan, source):
                        return
                    plan.fork(fork)

    # -- prefills -----------------------------------------------------------------------------------------------------

    def _plan_prefills(self, lane: Lane, plan: Plan) -> None:
        """Tenants in turn."""
        turns = self._turns[lane]
        admission = _Admission(self._computed_next(lane), is_open=not plan.blocked)
        plan.budget = self._prefill_budget(lane, plan)
        for sequence in turns.in_turn(self._queues.unprefilled(lane, self._max_running, self._done_alone_s)):
            budget = plan.budget
            if sequence.status is Status.WAITING:
                self._admit(sequence, plan, admission)
            elif sequence not in plan.work:
                self._plan_chunk(sequence, plan)
            if plan.budget < budget:
                turns.took(sequence.tenant, budget - plan.budget)
            if plan.budget < 1:
                return

    def _plan_chunk(self, sequence: Sequence, plan: Plan) -> bool:
        """The next tokens of a running prefill. False when too little is left of the budget."""
        budget, left = plan.budget, sequence.num_tokens - sequence.num_computed
        if sequence.sampling.prompt_logprobs is not None:
            budget = min(budget, SCORED_TOKENS)
        count = left if left <= budget else min(budget, left - MIN_TAIL_TOKENS)
        if count < min(left, MIN_TAIL_TOKENS):
            return False
        plan.add(sequence, count)
        plan.budget -= count
        return True

    def _admit(self, sequence: Sequence, plan: Plan, admission: _Admission) -> None:
        """Lets a waiting sequence run, if there are a slot, blocks and budget."""
        if not admission.is_open or (plan.preempted and not plan.is_empty):
            return
        if admission.most_held is not None and self._held_by(sequence) >= admission.most_held:
            return
        if self._waits_for_another(sequence, plan, admission):
            return
        if plan.budget < min(sequence.num_tokens - sequence.findable_tokens, 2 * MIN_TAIL_TOKENS):
            admission.is_open = False  # it would hold blocks and a slot, and not run
            return
        if not self._make_room(sequence, plan):
            plan.blocked = True
            admission.most_held = self._held_by(sequence)
        elif sequence.status is Status.WAITING:
            return  # for a part of its prefix that is on its way from disk
        elif self._plan_chunk(sequence, plan):
            admission.computing = self._computed_next(sequence.lane)
        else:
            admission.is_open = False  # it has its blocks, and starts in the next step

    def _waits_for_another(self, sequence: Sequence, plan: Plan, admission: _Admission) -> bool:
        """True if the blocks that it needs first are being computed by another sequence, or copied from a lower
        tier."""
        reusable = min(len(sequence.digests), self._tables.count_reusable(sequence))
        is_computed = any(i < reusable and sequence.digests[i] == digest for i, digest in admission.computing)
        if is_computed or (sequence.siblings is not None and sequence.siblings.computes(sequence)):
            self._counters.shared_waits += 1
            return True
        return self._tiers.is_restoring(sequence.digests, plan.now)

    def _held_by(self, sequence: Sequence) -> int:
        """Blocks of its tenant's running sequences in the same queue; a shared one counts for each."""
        return sum(
            len(other.block_table) for other in self._queues.running(sequence.lane) if other.tenant == sequence.tenant
        )

    def _make_room(self, sequence: Sequence, plan: Plan, source: Sequence | None = None) -> bool:
        """Admits a sequence if there are a slot and blocks for it, or for it as a fork of its source; an online one
        takes them from batch sequences. A sequence whose prefix comes back from disk keeps waiting, and has the
        room that it needs."""
        while True:
            has_slot = self._queues.num_running + self._tiers.count_restoring(plan.now) < self._max_running
            if has_slot:
                # Every sequence that runs may want one more block before one of them ends.
                headroom = self._queues.num_running
                if source is None and (restored := self._tables.restore(sequence, headroom, plan.now)):
                    plan.drop_fresh(restored)
                    return True
                if source is not None:
                    fresh = self._tables.fork(sequence, source, headroom, plan.copies)
                else:
                    fresh = self._tables.admit(sequence, headroom)
                if fresh is not None:
                    self._start(sequence, plan.now, source)
                    plan.add_fresh(fresh)
                    return True
            if sequence.lane == "online" and self._queues.count_running("batch"):
                self._preempt(self._queues.choose_victim(), plan)
            elif self._queues.num_running or not has_slot or self._waits_for_copies(plan.now):
                return False  # a running sequence or a copy will end
            elif not self._leases.give_way(plan.now):
                return False  # what is left is being copied, and takes its time

    def _waits_for_copies(self, now: float) -> bool:
        """Whether copies may make room soon: they let go of blocks, and a lease of what was saved moves down. Not for
        longer than COPY_WAIT_S: a disk may hang, and leases never stop an engine."""
        if not self._tiers.busy:
            self._waiting_since_s = None
            return False
        if self._waiting_since_s is None:
            self._waiting_since_s = now
        return now - self._waiting_since_s < COPY_WAIT_S

    def _start(self, sequence: Sequence, now: float, source: Sequence | None) -> None:
        self._waiting_since_s = None
        self._queues.start(sequence)
        self._counters.forks += source is not None
        if sequence.cached_tokens is None:
            # Siblings report one prompt: what was there before any of them computed it.
            sequence.cached_tokens = sequence.num_computed if source is None else source.cached_tokens
            self._counters.prompt_tokens += sequence.num_prompt
            self._counters.cached_tokens += sequence.num_computed
            self._counters.shared_tokens += max(0, sequence.num_computed - sequence.findable_tokens)
        if source is None:
            self._claims.admit(sequence, now)
        else:
            self._claims.fork(sequence, source, now)

    def _computed_next(self, lane: Lane) -> list[tuple[int, bytes]]:
        """Index and digest of the block that each running prefill computes next.

        A waiting sequence that could reuse such a block lets the other compute it. Digests are chained: where they
        agree the prefixes agree, or a forged collision waits in vain for some steps. Batch prefills may be
        starved for long, so the online lane does not wait for them.
        """
        found: list[tuple[int, bytes]] = []
        for sequence in self._queues.running(*LANES[: LANES.index(lane) + 1]):
            index = sequence.num_computed // self._block_size
            if sequence.num_tokens - sequence.num_computed > 1 and index < len(sequence.digests):
                found.append((index, sequence.digests[index]))
        return found


@dataclass(slots=True)
class Plan:
    """What a step will compute. Work is kept by sequence, because a preemption takes out what was planned already."""

    now: float  # monotonic second
    budget: int = 0  # tokens of prefill that are left
    work: dict[Sequence, Work] = field(default_factory=dict)
    forks: list[Sequence] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    fresh: dict[int, None] = field(default_factory=dict)  # new blocks, each once
    preempted: bool = False  # for want of blocks: no sequence is admitted unless nothing else would run
    blocked: bool = False  # an online sequence waits for a slot or blocks: no batch sequence is admitted

    def add(self, sequence: Sequence, count: int) -> None:
        """The next `count` tokens of a sequence that is not in the plan yet."""
        start = sequence.num_computed
        self.work[sequence] = Work(sequence, start, count, samples=start + count == sequence.num_tokens)
        if sequence.scheduled_s is None:
            sequence.scheduled_s = self.now

    def fork(self, sequence: Sequence) -> None:
        """A sequence that has nothing left to compute: it samples."""
        self.forks.append(sequence)
        if sequence.scheduled_s is None:
            sequence.scheduled_s = self.now

    def add_fresh(self, blocks: list[int]) -> None:
        self.fresh.update(dict.fromkeys(blocks))

    def drop_fresh(self, blocks: list[int]) -> None:
        """These belong to a copy from now on, which writes them whole: zeroing them meanwhile would do harm."""
        for block in blocks:
            self.fresh.pop(block, None)

    @property
    def has_prefill(self) -> bool:
        return any(work.is_prefill for work in self.work.values())

    @property
    def is_empty(self) -> bool:
        return not self.work and not self.forks

    def step(self) -> Step:
        return Step(list(self.work.values()), list(self.fresh), self.copies, self.forks)

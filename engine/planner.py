"""Decides what the next step computes: who runs, who waits, and who gives its blocks back.

Continuous batching under one token budget: every running decode gets its token, prefills get what is left, cut on a
canonical grid so that a warm answer is computed like a cold one. Who runs out of blocks is recomputed later: the
youngest first, batch before online. Leases give way last.

The batch lane gets what the online lane leaves of a step, and leaves the step while anything is to be prefilled for the
online lane. Its own prefills are cut small, because whoever arrives in the online lane waits for the step that runs.

Pure bookkeeping, no model and no clock. engine/scheduler.py asks for a plan and makes a step of it; engine/lanes.py has
the queues, engine/tables.py the blocks of the sequences.
"""

from __future__ import annotations

from engine.config import EngineSettings
from engine.counters import Counters
from engine.forks import find_source
from engine.lanes import Lanes
from engine.leases.claims import Claims
from engine.plan import MIN_TAIL_TOKENS, Plan, choose_cut
from engine.protocol import LANES, Lane
from engine.sequence import Sequence, Status
from engine.tables import BlockTables

COPY_WAIT_S = 2.0
"""So long a sequence waits for copies between tiers to give blocks back, before leases do, when nothing else will."""

BATCH_TURN_STEPS = 8
"""After so many steps in a row that prefill for the online lane, the decodes of the batch lane are in one, too: they
hold blocks, and come to an end when they go on."""


class Planner:
    """Fills one plan for each step."""

    def __init__(
        self, lanes: Lanes, tables: BlockTables, claims: Claims, counters: Counters, settings: EngineSettings
    ) -> None:
        self._lanes = lanes
        self._tables = tables
        self._tiers = tables.tiers
        self._claims = claims
        self._leases = claims.leases
        self._counters = counters
        self._block_size = tables.pool.block_size
        self._step_tokens = settings.step_tokens
        self._max_running = min(settings.max_sequences, settings.step_tokens)  # every decode fits in a step
        self._grid = min(settings.prefill_grid_tokens, settings.step_tokens)
        # Some more than the grid, so that there is always a place to cut, however many decodes are in the step.
        self._batch_tokens = max(settings.batch_step_tokens, self._grid + 2 * MIN_TAIL_TOKENS)
        self._prefills_first: set[Lane] = set()
        self._batch_passed = 0  # steps in a row that the batch lane was not in
        self._waiting_since_s: float | None = None  # the head of a queue for copies, while nothing runs

    def plan(self, now: float) -> Plan:
        """What the next step computes; empty when there is nothing to do, or nothing before a copy is done."""
        plan = Plan(self._step_tokens, now)
        if self._batch_passed == BATCH_TURN_STEPS:
            self._batch_passed = 0
            self._plan_decodes("batch", plan)
        self._plan_lane("online", plan)
        if plan.has_prefill or plan.too_small or plan.blocked:
            self._batch_passed += 1
        else:
            self._plan_batch(plan)
        if plan.is_empty:  # everything was preempted, or nothing ran: whoever waits longest has the pool to itself
            self._tables.settle()  # a block that was to be copied may be all that was missing
            plan.blocked = False
            for lane in LANES:
                if not plan.has_prefill:
                    self._plan_prefills(lane, plan)
        return plan

    def _plan_lane(self, lane: Lane, plan: Plan) -> None:
        if lane in self._prefills_first:
            self._plan_prefills(lane, plan)
            self._plan_decodes(lane, plan)
        else:
            self._plan_decodes(lane, plan)
            self._plan_prefills(lane, plan)
        # A prefill that decodes leave too little room for goes first the next time, and decodes take what it leaves.
        if plan.too_small and not plan.has_prefill:
            self._prefills_first.add(lane)
        else:
            self._prefills_first.discard(lane)

    def _plan_batch(self, plan: Plan) -> None:
        self._batch_passed = 0
        kept_back = max(0, plan.budget - self._lanes.count_running("batch") - self._batch_tokens)
        plan.budget -= kept_back
        self._plan_lane("batch", plan)
        plan.budget += kept_back

    # -- decodes ------------------------------------------------------------------------------------------------------

    def _plan_decodes(self, lane: Lane, plan: Plan) -> None:
        size, work = self._block_size, plan.work
        decodes = [s for s in self._lanes.running(lane) if len(s.tokens) - s.num_computed == 1]
        for sequence in decodes:
            if plan.budget < 1:
                return
            if sequence.status is not Status.RUNNING or sequence in work:
                continue
            has_room = len(sequence.block_table) * size >= len(sequence.tokens) and not sequence.shares_tail
            if has_room or self._grow(sequence, plan):
                plan.add(sequence, 1)

    def _grow(self, sequence: Sequence, plan: Plan) -> bool:
        """Makes room for the sequence's next token, at the cost of younger ones. False when it cannot go on now."""
        while (fresh := self._tables.grow(sequence)) is None:
            if self._lanes.num_running == 1 and self._leases.give_way(plan.now):
                continue
            victim = self._lanes.choose_victim()
            plan.preempted = True
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        plan.add_fresh(fresh)
        return True

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        """Back to the head of its lane, to be recomputed, and with it who forks from it in this step.
        Registered blocks stay findable until they are evicted."""
        for fork in plan.forks_of(sequence):
            self._preempt(fork, plan)
        plan.drop(sequence)
        self._tables.release(sequence)
        self._lanes.put_back(sequence)
        self._counters.preemptions += 1

    # -- prefills -----------------------------------------------------------------------------------------------------

    def _plan_prefills(self, lane: Lane, plan: Plan) -> None:
        for sequence in list(self._lanes.running(lane)):
            if sequence not in plan.work and sequence.num_tokens - sequence.num_computed > 1:
                self._plan_chunk(sequence, plan)
        self._admit(lane, plan)

    def _plan_chunk(self, sequence: Sequence, plan: Plan) -> bool:
        start, end = sequence.num_computed, sequence.num_tokens
        budget = plan.budget
        if sequence.sampling.prompt_logprobs is not None:  # each of its tokens brings a row of the whole vocabulary
            budget = min(budget, self._grid + 2 * MIN_TAIL_TOKENS)
        cut = choose_cut(start, end, budget, self._grid, forced=not plan.work)
        if cut is None:
            plan.too_small = True
            return False
        plan.add(sequence, cut - start)
        return True

    def _admit(self, lane: Lane, plan: Plan) -> None:
        """Lets waiting sequences run, first come, first served, until slots, blocks or the budget are used up. Forks
        take nothing of the budget."""
        computing = self._computed_next(lane)
        for sequence in self._lanes.first_waiting(lane, self._max_running):
            if plan.blocked or (plan.preempted and plan.work):
                return
            source, is_computed = find_source(sequence, plan)
            if source is not None:
                if not self._make_room(sequence, plan, source):
                    plan.blocked = True
                    return
                plan.fork(sequence, source)
                continue
            if plan.budget < 1:
                continue  # to those that may fork
            if is_computed:
                self._counters.shared_waits += 1
                continue
            reusable = min(len(sequence.digests), self._tables.count_reusable(sequence))
            if any(i < reusable and sequence.digests[i] == digest for i, digest in computing):
                self._counters.shared_waits += 1
                continue
            if self._tiers.is_restoring(sequence.digests, plan.now):
                continue
            if not self._make_room(sequence, plan):
                plan.blocked = True
                return
            if sequence.status is Status.WAITING:
                continue  # for a part of its prefix that is on its way from a lower tier
            if not self._plan_chunk(sequence, plan):
                return  # it has its blocks, and starts when the budget reaches its first cut
            computing = self._computed_next(lane)

    def _make_room(self, sequence: Sequence, plan: Plan, source: Sequence | None = None) -> bool:
        """Admits a sequence if there are a slot and blocks for it, or for it as a fork of its source, which is in the
        same lane; the online lane takes them from the batch lane, unless a prefill of it waits for a larger budget.
        A sequence whose prefix comes back from a lower tier keeps waiting, and has the room that it needs."""
        while True:
            has_slot = self._lanes.num_running + self._tiers.count_restoring(plan.now) < self._max_running
            if has_slot:
                # Every sequence that runs may want one more block before one of them ends.
                headroom = self._lanes.num_running
                if source is not None:
                    fresh = self._tables.fork(sequence, source, headroom)
                elif restored := self._tables.restore(sequence, headroom, plan.now):
                    plan.drop_fresh(restored)
                    return True
                else:
                    fresh = self._tables.admit(sequence, headroom)
                if fresh is not None:
                    self._start(sequence, plan.now, source)
                    plan.add_fresh(fresh)
                    return True
            if sequence.lane == "online" and self._lanes.runs("batch") and not plan.too_small:
                self._preempt(self._lanes.choose_victim(), plan)
            elif self._lanes.num_running or not has_slot or self._waits_for_copies(plan.now):
                return False  # whoever runs or is copied will end
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
        self._lanes.start(sequence)
        self._counters.forks += source is not None
        if sequence.cached_tokens is None:
            # The prompt of siblings is told of as one: what was there before any of them computed it.
            sequence.cached_tokens = sequence.num_computed if source is None else source.cached_tokens
            self._counters.prompt_tokens += sequence.num_prompt
            self._counters.cached_tokens += sequence.num_computed
            self._counters.shared_tokens += max(0, sequence.num_computed - sequence.findable_tokens)
        self._claims.admit(sequence, now)

    def _computed_next(self, lane: Lane) -> list[tuple[int, bytes]]:
        """Index and digest of the block that each running prefill computes next.

        A waiting sequence that could reuse such a block lets the other compute it. Digests are chained: where they
        agree the prefixes agree, or somebody forged a collision and waits in vain for some steps. Batch prefills may be
        starved for long, so the online lane does not wait for them.
        """
        found: list[tuple[int, bytes]] = []
        for sequence in self._lanes.running(*LANES[: LANES.index(lane) + 1]):
            index = sequence.num_computed // self._block_size
            if sequence.num_tokens - sequence.num_computed > 1 and index < len(sequence.digests):
                found.append((index, sequence.digests[index]))
        return found

"""Decides what the next step computes: who runs, who waits, and who gives its blocks back.

Continuous batching under one token budget: every running decode gets its token, prefills get what is left, cut on a
canonical grid so that a warm answer is computed like a cold one. Within a queue tenants take turns by prefilled tokens
(engine/turns.py), so that a backlog of one is not in front of another's short prompt; while several tenants are in the
online queue its prefills are cut small, because the others wait for the step that runs. Who runs out of blocks is
recomputed later: the youngest first, batch before online. Leases give way last.

The batch lane gets what the online lane leaves of a step, and leaves the step while anything is to be prefilled for the
online lane. Its own prefills are cut small, because whoever arrives in the online lane waits for the step that runs.
Batch sequences are preempted for an online one only if that makes room for it.

Pure bookkeeping, no model and no clock. engine/scheduler.py asks for a plan and makes a step of it; engine/lanes.py has
the queues, engine/tables.py the blocks of the sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import EngineSettings
from engine.counters import Counters
from engine.forks import find_source
from engine.lanes import Lanes
from engine.leases.claims import Claims
from engine.plan import MIN_TAIL_TOKENS, Plan, choose_cut
from engine.protocol import LANES, Lane
from engine.sequence import Sequence, Status
from engine.tables import BlockTables
from engine.turns import Turns

COPY_WAIT_S = 2.0
"""So long a sequence waits for copies between tiers to give blocks back, before leases do, when nothing else will."""

BATCH_TURN_STEPS = 8
"""After so many steps in a row that prefill for the online lane, the decodes of the batch lane are in one, too: they
hold blocks, and come to an end when they go on."""

SHARED_PREFILL_TOKENS = 256
"""Prefilled for the online queue in one step while sequences of several tenants are in it; at least the grid and some.
Each token of an answer, and the first one of whoever arrives, waits for the step that runs: with 1,024 tokens of
another tenant's prompts in it that is 0.3 to 0.5 s on two cores, with 256 a fourth."""


@dataclass(slots=True)
class _Admission:
    """Which waiting sequences of a queue may be admitted in a step.

    computing   index and digest of the block that each running prefill computes next
    most_held   blocks of the tenant whose sequence finds no room; only those with fewer are admitted past it, so it
                waits for its own sequences, and for those of tenants that hold as much
    looked_at   waiting sequences since the budget was used up
    """

    computing: list[tuple[int, bytes]]
    is_open: bool
    most_held: int | None = None
    looked_at: int = 0


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
        least = self._grid + 2 * MIN_TAIL_TOKENS
        self._batch_tokens = max(settings.batch_step_tokens, least)
        self._shared_tokens = max(SHARED_PREFILL_TOKENS, least)
        self._turns: dict[Lane, Turns] = {lane: Turns() for lane in LANES}
        self._prefills_first: set[Lane] = set()
        self._batch_passed = 0  # steps in a row that the batch lane was not in
        self._waiting_since_s: float | None = None  # the head of a queue for copies, while nothing runs

    def plan(self, now: float) -> Plan:
        """What the next step computes; empty when there is nothing to do, or nothing before a copy is done."""
        plan = Plan(self._step_tokens, now)
        if self._batch_passed == BATCH_TURN_STEPS:
            self._batch_passed = 0
            self._plan_decodes("batch", plan)
        self._plan_online(plan)
        if plan.has_prefill or plan.too_small:
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
        if plan.first_too_small:
            self._prefills_first.add(lane)
        else:
            self._prefills_first.discard(lane)
        plan.first_too_small = False

    def _plan_online(self, plan: Plan) -> None:
        if self._lanes.has_several_tenants("online"):
            self._plan_small("online", plan, self._shared_tokens)
        else:
            self._plan_lane("online", plan)

    def _plan_batch(self, plan: Plan) -> None:
        self._batch_passed = 0
        self._plan_small("batch", plan, self._batch_tokens)

    def _plan_small(self, lane: Lane, plan: Plan, prefill_tokens: int) -> None:
        """The lane's decodes, and so many tokens of its prefills."""
        kept_back = max(0, plan.budget - self._lanes.count_running(lane) - prefill_tokens)
        plan.budget -= kept_back
        self._plan_lane(lane, plan)
        plan.budget += kept_back

    # -- decodes ------------------------------------------------------------------------------------------------------

    def _plan_decodes(self, lane: Lane, plan: Plan) -> None:
        size, work = self._block_size, plan.work
        decodes = [s for s in self._lanes.running(lane) if len(s.tokens) - s.num_computed == 1 and s.can_sample]
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
        """Tenants in turn, of each tenant what runs before what waits."""
        turns = self._turns[lane]
        admission = _Admission(self._computed_next(lane), is_open=not plan.blocked)
        for sequence in turns.in_turn(self._lanes.unprefilled(lane, self._max_running)):
            budget = plan.budget
            if sequence.status is Status.WAITING:
                self._admit(sequence, plan, admission)
            elif sequence not in plan.work:
                self._plan_chunk(sequence, plan)
            if plan.budget < budget:
                turns.took(sequence.tenant, budget - plan.budget)
            if admission.looked_at > self._max_running:
                return

    def _plan_chunk(self, sequence: Sequence, plan: Plan) -> bool:
        start, end = sequence.num_computed, sequence.num_tokens
        budget = plan.budget
        if sequence.sampling.prompt_logprobs is not None:  # each of its tokens brings a row of the whole vocabulary
            budget = min(budget, self._grid + 2 * MIN_TAIL_TOKENS)
        cut = choose_cut(start, end, budget, self._grid, forced=not plan.work)
        if cut is None:
            plan.first_too_small = plan.first_too_small or not plan.has_prefill
            plan.too_small = True
            return False
        plan.add(sequence, cut - start)
        return True

    def _admit(self, sequence: Sequence, plan: Plan, admission: _Admission) -> None:
        """Lets a waiting sequence run, if there are a slot, blocks and budget. A fork takes nothing of the budget."""
        if not admission.is_open or (plan.preempted and plan.work):
            return
        admission.looked_at += plan.budget < 1
        if admission.most_held is not None and self._held_by(sequence) >= admission.most_held:
            return
        source, is_computed = find_source(sequence, plan)
        if source is None and (plan.budget < 1 or self._waits_for_another(sequence, is_computed, plan, admission)):
            return
        if not self._make_room(sequence, plan, source):
            plan.blocked = True
            admission.most_held = self._held_by(sequence)
        elif source is not None:
            plan.fork(sequence, source)
        elif sequence.status is Status.WAITING:
            return  # for a part of its prefix that is on its way from a lower tier
        elif self._plan_chunk(sequence, plan):
            admission.computing = self._computed_next(sequence.lane)
        else:
            admission.is_open = False  # it has its blocks, and starts when the budget reaches its first cut

    def _waits_for_another(self, sequence: Sequence, is_computed: bool, plan: Plan, admission: _Admission) -> bool:
        """Whether what it needs first is being computed by another sequence, or copied from a lower tier."""
        reusable = min(len(sequence.digests), self._tables.count_reusable(sequence))
        if is_computed or any(i < reusable and sequence.digests[i] == digest for i, digest in admission.computing):
            self._counters.shared_waits += 1
            return True
        return self._tiers.is_restoring(sequence.digests, plan.now)

    def _held_by(self, sequence: Sequence) -> int:
        """Blocks of its tenant's running sequences in the same queue; a shared one counts for each."""
        return sum(
            len(other.block_table) for other in self._lanes.running(sequence.lane) if other.tenant == sequence.tenant
        )

    def _make_room(self, sequence: Sequence, plan: Plan, source: Sequence | None = None) -> bool:
        """Admits a sequence if there are a slot and blocks for it, or for it as a fork of its source, which is in the
        same lane; the online lane takes them from the batch lane if that has enough, unless a prefill of it waits for a
        larger budget.
        A sequence whose prefix comes back from a lower tier keeps waiting, and has the room that it needs."""
        preempts = False
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
            if sequence.lane == "online" and self._lanes.runs("batch") and not plan.too_small and not preempts:
                preempts = self._fits_without_batch(sequence, plan.now, source)
            if preempts and self._lanes.runs("batch"):
                self._preempt(self._lanes.choose_victim(), plan)
            elif self._lanes.num_running or not has_slot or self._waits_for_copies(plan.now):
                return False  # whoever runs or is copied will end
            elif not self._leases.give_way(plan.now):
                return False  # what is left is being copied, and takes its time

    def _fits_without_batch(self, sequence: Sequence, now: float, source: Sequence | None) -> bool:
        """Whether there would be a slot and blocks for an online sequence if nothing of the batch queue ran."""
        batch = list(self._lanes.running("batch"))
        others = self._lanes.num_running - len(batch)
        if others + self._tiers.count_restoring(now) >= self._max_running:
            return False
        return self._tables.fits_without(batch, sequence, others, is_fork=source is not None)

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

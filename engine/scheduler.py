"""What happens to a sequence: it is let in, planned for, given its tokens, told of, and let go of.

              submit                admit                      commit: stop, length, not finite
    gateway ---------> waiting ----------------> running ----------------------------------------> finished
               |        ^ ^                         |
               v release| '-------- preempt --------'          abort ends a sequence anywhere
              held -----' its grammar is compiled

Pure bookkeeping: no threads, no clock, no model. engine/loop.py calls it from its one thread: schedule, then commit,
fail or give_up, then take_updates. engine/planner.py decides who runs and preempts, engine/results.py takes
what a step computed, engine/open_sequences.py ends sequences, engine/tables.py keeps their blocks,
engine/leases/claims.py what their breakpoints became.
"""

from __future__ import annotations

from array import array

from engine.config import EngineSettings
from engine.counters import Counters
from engine.forks import Forks
from engine.lanes import Lanes
from engine.leases.claims import Claims
from engine.leases.leases import Leases
from engine.open_sequences import OpenSequences
from engine.plan import is_prefill
from engine.planner import Planner
from engine.pool.blocks import BlockPool
from engine.protocol import TOKEN_BYTES, FinishReason, Load, Namespace, SequenceUpdate, Submit, split_digests
from engine.refusals import Limits, find_mistake
from engine.results import Results
from engine.sequence import Sequence, Status, Step
from engine.tables import BlockTables, digests_fit
from engine.tiers.tiers import Tier, Tiers


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
        self.tiers = tiers or Tiers([Tier("device", pool)])
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
        self.tiers.listen(self.leases)
        self.counters = Counters()
        self.claims = Claims(self.leases, pool.block_size)
        self._limits = Limits(
            context_tokens=context_tokens,
            room_tokens=pool.num_blocks * pool.block_size,
            vocab_size=vocab_size,
            lease_max_s=settings.lease_max_s,
        )
        self._lanes = Lanes()
        self.forks = Forks()
        self._planner = Planner(self._lanes, self.tables, self.claims, self.counters, settings)
        self._eos_ids = frozenset(eos_ids)
        self._max_waiting = settings.max_waiting
        self._sequences = OpenSequences(self._lanes, self.forks, self.tables, self.claims, self.counters)
        self._results = Results(self._sequences, self.tables, self.claims, self.counters, context_tokens=context_tokens)

    # -- commands -----------------------------------------------------------------------------------------------------

    def submit(
        self,
        owner: str,
        message: Submit,
        arrived_s: float,
        *,
        refusal: str | None = None,
        held: bool = False,
    ) -> Sequence | None:
        """Queues a new sequence, or answers it with its last update and returns None: finish "error" for one that can
        never run, "abort" for one that there is no room for now, or that comes with a `refusal`. A `held` one waits
        for `release`; what its prompt uses is renewed when it arrives, like that of all others."""
        self.counters.submitted += 1
        tokens: array[int] = array("I")
        if len(message.tokens) % TOKEN_BYTES == 0:
            tokens.frombytes(message.tokens)
        if refusal is None and self.num_waiting >= self._max_waiting:
            refusal = f"the engine is full: {self._max_waiting} sequences wait already"
        mistake = None
        if refusal is None and self.has(owner, message.seq):
            mistake = f"sequence number {message.seq} is in use"
        elif refusal is None:
            mistake = find_mistake(message, tokens, self._limits)
        if refusal or mistake:
            self.counters.refused += 1
            finish: FinishReason = "abort" if refusal else "error"
            self._sequences.update(owner, SequenceUpdate(message.seq, finish=finish, error=refusal or mistake))
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
            end_ids=frozenset(message.sampling.stop_ids).union(() if message.sampling.ignore_eos else self._eos_ids),
            status=Status.HELD if held else Status.WAITING,
            arrived_s=arrived_s,
            findable_tokens=self.tiers.count_findable(digests) * self.pool.block_size,
        )
        self.forks.join(sequence, message.group)
        self.claims.open(sequence, message.tokens)
        self._sequences.add(sequence)
        if not held:
            self._lanes.add(sequence)
        return sequence

    def release(self, sequence: Sequence) -> None:
        """Queues a sequence that was held. One that was aborted meanwhile stays what it is."""
        if sequence.status is Status.HELD:
            sequence.status = Status.WAITING
            self._lanes.add(sequence)

    def refuse_held(self, sequence: Sequence, finish: FinishReason, error: str, grammar_path: str | None) -> None:
        """Answers a sequence that was held and is not going to run."""
        if sequence.status is Status.HELD:
            self.counters.refused += 1
            self._sequences.end(sequence, finish)
            update = SequenceUpdate(sequence.seq, finish=finish, error=error, grammar_path=grammar_path)
            self._sequences.update(sequence.owner, update)

    def refuse(self, owner: str, seq: int, mistake: str, *, grammar_path: str | None = None) -> None:
        """Answers a sequence that can never run, without queueing it."""
        self.counters.submitted += 1
        self.counters.refused += 1
        self._sequences.update(owner, SequenceUpdate(seq, finish="error", error=mistake, grammar_path=grammar_path))

    def has(self, owner: str, seq: int) -> bool:
        """Whether this sequence is here and not finished."""
        return self._sequences.find(owner, seq) is not None

    def sequences(self) -> list[Sequence]:
        """All that are not finished."""
        return self._sequences.all()

    def abort(self, owner: str, seq: int) -> bool:
        """Ends a sequence at any time, without an update, and frees its blocks. False when there is none."""
        sequence = self._sequences.find(owner, seq)
        if sequence is None:
            return False
        self._sequences.end(sequence, "abort")
        return True

    def abort_owner(self, owner: str) -> int:
        """Aborts everything that a gateway sent, and drops what was not yet told to it. Returns how many there were."""
        sequences = self._sequences.of(owner)
        for sequence in sequences:
            self._sequences.end(sequence, "abort")
        self._sequences.drop_updates(owner)
        return len(sequences)

    def fail_all(self, error: str) -> None:
        """Ends every sequence with an error update."""
        for sequence in self._sequences.all():
            self._sequences.fail(sequence, error)

    # -- a step -------------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> Step | None:
        """The next step, or None when there is nothing to do, or nothing before a copy between tiers is done. Ends in
        `commit`, `fail` or `give_up` before the next call.

        now  monotonic second; becomes scheduled_s of sequences that are served for the first time
        """
        self.leases.expire(now)
        self.pool.advance(now)
        self.tables.settle()
        plan = self._planner.plan(now)
        if plan.is_empty:
            self.tables.settle()
            assert not self.has_work or self.tiers.busy or self.waits_for_masks, "sequences are left and none can run"
            return None
        self.counters.steps += 1
        copies = self.tables.take_copies()
        self.counters.copied_blocks += len(copies)
        return plan.step(copies)

    def commit(self, step: Step, results: list[int | None], now: float) -> None:
        """Takes the results of a step that succeeded, one for each work and fork: full blocks become findable, tokens
        are appended, sequences that are at their end are finished."""
        self.pool.advance(now)
        self.tables.settle()
        self._results.take(step, results, now)

    def fail(self, step: Step, error: str) -> None:
        """The step did not succeed: its sequences end with an error, and nothing that it wrote becomes findable."""
        self.tables.settle()
        for sequence in step.sequences:
            if sequence.status is Status.RUNNING:
                self._sequences.fail(sequence, error)

    def can_give_up(self, step: Step) -> bool:
        """Whether `give_up` may end the step: it has work of the batch lane in it, and nothing that the online lane
        waits for but single tokens."""
        online = any(work.sequence.lane == "online" and is_prefill(work) for work in step.work)
        return not step.forks and not online and any(work.sequence.lane == "batch" for work in step.work)

    def give_up(self, step: Step) -> None:
        """The step was not computed. Its sequences stay as they were, and are planned for anew."""
        self.tables.settle()
        self.counters.steps_given_up += 1

    def take_updates(self) -> dict[str, list[SequenceUpdate]]:
        """What has to be told to each owner since the last call."""
        return self._sequences.take_updates()

    # -- numbers ------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.num_waiting or self.num_running)

    @property
    def waits_for_masks(self) -> bool:
        """Whether a sequence that runs sits the next step out, because its mask is not here."""
        return any(not sequence.can_sample for sequence in self._lanes.running())

    @property
    def num_waiting(self) -> int:
        return self._lanes.num_waiting

    @property
    def num_running(self) -> int:
        return self._lanes.num_running

    def load(self) -> Load:
        """How busy the engine is; the rates and `draining` are the loop's to fill in."""
        batch_backlog = self._lanes.count_unprefilled("batch")
        return Load(
            waiting=self.num_waiting,
            running=self.num_running,
            prefill_backlog=self._lanes.count_unprefilled("online") + batch_backlog,
            free_blocks=self.pool.num_free,
            cached_blocks=self.pool.num_cached,
            live_blocks=self.pool.num_live,
            leased_blocks=self.leases.num_blocks(),
            batch_waiting=self._lanes.count_waiting("batch"),
            batch_running=self._lanes.count_running("batch"),
            batch_backlog=batch_backlog,
        )

"""What happens to a sequence: it is admitted, planned for, given its tokens, reported and released.

              submit                admit                      commit: stop, length, not finite
    gateway ---------> waiting ----------------> running ----------------------------------------> finished
               |        ^ ^                         |
               v release| '-------- preempt --------'          abort ends a sequence anywhere
              held -----' its grammar is compiled

Pure bookkeeping: no threads, no clock, no model. engine/loop.py calls it from its one thread: schedule, then commit,
fail or give_up, then take_updates. engine/planner.py decides which sequences run, engine/open_sequences.py takes what
a step computed and ends sequences, engine/tables.py keeps their blocks, engine/leases/claims.py what their
breakpoints became.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from engine.config import EngineSettings
from engine.leases.claims import Claims
from engine.leases.leases import Leases
from engine.open_sequences import OpenSequences
from engine.planner import Planner
from engine.pool.blocks import BlockPool
from engine.protocol import (
    DIGEST_BYTES,
    LANES,
    TOKEN_BYTES,
    Breakpoint,
    FinishReason,
    Load,
    Namespace,
    SequenceUpdate,
    Submit,
    adapter_salt,
    split_digests,
)
from engine.queues import Queues
from engine.sequence import Counters, Result, Sequence, Status, Step
from engine.tables import BlockTables
from engine.tiers.tier import PurgeReport, Tier
from engine.tiers.tiers import Tiers

if TYPE_CHECKING:
    from engine.sampling.grammar_pool import GrammarPool
    from engine.sampling.grammar_worker import Refusal

MAX_BREAKPOINTS = 64
"""Of one prompt. Anthropic's API has 4; a gateway that caches conversations by itself may send one for each turn."""


class Scheduler:
    """Sequences of all gateways, from submit to finish.

    context_tokens  prompt and completion together
    vocab_size      token ids are below it
    eos_ids         end a sequence unless its sampling ignores them
    tiers           the pool's and those below it; the pool's alone when not given
    grammars        where grammars are compiled; without it, sequences that have one are refused
    adapters        fingerprints of the model's LoRA adapters, the first of which has number 1
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
        grammars: GrammarPool | None = None,
        adapters: Iterable[str] = (),
    ) -> None:
        assert namespace.block_size == pool.block_size, "the namespace and the pool disagree about the block size"
        self.pool = pool
        self.grammars = grammars
        self.tiers = tiers or Tiers(Tier("device", pool))
        assert self.tiers.pools[0] is pool, "the first tier is the pool"
        self.tables = BlockTables(pool, namespace, self.tiers)
        self.leases = Leases(
            {tier.name: tier.pool for tier in self.tiers.tiers},
            share=settings.lease_share,
            tenant_share=settings.lease_tenant_share,
            max_leases=settings.max_leases,
        )
        self.tiers.listen(self.leases)
        self.counters = Counters()
        self.claims = Claims(self.leases, pool.block_size)
        self._context_tokens, self._vocab_size, self._lease_max_s = context_tokens, vocab_size, settings.lease_max_s
        self._queues = Queues()
        self._planner = Planner(self._queues, self.tables, self.claims, self.counters, settings)
        self._eos_ids = frozenset(eos_ids)
        self._adapters = {fingerprint: number for number, fingerprint in enumerate(adapters, 1)}
        self._max_waiting = settings.max_waiting
        self._sequences = OpenSequences(
            self._queues, self.tables, self.claims, self.counters, context_tokens=context_tokens
        )

    # -- commands -----------------------------------------------------------------------------------------------------

    def submit(self, owner: str, message: Submit, arrived_s: float, *, refusal: str | None = None) -> Sequence | None:
        """Queues a new sequence, or answers it with its last update and returns None: finish "error" for one that can
        never run, "abort" for one that there is no room for now, or that has a `refusal`. One with a grammar is held
        until that is compiled; the leases of its prompt are renewed when it arrives, like those of all others."""
        self.counters.submitted += 1
        tokens, grammar = array("I"), message.grammar
        if len(message.tokens) % TOKEN_BYTES == 0:
            tokens.frombytes(message.tokens)
        if refusal is None and self.num_waiting >= self._max_waiting:
            refusal = f"the engine is full: {self._max_waiting} sequences wait already"
        mistake = grammar_path = None
        if refusal is None and self.has(owner, message.seq):
            mistake = f"sequence number {message.seq} is in use"
        elif refusal is None:
            mistake = self._find_mistake(message, tokens)
        if grammar is not None and not refusal and not mistake:
            if self.grammars is None:
                mistake, grammar_path = "this engine has no structured output", ""
            else:
                refusal = self.grammars.find_refusal(message.tenant, grammar)
        if refusal or mistake:
            self.counters.refused += 1
            update = SequenceUpdate(message.seq, finish="abort" if refusal else "error", error=refusal or mistake)
            update.grammar_path = grammar_path
            self._sequences.update(owner, update)
            return None
        sequence = self._make_sequence(owner, message, tokens, arrived_s)
        self.claims.open(sequence, message.tokens)
        self._sequences.add(sequence, message.group)
        if grammar is None or self.grammars is None:
            self._queues.add(sequence)
        else:
            sequence.status = Status.HELD
            matcher = self.grammars.open(grammar, tenant=message.tenant, salt=message.salt, lane=message.lane)
            sequence.matcher = matcher
            matcher.compile(partial(self._compiled, sequence))
        return sequence

    def _find_mistake(self, message: Submit, tokens: array[int]) -> str | None:
        """Why a sequence can never run, or None. `tokens` are those of the message, empty when its bytes are none."""
        prompt, most = len(tokens), message.sampling.max_tokens
        if not prompt:
            return "the prompt is empty" if not message.tokens else "the prompt's bytes are not whole token ids"
        if message.adapter and message.adapter not in self._adapters:
            return f"this engine has no adapter {message.adapter}"
        if message.grammar is not None and message.sampling.ignore_eos:
            return "ignore_eos goes on where a grammar's text is complete; only one of them is possible"
        if message.lane not in LANES:
            return f"there is no lane {message.lane!r}; there are {' and '.join(LANES)}"
        if most < 0:
            return f"max_tokens is {most}; it must be at least 0"
        both = f"{prompt} prompt tokens and max_tokens {most} are {prompt + most} tokens together"
        if prompt + most > self._context_tokens:
            return f"{both}; the model's context is {self._context_tokens} tokens"
        room_tokens = self.pool.num_blocks * self.pool.block_size
        if prompt + most > room_tokens:
            return f"{both}; the engine has memory for {room_tokens} tokens (kv_cache_bytes)"
        if not message.sampling.repetition_penalty > 0:
            return f"repetition_penalty is {message.sampling.repetition_penalty}; it must be above 0"
        if message.sampling.prompt_logprobs is not None and message.use_cache:
            return "log probabilities of a prompt are those of tokens that are computed: use_cache must be off"
        if max(tokens) >= self._vocab_size:
            return f"the prompt has token id {max(tokens)}; ids of this model are below {self._vocab_size}"
        return find_bad_breakpoint(message.breakpoints, prompt, self._lease_max_s)

    def _make_sequence(self, owner: str, message: Submit, tokens: array[int], arrived_s: float) -> Sequence:
        salt = message.salt + adapter_salt(message.adapter)
        if not message.use_cache:
            digests = []
        elif len(message.digests) == len(tokens) // self.pool.block_size * DIGEST_BYTES:
            digests = split_digests(message.digests)
        else:
            digests = self.tables.chain(message.tokens, salt)
        return Sequence(
            owner=owner,
            seq=message.seq,
            tokens=tokens,
            num_prompt=len(tokens),
            digests=digests,
            sampling=message.sampling,
            salt=salt,
            adapter=self._adapters.get(message.adapter, 0),
            lane=message.lane,
            request_id=message.request_id,
            tenant=message.tenant,
            breakpoints=tuple(sorted(message.breakpoints, key=lambda point: point.tokens)),
            use_cache=message.use_cache,
            end_ids=frozenset(message.sampling.stop_ids).union(() if message.sampling.ignore_eos else self._eos_ids),
            arrived_s=arrived_s,
            findable_tokens=self.tiers.count_findable(digests) * self.pool.block_size,
        )

    def _compiled(self, sequence: Sequence, refusal: Refusal | None) -> None:
        """Queues a sequence that was held, or ends it. One that was aborted meanwhile stays what it is."""
        if sequence.status is not Status.HELD:
            return
        if refusal is None:
            sequence.status = Status.WAITING
            self._queues.add(sequence)
        else:
            self.counters.refused += 1
            finish: FinishReason = "abort" if refusal.path is None else "error"  # an abort may be tried elsewhere
            self._sequences.end(sequence, finish)
            update = SequenceUpdate(sequence.seq, finish=finish, error=refusal.reason, grammar_path=refusal.path)
            self._sequences.update(sequence.owner, update)

    def has(self, owner: str, seq: int) -> bool:
        """Whether this sequence is here and not finished."""
        return self._sequences.find(owner, seq) is not None

    def abort(self, owner: str, seq: int) -> bool:
        """Ends a sequence at any time, without an update, and frees its blocks. False when there is none."""
        sequence = self._sequences.find(owner, seq)
        if sequence is None:
            return False
        self._sequences.end(sequence, "abort")
        return True

    def abort_owner(self, owner: str) -> int:
        """Aborts everything that a gateway sent, and drops its unsent updates. Returns how many there were."""
        sequences = self._sequences.of(owner)
        for sequence in sequences:
            self._sequences.end(sequence, "abort")
        self._sequences.drop_updates(owner)
        return len(sequences)

    def fail_all(self, error: str) -> None:
        """Ends every sequence with an error update."""
        for sequence in self._sequences.all():
            self._sequences.fail(sequence, error)

    def purge(self, prefix: str, done: Callable[[PurgeReport | None], object]) -> None:
        """Makes the engine forget a tenant or a namespace: everything whose salt begins with a prefix.

        leases      end
        sequences   that wait or run go on, reuse nothing more, and nothing that they compute is kept
        blocks      cannot be found any more, in no tier; those that sequences hold stay with them until they end
        files       are gone when `done` is called

        What requests that come later compute is kept as usual. `done` is called once, perhaps before this returns; with
        None when the start is not over or too many purges wait.
        """
        if not self.tiers.can_purge:
            done(None)
            return
        report = PurgeReport(owner=self.tiers.owner)
        report.leases = self.leases.purge(prefix)
        for sequence in self._sequences.all():
            if sequence.salt.startswith(prefix):
                self.tables.detach(sequence)
                self.claims.close(sequence)
                report.sequences += 1
        self.tiers.purge(prefix, report, done)

    # -- a step -------------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> Step | None:
        """The next step, or None when there is nothing to do, or nothing before a copy between tiers is done. Ends in
        `commit`, `fail` or `give_up` before the next call.

        now  monotonic second; becomes scheduled_s of sequences that are served for the first time
        """
        self.leases.expire(now)
        self.pool.policy.advance(now)
        plan = self._planner.plan(now)
        if plan.is_empty:
            assert not self.has_work or self.tiers.busy or self.waits_for_masks, "sequences are left and none can run"
            return None
        self.counters.steps += 1
        self.counters.copied_blocks += len(plan.copies)
        return plan.step()

    def commit(self, step: Step, results: list[Result], now: float) -> None:
        """Takes the results of a step that succeeded, one for each work and fork: full blocks become findable, tokens
        are appended, sequences that are at their end are finished."""
        self.pool.policy.advance(now)
        self._sequences.take(step, results, now)

    def learn(self, step: Step, seconds: float) -> None:
        """A step took so long."""
        self._planner.learn(step, seconds)

    def fail(self, step: Step, error: str) -> None:
        """The step did not succeed: its sequences end with an error, and nothing that it wrote becomes findable."""
        for sequence in step.sequences:
            if sequence.status is Status.RUNNING:
                self._sequences.fail(sequence, error)

    def can_give_up(self, step: Step) -> bool:
        """Whether `give_up` may end the step: it has work of the batch lane in it, and nothing that the online lane
        waits for but single tokens."""
        online = any(work.sequence.lane == "online" and work.is_prefill for work in step.work)
        return not step.forks and not online and any(work.sequence.lane == "batch" for work in step.work)

    def give_up(self, step: Step) -> None:
        """The step was not computed. Its sequences stay as they were, and are planned for anew."""
        self.counters.steps_given_up += 1

    def take_updates(self) -> dict[str, list[SequenceUpdate]]:
        """Updates for each owner since the last call."""
        return self._sequences.take_updates()

    # -- numbers ------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.num_waiting or self.num_running)

    @property
    def waits_for_masks(self) -> bool:
        """Whether a sequence that runs sits the next step out, because its mask is not here."""
        return any(not sequence.can_sample for sequence in self._queues.running())

    @property
    def num_groups(self) -> int:
        """Prompts with more than one answer."""
        return self._sequences.num_groups

    @property
    def num_held(self) -> int:
        """Sequences that wait for their grammars."""
        return 0 if self.grammars is None else self.grammars.num_waiting

    @property
    def num_waiting(self) -> int:
        return self._queues.num_waiting

    @property
    def num_running(self) -> int:
        return self._queues.num_running

    def load(self) -> Load:
        """How busy the engine is; the rates and `draining` are the loop's to fill in."""
        batch_backlog = self._queues.count_unprefilled("batch")
        return Load(
            waiting=self.num_waiting,
            running=self.num_running,
            prefill_backlog=self._queues.count_unprefilled("online") + batch_backlog,
            free_blocks=self.pool.num_free,
            cached_blocks=self.pool.num_cached,
            live_blocks=self.pool.num_live,
            leased_blocks=self.leases.num_blocks(),
            batch_waiting=self._queues.count_waiting("batch"),
            batch_running=self._queues.count_running("batch"),
            batch_backlog=batch_backlog,
        )


def find_bad_breakpoint(breakpoints: tuple[Breakpoint, ...], num_tokens: int, max_s: float) -> str | None:
    """Why breakpoints of a prompt of so many tokens cannot be granted, or None."""
    if len(breakpoints) > MAX_BREAKPOINTS:
        return f"the prompt has {len(breakpoints)} breakpoints; it may have {MAX_BREAKPOINTS}"
    for point in breakpoints:
        if not 1 <= point.tokens <= num_tokens:
            return f"a breakpoint is at token {point.tokens}; it must be between 1 and the prompt's {num_tokens}"
        if not 0 < point.ttl_s < float("inf"):
            return f"a breakpoint's time to live is {point.ttl_s} s; it must be a number above 0"
        if point.ttl_s > max_s:
            return f"a breakpoint's time to live is {point.ttl_s:g} s; the most is {max_s:g} s (engine.lease_max_s)"
    return None

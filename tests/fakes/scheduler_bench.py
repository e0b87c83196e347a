"""A scheduler with a pool and a fake model, driven by hand: what the tests of the engine's core stand on."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from engine.config import EngineSettings
from engine.pool.blocks import BlockPool
from engine.pool.eviction import EvictionPolicy
from engine.protocol import Breakpoint, Group, Namespace, Sampling, SequenceUpdate, Submit, chain_digests
from engine.scheduler import Scheduler
from engine.sequence import Sequence, Step, StepGivenUp
from tests.fakes.oracle_runner import OracleRunner, choose_answer
from tests.fakes.tuned import PATIENT, tuned

SIZE = 4
VOCAB = 50
NAMESPACE = Namespace(weights="w", dtype="float32", kv_dtype="float32", block_size=SIZE)


def pack(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


def digests_of(tokens: list[int], salt: str = "", adapter: str = "") -> bytes:
    root = replace(NAMESPACE, salt=salt, adapter=adapter).root()
    return chain_digests(root, pack(tokens), SIZE)


STEP_S = 0.005


@dataclass
class Bench:
    """A scheduler with a pool and a model, driven by hand."""

    pool: BlockPool
    scheduler: Scheduler
    runner: OracleRunner
    now: float = 0.0
    updates: dict[tuple[str, int], list[SequenceUpdate]] = field(default_factory=dict)
    gives_up: bool = False  # the next step that can be given up
    takes_s: Callable[[Step], float] | None = None  # what the engine learns from steps, if anything

    def __post_init__(self) -> None:
        self.scheduler.tables.find_not_finite = self.runner.find_not_finite

    def submit(
        self,
        seq: int,
        tokens: list[int],
        *,
        owner: str = "g",
        salt: str = "",
        lane: Any = "online",
        digests: bytes | None = None,
        tenant: str = "",
        breakpoints: tuple[tuple[int, float], ...] = (),
        use_cache: bool = True,
        group: tuple[int, int] | None = None,
        adapter: str = "",
        **sampling: Any,
    ) -> Sequence | None:
        self.now += 0.001
        sampling.setdefault("max_tokens", 4)
        digests = digests_of(tokens, salt, adapter) if digests is None else digests
        message = Submit(
            seq,
            pack(tokens),
            digests,
            Sampling(**sampling),
            salt,
            lane,
            tenant=tenant,
            breakpoints=tuple(Breakpoint(length, ttl_s) for length, ttl_s in breakpoints),
            use_cache=use_cache,
            group=None if group is None else Group(*group),
            adapter=adapter,
        )
        return self.scheduler.submit(owner, message, self.now)

    def step(self) -> bool:
        """One step. False when there was nothing to do."""
        self.now += 0.010
        step = self.scheduler.schedule(self.now)
        if step is not None:
            assert len({work.sequence.lane for work in step.work if work.is_prefill}) < 2, "the lanes share a step"
            if self.gives_up and self.scheduler.can_give_up(step):
                step = replace(step, unwanted=lambda: True)
                self.gives_up = False
            try:
                results = self.runner.run(step)
            except StepGivenUp:
                self.scheduler.give_up(step)
            except RuntimeError:
                self.scheduler.fail(step, "failed")
            else:
                if self.takes_s is not None:
                    self.scheduler.learn(step, self.takes_s(step))
                self.scheduler.commit(step, results, self.now + STEP_S)
        self.collect()
        assert self.pool.check_invariants() + self.scheduler.leases.check_invariants() == []
        return step is not None

    def collect(self) -> None:
        for owner, updates in self.scheduler.take_updates().items():
            for update in updates:
                self.updates.setdefault((owner, update.seq), []).append(update)

    def finish(self, limit: int = 2000) -> None:
        while self.step():
            limit -= 1
            assert limit, "the scheduler makes no progress"
        assert (self.pool.num_live, len(self.scheduler.tables), self.scheduler.num_waiting) == (0, 0, 0)
        assert not len(self.scheduler.claims)
        assert not self.scheduler.num_groups

    def answer(self, seq: int, owner: str = "g") -> list[int]:
        return [token for update in self.of(seq, owner) for token in update.tokens]

    def of(self, seq: int, owner: str = "g") -> list[SequenceUpdate]:
        self.collect()
        return self.updates.get((owner, seq), [])


def make(
    num_blocks: int = 64,
    *,
    context_tokens: int = 1000,
    eos_ids: tuple[int, ...] = (),
    policy: EvictionPolicy | None = None,
    adapters: tuple[str, ...] = (),
    **changes: Any,
) -> Bench:
    values: dict[str, Any] = {"block_size": SIZE, "step_tokens": 64, "max_sequences": 8, **PATIENT}
    config = tuned(EngineSettings, **(values | changes))
    pool = BlockPool(num_blocks, SIZE, policy)
    scheduler = Scheduler(
        pool,
        NAMESPACE,
        config,
        context_tokens=context_tokens,
        vocab_size=VOCAB,
        eos_ids=eos_ids,
        adapters=adapters,
    )
    return Bench(pool, scheduler, OracleRunner(pool, VOCAB, config.step_tokens))


def expected(tokens: list[int], max_tokens: int = 4, salt: str = "", stops: frozenset[int] = frozenset()) -> list[int]:
    return choose_answer(salt, tokens, VOCAB, max_tokens, stops)


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + i * 7) % VOCAB for i in range(length)]

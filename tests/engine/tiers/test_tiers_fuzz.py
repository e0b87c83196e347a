"""Random commands over tiny tiers, with a model and stores that know where every key came from.

Whatever is submitted, leased, aborted, preempted, poisoned, saved, restored, evicted, torn, out of room or restarted,
and whenever a copy is made and told of: nobody reads a strange block, every answer is the one that the sequence gets
alone, the index is told the truth, and no reference, slot or file leaks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.leases.pins import take_fingerprint
from engine.protocol import DIGEST_BYTES, HASHES, split_digests
from engine.tiers.tier import PAUSE_S
from tests.fakes.oracle_runner import choose_answer
from tests.fakes.scheduler_bench import SIZE, VOCAB, digests_of, pack
from tests.fakes.tier_bench import TierBench, make

EOS = 3


class Fuzz:
    """One run of random commands; `rng` decides everything."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.seen: Counter[str] = Counter()
        self.asked: dict[int, tuple[str, list[int], str, int]] = {}  # seq -> owner, tokens, salt, max_tokens
        self.aborted: set[int] = set()
        self.marked: dict[bytes, list[int]] = {}  # fingerprint -> tokens before a breakpoint
        self.last = 0
        self.context = 0
        self.bench = self.build(None)

    def build(self, old: TierBench | None) -> TierBench:
        rng = self.rng
        self.context = rng.choice([24, 32])
        return make(
            rng.choice([8, 9, 10, 12, 16]),
            host=rng.choice([0, 0, 3, 8, 20]),
            disk=rng.choice([4, 20, 60]),
            files=old and old.disk,
            prefixes=old and old.runner.prefixes,
            queue_bytes=rng.choice([300, 2000, 1 << 20]),
            part_blocks=rng.choice([1, 3, 64]),
            step_tokens=rng.choice([16, 20, 33]),
            prefill_grid_tokens=rng.choice([16, 18]),
            max_sequences=rng.randint(1, 6),
            max_waiting=6,
            context_tokens=self.context,
            lease_share=rng.choice([0.5, 1.0]),
            lease_tenant_share=rng.choice([0.5, 1.0]),
            max_leases=rng.choice([3, 50]),
            eos_ids=(EOS,),
        )

    def run(self, commands: int) -> Counter[str]:
        rules: list[tuple[Callable[[], object], float]] = [
            (self.submit, 20),
            (self.bench_step, 40),
            (self.work, 25),
            (self.deliver, 25),
            (self.abort, 3),
            (self.hang_up, 0.5),
            (self.poison, 0.5),
            (self.fail_step, 0.5),
            (self.tear, 4),
            (self.fail_store, 0.5),
            (self.recover, 5),
            (self.restart, 0.5),
        ]
        names, weights = zip(*rules, strict=True)
        for _ in range(commands):
            (rule,) = self.rng.choices(names, weights)
            rule()
            self.bench.listen()
        self.end()
        return self.seen

    # -- rules --------------------------------------------------------------------------------------------------------

    def submit(self) -> None:
        """Prompts are made of two kinds of block, so that equal blocks stand behind different prefixes."""
        rng = self.rng
        kinds = [int(rng.random() < 0.3) for _ in range(rng.randint(0, 5))]
        tokens = [kind for kind in kinds for _ in range(SIZE)] + [
            rng.randrange(VOCAB) for _ in range(rng.randint(0, 5))
        ]
        owner, salt, max_tokens = rng.choice("pq"), rng.choice(["", "a"]), rng.randint(1, 8)
        forged = digests_of([rng.randrange(2)] * len(tokens), "a") if rng.random() < 0.1 else None
        points: tuple[tuple[int, float], ...] = ()
        if tokens and rng.random() < 0.2:
            points = ((rng.randint(1, len(tokens)), rng.choice([0.1, 1.0, 100.0])),)
            self.marked[take_fingerprint(pack(tokens[: points[0][0]]))] = tokens[: points[0][0]]
        self.last += 1
        lane = rng.choice(["online", "online", "batch"])
        if self.bench.submit(
            self.last,
            tokens,
            owner=owner,
            salt=salt,
            lane=lane,
            max_tokens=max_tokens,
            digests=forged,
            breakpoints=points,
            use_cache=rng.random() < 0.95,
        ):
            self.asked[self.last] = (owner, tokens, salt, max_tokens)

    def bench_step(self) -> None:
        self.seen["steps"] += self.bench.step()

    def work(self) -> None:
        self.rng.choice(sorted(self.bench.workers.items()))[1].work()

    def deliver(self) -> None:
        leases = self.bench.scheduler.leases
        before = leases.num_blocks()
        self.rng.choice(sorted(self.bench.workers.items()))[1].deliver()
        self.seen["leased blocks moved down"] += max(0, before - leases.num_blocks())
        for tier in self.bench.tiers.lower:
            assert tier.pool.check_invariants() == []
        assert leases.check_invariants() == []

    def abort(self) -> None:
        if self.asked:
            seq = max(self.asked) - self.rng.randrange(8)
            if seq in self.asked and self.bench.scheduler.abort(self.asked[seq][0], seq):
                self.aborted.add(seq)

    def hang_up(self) -> None:
        self.bench.collect()
        owner = self.rng.choice("pq")
        self.bench.scheduler.abort_owner(owner)
        self.aborted |= {seq for seq, asked in self.asked.items() if asked[0] == owner} - self.finished().keys()

    def poison(self) -> None:
        if self.asked:
            seq = self.rng.choice(sorted(self.asked)[-6:])
            self.bench.runner.poisoned.add((self.asked[seq][0], seq))
            self.bench.runner.all_bad = self.rng.random() < 0.7

    def fail_step(self) -> None:
        self.bench.runner.fails = True
        self.bench.step()
        self.bench.runner.fails = False

    def tear(self) -> None:
        if self.bench.disk.files:
            digest = self.rng.choice(sorted(self.bench.disk.files))
            del self.bench.disk.files[digest]
            self.bench.disk.torn.add(digest)

    def fail_store(self) -> None:
        self.bench.disk.fails = True
        if self.bench.host is not None:
            self.bench.host.fails = self.rng.random() < 0.5

    def recover(self) -> None:
        self.bench.disk.fails = False
        if self.bench.host is not None:
            self.bench.host.fails = False
        self.bench.now += PAUSE_S

    def restart(self) -> None:
        """As if the process were killed: what was copied is there, nothing else."""
        self.check_answers()
        self.count()
        self.recover()
        self.asked.clear()
        self.aborted.clear()
        self.bench = self.build(self.bench)
        if self.rng.random() < 0.5:
            self.bench.settle()
            self.seen["adopted"] += len(self.bench.tiers.lower[-1].pool.prefixes)

    # -- what must hold -----------------------------------------------------------------------------------------------

    def end(self) -> None:
        self.recover()
        self.bench.finish()
        self.bench.listen()
        self.bench.check_contents()
        assert self.bench.disk.files.keys() <= set(split_digests(self.bench.tiers.pools[-1].prefixes.snapshot().stored))
        finished = self.finished()
        assert self.asked.keys() - self.aborted <= finished.keys()
        self.check_promises()
        self.check_answers()
        self.count()
        leases = self.bench.scheduler.leases
        assert leases.check_invariants() == []
        leases.expire(self.bench.now + 1e4)
        for pool in self.bench.tiers.pools:
            assert pool.check_invariants() == []
            assert pool.allocate(pool.num_blocks) is not None, "a block leaked"

    def check_promises(self) -> None:
        """Who asks for what is leased reads it, and computes no block of it again, wherever it is kept by now;
        unless others' blocks have taken its digests above."""
        room = min(self.bench.pool.num_blocks * SIZE, self.context)
        for lease in list(self.bench.scheduler.leases):
            tokens = self.marked[lease.fingerprint]
            digests = split_digests(digests_of(tokens, lease.salt))
            honest = digests[-1:] in ([lease.digest], [])
            if lease.state != "kept" or not honest or len(tokens) + SIZE > room:
                continue
            counters = self.bench.scheduler.leases.counters
            squatted = self.bench.pool.prefixes.count_findable(digests) > len(
                self.bench.pool.prefixes.find(lease.salt, pack(tokens), digests)
            )
            broken = counters.degraded + counters.lost
            self.last += 1
            self.bench.submit(self.last, [*tokens, 0, 1, 2, 3][: room - 1], salt=lease.salt, max_tokens=1)
            self.bench.finish()
            if broken == counters.degraded + counters.lost:  # no file was torn, and no lease had to give way
                update = self.bench.of(self.last)[0]
                assert (update.lease_read_tokens or 0) >= lease.tokens
                assert squatted or (update.cached_tokens or 0) >= lease.depth * SIZE
                self.seen["promises"] += 1

    def finished(self) -> dict[int, str]:
        return {seq: u.finish for (_, seq), updates in self.bench.updates.items() for u in updates if u.finish}

    def check_answers(self) -> None:
        finished = self.finished()
        for seq, (owner, tokens, salt, max_tokens) in self.asked.items():
            answer = self.bench.answer(seq, owner)
            alone = choose_answer(salt, tokens, VOCAB, max_tokens, frozenset({EOS}))
            assert answer == alone[: len(answer)]
            if finished.get(seq) in ("stop", "length"):
                assert answer == alone

    def count(self) -> None:
        counters = self.bench.scheduler.counters
        self.seen.update(preemptions=counters.preemptions, cached_tokens=counters.cached_tokens)
        for stats in (self.bench.tiers.stats()[tier.name] for tier in self.bench.tiers.lower):
            self.seen.update({name: stats[name] for name in ("saved", "restored", "dropped", "failed", "torn")})
            self.seen["evicted below"] += stats["evictions"]


def run_many(seeds: range, commands: int = 300) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen += Fuzz(random.Random(seed)).run(commands)
    return seen


def test_no_order_of_copies_reads_a_strange_block_or_leaks() -> None:
    seen = run_many(range(60))
    assert min(seen.values()) > 20, f"the fuzzer does not reach everything: {seen}"


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_no_order_of_copies_reads_a_strange_block_when_digests_collide(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = HASHES["xxh3_128"]

    def weak(data: bytes) -> bytes:
        return (int.from_bytes(exact(data), "big") % (1 << bits)).to_bytes(DIGEST_BYTES, "big")

    monkeypatch.setitem(HASHES, "xxh3_128", weak)
    run_many(range(100, 130))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False), st.integers(1, 60))
def test_no_short_history_does_either(rng: random.Random, commands: int) -> None:
    Fuzz(rng).run(commands)


@pytest.mark.slow
def test_no_order_of_many_copies_reads_a_strange_block_or_leaks() -> None:
    run_many(range(1000, 2000))

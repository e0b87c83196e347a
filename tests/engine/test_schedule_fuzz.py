"""Random commands against tiny pools, with a model that knows where every key came from.

Whatever is submitted, aborted, preempted, leased, failed or forged: nobody reads a strange block, every answer is the
one that the sequence gets alone, what is leased stays what it was, and nothing leaks. Once with a hash that hardly ever
collides, once with one that always does.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from engine.leases.pins import Lease, take_fingerprint
from engine.pool.hit_density import HitDensity
from engine.protocol import DIGEST_BYTES, HASHES, split_digests
from tests.fakes.oracle_runner import choose_answer
from tests.fakes.scheduler_bench import SIZE, VOCAB, digests_of, make, pack

EOS = 3
COMMANDS = 300


class Fuzz:
    """One run of random commands, reproducible by its seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        num_blocks = rng.choice([*range(8, 20), 130])
        self.context = rng.choice([32, 44])
        self.bench = make(
            num_blocks=num_blocks,
            policy=HitDensity(num_blocks, SIZE, max_records=16) if seed % 2 else None,
            step_tokens=rng.choice([16, 20, 33]),
            prefill_grid_tokens=rng.choice([16, 18]),
            batch_step_tokens=rng.choice([16, 256]),
            max_sequences=rng.randint(1, 6),
            max_waiting=6,
            context_tokens=self.context,
            eos_ids=(EOS,),
            lease_share=rng.choice([0.5, 1.0]),
            lease_tenant_share=rng.choice([0.25, 0.5, 1.0]),
            max_leases=rng.choice([3, 50]),
        )
        self.told: set[bytes] = set()
        self.asked: dict[int, tuple[str, list[int], str, int]] = {}  # seq -> owner, tokens, salt, max_tokens
        self.aborted: set[int] = set()
        self.promised: dict[Lease, object] = {}  # kept lease -> what is in the last slot that it keeps
        self.marked: dict[bytes, list[int]] = {}  # fingerprint -> tokens before a breakpoint
        self.promises = 0  # that were claimed at the end
        self.last = 0
        self.several: dict[str, Any] = {}  # what the last one was asked that may get more answers

    def run(self) -> Counter[str]:
        rules: list[Callable[[], object]] = [
            self.submit,
            self.ask_several,
            self.ask_again,
            self.bench.step,
            self.abort,
            self.hang_up,
            self.poison,
            self.break_row,
            self.fail,
            self.wait,
            self.give_way,
            self.give_up,
        ]
        for _ in range(COMMANDS):
            (rule,) = self.rng.choices(rules, [24, 6, 8, 60, 3, 0.5, 0.5, 0.5, 0.5, 2, 1, 4])
            rule()
            self.check()
        self.bench.finish()
        self.check()
        self.check_answers()
        self.check_promises()
        leases = self.bench.scheduler.leases
        leases.expire(self.bench.now + 1e4)
        assert len(leases) == leases.num_blocks() == 0
        pool, counters = self.bench.pool, self.bench.scheduler.counters
        assert self.bench.scheduler.load().prefill_backlog == 0
        assert pool.allocate(pool.num_blocks) is not None, "a block leaked"
        return Counter(
            steps=counters.steps,
            preemptions=counters.preemptions,
            cached_tokens=counters.cached_tokens,
            shared_waits=counters.shared_waits,
            not_finite=counters.not_finite,
            failed_rows=counters.failed_rows,
            evictions=pool.evictions,
            shared_tokens=counters.shared_tokens,
            leases_granted=leases.counters.granted,
            leases_renewed=leases.counters.renewed,
            leases_expired=leases.counters.expired,
            leases_degraded=leases.counters.degraded,
            leases_kept_again=leases.counters.kept_again,
            promises=self.promises,
            leases_read=leases.counters.read_tokens,
            forks=counters.forks,
            copied_blocks=counters.copied_blocks,
            given_up=counters.steps_given_up,
            whole=sum(finish in ("stop", "length") for finish in self.finished().values()),
        )

    def submit(self) -> None:
        """Prompts are made of two kinds of block, so that equal blocks stand behind different prefixes."""
        rng = self.rng
        kinds = [int(rng.random() < 0.3) for _ in range(rng.randint(0, 8))]
        tokens = [kind for kind in kinds for _ in range(SIZE)] + [
            rng.randrange(VOCAB) for _ in range(rng.randint(0, 5))
        ]
        salt = rng.choice(["", "a"])
        points = [
            (rng.randint(1, len(tokens)), rng.choice([0.1, 1.0, 50.0]))
            for _ in range(rng.choice([0, 0, 1, 2]) if tokens else 0)
        ]
        for length, _ in points:
            self.marked[take_fingerprint(pack(tokens[:length]))] = tokens[:length]
        forged = digests_of([rng.randrange(2)] * len(tokens), "a") if rng.random() < 0.1 else None
        self.several = {
            "tokens": tokens,
            "owner": rng.choice("pq"),
            "salt": salt,
            "lane": rng.choice(["online", "online", "batch"]),
            "digests": forged,
            "tenant": rng.choice("tu"),
            "breakpoints": tuple(points),
            "use_cache": rng.random() < 0.95,
            "group": (self.last, rng.randint(2, 6)) if rng.random() < 0.5 else None,
        }
        self.ask(**self.several)

    def ask(self, **options: Any) -> None:
        self.last += 1
        max_tokens = self.rng.randint(1, 16)
        if self.bench.submit(self.last, max_tokens=max_tokens, **options) is not None:
            self.asked[self.last] = (options["owner"], options["tokens"], options["salt"], max_tokens)

    def ask_several(self) -> None:
        self.submit()
        for _ in range(self.rng.randint(1, 5)):
            self.ask(**self.several)

    def ask_again(self) -> None:
        """One that comes late, and sometimes lies about whose sibling it is."""
        if self.several:
            other: list[dict[str, Any]] = [{"salt": "a"}, {"lane": "batch"}, {"use_cache": False}, {"digests": b""}]
            other.append({"tokens": [*self.several["tokens"], 1]})
            self.ask(**self.several | (self.rng.choice(other) if self.rng.random() < 0.1 else {}))

    def abort(self) -> None:
        if self.asked:
            seq = max(self.asked) - self.rng.randrange(8)
            owner = self.asked[seq][0] if seq in self.asked else "p"
            if self.bench.scheduler.abort(owner, seq):
                self.aborted.add(seq)

    def hang_up(self) -> None:
        self.bench.collect()
        owner = self.rng.choice("pq")
        self.bench.scheduler.abort_owner(owner)
        self.aborted |= {seq for seq, asked in self.asked.items() if asked[0] == owner} - set(self.finished())

    def poison(self) -> None:
        if self.asked:
            seq = self.rng.choice(sorted(self.asked)[-6:])
            self.bench.runner.poisoned.add((self.asked[seq][0], seq))
            self.bench.runner.all_bad = self.rng.random() < 0.7

    def break_row(self) -> None:
        if self.asked:
            seq = self.rng.choice(sorted(self.asked)[-6:])
            self.bench.runner.broken.add((self.asked[seq][0], seq))

    def fail(self) -> None:
        self.bench.runner.fails = True
        self.bench.step()
        self.bench.runner.fails = False

    def give_up(self) -> None:
        self.bench.gives_up = True
        self.bench.step()
        self.bench.gives_up = False

    def wait(self) -> None:
        self.bench.now += self.rng.choice([0.05, 0.5, 5.0])

    def give_way(self) -> None:
        self.bench.scheduler.leases.give_way(self.bench.now)

    def finished(self) -> dict[int, str]:
        return {seq: u.finish for (_, seq), updates in self.bench.updates.items() for u in updates if u.finish}

    def check(self) -> None:
        """Every state is counted once, and the events add up to what can be found."""
        pool, scheduler = self.bench.pool, self.bench.scheduler
        assert pool.check_invariants() == []
        assert pool.num_free + pool.num_cached + pool.num_live == pool.num_blocks
        assert (pool.num_live > 0) == (scheduler.num_running > 0) == (len(scheduler.tables) > 0)
        self.check_leases()
        events = pool.prefixes.take_events()
        removed, stored = set(split_digests(events.removed)), set(split_digests(events.stored))
        assert removed <= self.told
        assert not stored & self.told
        assert not removed & stored
        self.told = (self.told - removed) | stored
        assert self.told == set(split_digests(pool.prefixes.snapshot().stored))

    def check_leases(self) -> None:
        """A lease that was kept and still is keeps the same keys and values: those of the tokens it was granted for."""
        pool, leases, slots = self.bench.pool, self.bench.scheduler.leases, self.bench.runner.slots
        assert leases.check_invariants() == []
        now = {lease: slots[lease.block, SIZE - 1] for lease in leases if lease.block is not None}
        for lease, written in now.items():
            assert self.promised.get(lease, written) == written, "a leased block was written over"
            block, depth = lease.block, 0
            while block is not None:
                assert pool.is_registered(block)
                block, depth = pool.prefixes.parent_of(block), depth + 1
            assert depth == lease.depth
        self.promised = dict(now)

    def check_promises(self) -> None:
        """Who asks for what is leased reads it: at once, among whatever the others left."""
        room = min(self.bench.pool.num_blocks * SIZE, self.context)
        for lease in list(self.bench.scheduler.leases):
            tokens = self.marked[lease.fingerprint]
            honest = split_digests(digests_of(tokens, lease.salt))[-1:] in ([lease.digest], [])
            if lease.state != "kept" or not honest or len(tokens) + 2 > room:
                continue
            self.last += 1
            self.bench.submit(self.last, [*tokens, 0], salt=lease.salt, max_tokens=1)
            self.bench.finish()
            if lease.state == "kept":
                assert (self.bench.of(self.last)[0].lease_read_tokens or 0) >= lease.tokens
                self.promises += 1

    def check_answers(self) -> None:
        finished = self.finished()
        assert set(self.asked) - self.aborted <= set(finished)
        for seq, (owner, tokens, salt, max_tokens) in self.asked.items():
            updates = self.bench.of(seq, owner)
            answer = [token for update in updates for token in update.tokens]
            alone = choose_answer(salt, tokens, VOCAB, max_tokens, frozenset({EOS}))
            assert answer == alone[: len(answer)]
            if finished.get(seq) in ("stop", "length"):
                assert answer == alone
                assert finished[seq] == ("length" if len(alone) == max_tokens else "stop")
            assert sum(update.finish is not None for update in updates) == (seq in finished)
            assert [update.cached_tokens is not None for update in updates[1:]] == [False] * len(updates[1:])


def run_many(seeds: range) -> Counter[str]:
    return sum((Fuzz(seed).run() for seed in seeds), Counter[str]())


def test_no_schedule_reads_a_strange_block() -> None:
    seen = run_many(range(100))
    assert min(seen.values()) > 20, f"the fuzzer does not reach everything: {seen}"


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_no_schedule_reads_a_strange_block_when_digests_collide(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = HASHES["xxh3_128"]

    def weak(data: bytes) -> bytes:
        return (int.from_bytes(exact(data), "big") % (1 << bits)).to_bytes(DIGEST_BYTES, "big")

    monkeypatch.setitem(HASHES, "xxh3_128", weak)
    seen = run_many(range(100, 135))
    assert min(seen.values()) > 10, f"the fuzzer does not reach everything: {seen}"


@pytest.mark.slow
def test_no_schedule_of_many_reads_a_strange_block() -> None:
    run_many(range(1000, 2000))

"""Random lives of an engine over tiny tiers: admit, fork, step, preempt, abort, lease, expire, demote, restore, die.

Whatever happens in whatever order, while copies are under way and files are damaged: nobody reads what is not exactly
its own prefix, every answer is the one that the sequence gets alone, what is leased is there to the token until its
time is up, budgets hold in every tier, the index is told the truth, every sequence ends, and nothing leaks.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.leases.pins import Lease, take_fingerprint
from engine.planner import MIN_TAIL_TOKENS
from engine.pool.eviction import LeastRecentlyUsed
from engine.pool.hit_density import HitDensity
from engine.protocol import DIGEST_BYTES, HASHES, Lane, SequenceUpdate, split_digests
from engine.sequence import Sequence
from engine.tiers.disk_store import TEMPORARY_AGE_S
from engine.tiers.tier import PAUSE_S
from tests.fakes.life_bench import Folder, Killed, LifeBench, Whim, start
from tests.fakes.oracle_runner import Prefixes, choose_answer
from tests.fakes.scheduler_bench import SIZE, VOCAB, pack

EOS = 3
DAY_S = 86400.0
COMMANDS = 300
REACHED = (
    *("steps", "given up", "forks", "forks of answers", "preemptions", "not_finite", "cached_tokens", "shared_tokens"),
    *("siblings", "siblings that fork", "copied blocks"),
    *("drafts", "drafts that are right", "drafts that are wrong"),
    *("whole answers", "restarts", "adopted", "must survive", "interrupted copies", "killed copies"),
    "overdue copies",
    *("leases granted", "leases renewed", "leases degraded", "leases kept_again", "leases expired", "leases dropped"),
    *("leases lost", "leases demoted", "leases read", "leases read again", "leases brought back", "leases promised"),
    "leases restored",
    *("device evicted", "disk evicted", "disk saved", "disk restored"),
    *(
        "disk failed",
        "disk dropped",
        "disk torn",
        "disk collected",
        *(f"evicts by {name}" for name in ("LeastRecentlyUsed", "HitDensity", "Whim")),
    ),
    *("files: missing", "files: torn", "files: longer", "files: flipped", "files: strange", "files: litter"),
)
"""What happens in every run of many seeds, or the fuzzer proves less than it says."""

DEEPEST = 3  # interruptions of a copy within each other


@dataclass
class Asked:
    owner: str
    tokens: list[int]
    salt: str
    max_tokens: int
    tenant: str
    points: tuple[tuple[int, float], ...]
    use_cache: bool
    lane: Lane
    group: tuple[int, int] | None
    at: float = 0.0


class Fuzz:
    """Some lives, one after the other, reproducible by their seed."""

    def __init__(self, seed: int, path: Path) -> None:
        self.rng = rng = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.folder, self.prefixes = Folder(path), Prefixes()
        self.shares = rng.choice([(1.0, 1.0), (0.5, 0.5), (1.0, 0.5), (0.5, 0.25)])
        self.depth = 0
        self.quiet = self.computing = False
        self.last = 0
        self.leased: dict[bytes, list[int]] = {}  # fingerprint -> tokens that some request wanted to be kept
        self.bench = self.begin()

    def begin(self) -> LifeBench:
        """Another engine over the same files."""
        rng = self.rng
        self.asked: dict[int, Asked] = {}
        self.aborted: set[int] = set()
        self.until: dict[Lease, float] = {}  # when a lease may end at the soonest
        self.kept: set[Lease] = set()
        self.excuses = 0
        share, tenant_share = self.shares
        policy = rng.choice(
            [LeastRecentlyUsed, lambda blocks: HitDensity(blocks, SIZE), lambda blocks: Whim(blocks, rng)]
        )
        bench = start(
            self.folder,
            self.prefixes,
            self.meanwhile,
            weights=rng.choice(["w", "w", "w", "v"]),
            layout=rng.choice(["8", "8", "8", "9"]),
            blocks=rng.choice([8, 9, 10, 12, 16, 70]),
            disk=rng.choice([4, 20, 60]),
            max_age_s=rng.choice([DAY_S, 1e9]),
            queue_bytes=rng.choice([300, 2000, 1 << 20]),
            part_blocks=rng.choice([1, 3, 64]),
            policy=policy,
            step_tokens=rng.choice([16, 20, 33]),
            step_ms=rng.choice([5.0, 1e9]),
            batch_step_tokens=rng.choice([16, 256]),
            max_sequences=rng.randint(1, 6),
            max_waiting=6,
            context_tokens=rng.choice([24, 32]),
            lease_share=share,
            lease_tenant_share=tenant_share,
            max_leases=rng.choice([3, 50]),
            eos_ids=(EOS,),
        )
        bench.aside = self.beside_a_step
        if rng.random() < 0.7:
            bench.scheduler._planner._guess = self.guess  # type: ignore[method-assign]
        self.seen[f"evicts by {type(bench.pool.policy).__name__}"] += 1
        return bench

    def run(self, commands: int = COMMANDS) -> Counter[str]:
        try:
            while self.seen["commands"] < commands:
                self.do()
            self.end()
        except Exception as error:
            error.add_note(f"after {self.seen['commands']} commands; the last one: {self.rule}")
            raise
        finally:
            self.bench.kill(self.folder)
        return self.seen

    def do(self) -> None:
        rules: list[tuple[Callable[[], object], float]] = [
            (self.work, 25),
            (self.damage, 3),
            (self.fail_store, 0.5),
        ]
        if not self.computing:
            rules += [
                (self.submit, 14),
                (self.fork, 6),
                (self.add_siblings, 5),
                (self.step, 40),
                (self.deliver, 25),
                (self.abort, 2),
                (self.hang_up, 0.5),
                (self.poison, 0.5),
                (self.fail_step, 0.5),
                (self.give_up_step, 3),
                (self.recover, 2),
                (self.wait, 2),
                (self.give_way, 0.3),
                (self.restart, 1.5 if self.depth else 0.5),
            ]
        if not self.depth:
            rules += [(self.read_leases, 0.5), (self.restart_cleanly, 0.3)]
        (rule,) = self.rng.choices([rule for rule, _ in rules], [weight for _, weight in rules])
        self.rule = rule.__name__
        self.seen["commands"] += 1
        rule()
        if not self.computing:
            self.check()

    def meanwhile(self, bench: LifeBench) -> None:
        """A copy can be interrupted here."""
        if bench is not self.bench:
            raise Killed
        if self.quiet or self.depth >= DEEPEST or self.rng.random() < 0.7:
            return
        self.depth += 1
        self.seen["interrupted copies"] += 1
        self.do()
        self.depth -= 1
        if bench is not self.bench:
            self.seen["killed copies"] += 1
            raise Killed

    def beside_a_step(self) -> None:
        if not self.quiet and self.depth < DEEPEST and self.rng.random() < 0.3:
            self.computing, self.depth = True, self.depth + 1
            self.do()
            self.computing, self.depth = False, self.depth - 1

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self) -> None:
        """Prompts are made of two kinds of block, so that equal blocks stand behind different prefixes."""
        rng = self.rng
        kinds = [int(rng.random() < 0.3) for _ in range(rng.randint(0, 5))]
        tokens = [kind for kind in kinds for _ in range(SIZE)]
        self.ask(tokens + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 5))], rng.choice(["", "a"]))

    def fork(self) -> None:
        """Continues what another one was asked and has answered so far, or a part of it."""
        rng = self.rng
        if not self.asked:
            return
        seq = rng.choice(sorted(self.asked)[-8:])
        other = self.asked[seq]
        answer = self.bench.answer(seq, other.owner)
        answer = answer[: rng.randint(0, len(answer))]
        tokens = other.tokens + answer + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 4))]
        taken = self.ask(tokens, other.salt)
        self.seen["forks"] += taken
        self.seen["forks of answers"] += taken and len(answer) >= SIZE

    def add_siblings(self) -> None:
        """More answers to what one of the last was asked, while it is about or not."""
        rng = self.rng
        grouped = [seq for seq in sorted(self.asked)[-6:] if self.asked[seq].group]
        if not grouped:
            return
        like = self.asked[rng.choice(grouped)]
        for _ in range(rng.randint(1, 4)):
            self.seen["siblings"] += self.send(replace(like, max_tokens=rng.randint(1, 8)), forged=False)

    def ask(self, tokens: list[int], salt: str, *, plain: bool = False, points: int | None = None) -> bool:
        rng = self.rng
        points = rng.choice([0, 0, 0, 1, 2]) if points is None else points
        asked = Asked(
            owner=rng.choice("pq"),
            tokens=tokens,
            salt=salt,
            max_tokens=1 if plain else rng.randint(1, 8),
            tenant=rng.choice("tu"),
            points=tuple(
                (rng.randint(1, len(tokens)), rng.choice([0.1, 1.0, 50.0, 50.0]))
                for _ in range(points if tokens else 0)
            ),
            use_cache=plain or rng.random() < 0.95,
            lane=rng.choice(["online", "online", "batch"]),
            group=(self.last, rng.randint(2, 6)) if not plain and rng.random() < 0.6 else None,
        )
        return self.send(asked, forged=not plain and rng.random() < 0.07)

    def send(self, asked: Asked, *, forged: bool) -> bool:
        rng, bench, tokens, salt = self.rng, self.bench, asked.tokens, asked.salt
        digests = bench.digests([rng.randrange(2)] * len(tokens) if forged else tokens, "a" if forged else salt)
        self.last += 1
        before = [lease for lease in bench.scheduler.leases if lease.salt == salt]
        taken = bench.submit(
            self.last,
            tokens,
            owner=asked.owner,
            salt=salt,
            lane=asked.lane,
            group=asked.group,
            max_tokens=asked.max_tokens,
            digests=digests,
            tenant=asked.tenant,
            breakpoints=asked.points,
            use_cache=asked.use_cache,
        )
        if taken is None:
            return False
        self.asked[self.last], asked.at = asked, bench.now
        for length, _ in asked.points:
            self.leased[take_fingerprint(pack(tokens[:length]))] = tokens[:length]
        for lease in before if asked.use_cache and not forged else []:
            wanted = self.leased[lease.fingerprint]
            if tokens[: len(wanted)] == wanted and self.is_honest(lease) and self.until[lease] > bench.now:
                self.until[lease] = max(self.until[lease], bench.now + lease.ttl_s)
        return True

    def abort(self) -> None:
        if self.asked:
            seq = max(self.asked) - self.rng.randrange(8)
            if seq in self.asked and self.bench.scheduler.abort(self.asked[seq].owner, seq):
                self.aborted.add(seq)

    def hang_up(self) -> None:
        self.bench.collect()
        owner = self.rng.choice("pq")
        self.bench.scheduler.abort_owner(owner)
        self.aborted |= {seq for seq, asked in self.asked.items() if asked.owner == owner} - self.finished().keys()

    def guess(self, sequence: Sequence) -> tuple[list[int], list[float]]:
        """What comes next, until a guess is wrong."""
        left = sequence.sampling.max_tokens - sequence.num_generated - 1
        salt, count = self.bench.runner.model + sequence.salt, self.rng.randint(0, max(0, left))
        found = choose_answer(salt, sequence.tokens, VOCAB, count, sequence.end_ids)
        found = [token if self.rng.random() < 0.8 else (token + 1) % VOCAB or 1 for token in found]
        found = [token if token not in sequence.end_ids else 1 for token in found]
        return found, [1.0] * len(found)

    # -- the engine ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        bench = self.bench
        told = {key: len(updates) for key, updates in bench.updates.items()}
        excuses = self.count_excuses()
        late = bench.below.late
        self.seen["steps"] += bench.step()
        self.seen["overdue copies"] += max(0, bench.below.late - late)
        excuses = self.count_excuses() - excuses
        for (owner, seq), updates in bench.updates.items():
            for update in updates[told.get((owner, seq), 0) :]:
                if update.cached_tokens is not None and seq in self.asked:
                    self.check_start(self.asked[seq], update, excuses)

    def fail_step(self) -> None:
        self.bench.runner.fails = True
        self.bench.step()
        self.bench.runner.fails = False

    def give_up_step(self) -> None:
        before = self.bench.scheduler.counters.steps_given_up
        self.bench.gives_up = True
        self.step()
        self.bench.gives_up = False
        self.seen["given up"] += self.bench.scheduler.counters.steps_given_up - before

    def poison(self) -> None:
        if self.asked:
            seq = self.rng.choice(sorted(self.asked)[-6:])
            self.bench.runner.poisoned.add((self.asked[seq].owner, seq))
            self.bench.runner.all_bad = self.rng.random() < 0.7

    def wait(self) -> None:
        """As an idle engine does."""
        self.bench.now += self.rng.choice([0.05, 0.5, 5.0, 40.0])
        self.bench.scheduler.leases.expire(self.bench.now)

    def give_way(self) -> None:
        self.bench.scheduler.leases.give_way(self.bench.now)

    # -- copies -------------------------------------------------------------------------------------------------------

    def work(self) -> None:
        self.rng.choice(sorted(self.bench.workers.items()))[1].work()

    def deliver(self) -> None:
        before = {lease: lease.tier for lease in self.bench.scheduler.leases if lease.block is not None}
        self.rng.choice(sorted(self.bench.workers.items()))[1].deliver()
        self.seen["leases demoted"] += sum(lease.tier > tier for lease, tier in before.items())

    def fail_store(self) -> None:
        self.bench.disk.fails = True

    def recover(self) -> None:
        self.bench.disk.fails = False
        self.bench.now += self.rng.choice([0.1, PAUSE_S])

    def damage(self) -> None:
        """Something happens to a file; or there is one that should not be there."""
        rng, files = self.rng, self.folder.files()
        if not files:
            return
        path = rng.choice(files)
        content = path.read_bytes() or bytes(1)
        kind = rng.choice(["missing", "torn", "longer", "flipped", "strange", "litter"])
        self.seen[f"files: {kind}"] += 1
        place = rng.randrange(len(content))
        if kind == "litter":
            litter = path.with_name(f"{path.stem}.1.{self.last}.tmp")
            litter.write_bytes(content[:place])
            then = time.time() - TEMPORARY_AGE_S - 1
            os.utime(litter, (then, then))
            return
        self.folder.sound.pop(str(path), None)
        if kind == "missing":
            path.unlink()
        elif kind == "torn":
            path.write_bytes(content[:place])
        elif kind == "longer":
            path.write_bytes(content + bytes(1))
        elif kind == "flipped":
            path.write_bytes(content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :])
        else:
            path.write_bytes(rng.choice(files).read_bytes() if path != files[0] else content[::-1])

    # -- restarts -----------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """As if the process were killed: what was copied is there, nothing else."""
        self.close()
        self.seen["restarts"] += 1
        self.bench.kill(self.folder)
        survivors = self.age_files()
        self.bench = self.begin()
        if self.rng.random() < 0.5:
            return
        self.settle()
        disk = self.bench.tiers.tiers[-1].pool
        self.seen["adopted"] += len(disk.prefixes)
        self.seen["leases restored"] += self.bench.scheduler.leases.counters.restored
        mine = [key for path, (model, key) in self.folder.sound.items() if model == self.bench.runner.model]
        own = Path(self.bench.disk.store._own)
        if len([path for path in survivors if own in path.parents]) <= disk.num_blocks:
            whole: set[bytes] = set()
            for key in sorted(mine, key=lambda key: key.index):
                if key.parent is None or key.parent in whole:
                    whole.add(key.digest)
            self.seen["must survive"] += len(whole)
            assert not self.exact or whole <= disk.prefixes._by_digest.keys(), "a sound file was not found again"
        assert not list(self.folder.path.rglob("*.tmp")) or own not in next(self.folder.path.rglob("*.tmp")).parents

    def restart_cleanly(self) -> None:
        self.finish()
        self.restart()

    def age_files(self) -> list[Path]:
        """Files were used at any time, and none at the same."""
        files = self.folder.files()
        for number, path in enumerate(files):
            then = time.time() - number / 1000 - self.rng.choice([self.rng.uniform(0, 1000), 3 * DAY_S])
            os.utime(path, (then, then))
        return files

    def settle(self) -> None:
        """All copies are made at once, and no device fails."""
        self.quiet = True
        self.bench.settle()
        self.quiet = False

    def finish(self) -> None:
        self.recover()
        self.quiet = True
        self.bench.finish()
        self.quiet = False
        self.check()

    def read_leases(self) -> None:
        """When nothing else goes on, what is said to be kept can be read."""
        self.finish()
        bench = self.bench
        for lease in sorted(self.kept, key=lambda lease: lease.number):
            wanted = self.leased[lease.fingerprint]
            tokens = wanted + [self.rng.randrange(VOCAB) for _ in range(MIN_TAIL_TOKENS + 1)]
            fits = len(tokens) < min(bench.scheduler._context_tokens, bench.pool.num_blocks * SIZE)
            if lease.state != "kept" or lease.expires_s < bench.now + 2 or not fits:
                continue
            if not self.is_honest(lease) or not self.is_sound(lease):
                continue
            if self.rng.random() < 0.5:  # others wanted every block that they could get
                bench.pool.release(bench.pool.allocate(bench.pool.available) or [])
            device, digests = bench.pool, split_digests(bench.digests(tokens, lease.salt))
            there = len(device.prefixes.find(lease.salt, pack(tokens), digests))
            unknown = {digest for digest in digests[there:] if device.prefixes.find_block(digest) is None}
            clear = len(unknown) == len(digests) - there  # else a digest stands for something else
            assert self.ask(tokens, lease.salt, plain=True, points=0)
            owner, seq = self.asked[self.last].owner, self.last
            self.finish()
            first = bench.of(seq, owner)[0]
            assert (first.lease_read_tokens or 0) >= lease.tokens, "a kept lease cannot be read"
            if clear and first.cached_tokens is not None:
                self.seen["leases read again"] += 1
                self.seen["leases brought back"] += there < lease.depth
                assert first.cached_tokens >= lease.depth * SIZE, "a kept lease had to be computed"

    def is_honest(self, lease: Lease) -> bool:
        """Whether a lease was granted under the digests of its own tokens."""
        digests = self.bench.digests(self.leased[lease.fingerprint], lease.salt)
        return not lease.depth or lease.digest == digests[-DIGEST_BYTES:]

    def is_sound(self, lease: Lease) -> bool:
        """Whether no file that a lease needs was damaged."""
        bench, store = self.bench, self.bench.disk
        if lease.tier < len(bench.tiers.tiers) - 1:
            return True
        digests = split_digests(bench.digests(self.leased[lease.fingerprint], lease.salt))
        return all(store.store._path(digest) in self.folder.sound for digest in digests)

    # -- what must hold -----------------------------------------------------------------------------------------------

    exact = True  # hashes do not collide

    def check(self) -> None:
        bench = self.bench
        bench.listen()
        bench.check_counts()
        self.check_leases()
        if self.seen["commands"] % 8 == 0:
            bench.check_contents()

    def check_leases(self) -> None:
        """Leases stand for what was asked, within their budgets, and no longer or shorter than that."""
        bench, leases = self.bench, self.bench.scheduler.leases
        share, tenant_share = self.shares
        blocks: dict[tuple[int, str], set[int]] = {}
        kept: set[Lease] = set()
        for lease in leases:
            wanted = self.leased[lease.fingerprint]
            assert (lease.tokens, lease.depth) == (len(wanted), len(wanted) // SIZE)
            assert lease.expires_s >= self.until.setdefault(lease, lease.expires_s), "a lease ends too early"
            if lease.state != "kept":
                continue
            kept.add(lease)
            pool, block, path = bench.tiers.pools[lease.tier], lease.block, list[int]()
            while block is not None:
                assert pool.is_registered(block)
                path.append(block)
                above = pool.prefixes.parent_of(block)
                assert above is not None or pool.prefixes._salt[block] == lease.salt
                block = above
            content = b"".join(pool.prefixes._tokens[block] for block in reversed(path))
            assert content == pack(wanted[: lease.depth * SIZE]), "a lease keeps the blocks of other tokens"
            for tenant in (lease.tenant, ""):
                blocks.setdefault((lease.tier, tenant), set()).update(path)
        for (tier, tenant), held in blocks.items():
            most = int((tenant_share if tenant else share) * bench.tiers.pools[tier].num_blocks)
            assert len(held) <= most, f"leases keep {len(held)} blocks of tier {tier}, and may keep {most}"
        excuses = self.count_excuses()
        gone = sum(self.until[lease] > bench.now for lease in self.kept - kept)
        assert gone <= excuses - self.excuses, "a lease went without a word before its time was up"
        self.kept, self.excuses = kept, excuses

    def count_excuses(self) -> int:
        """How often the engine said that a lease is not kept any more."""
        counters = self.bench.scheduler.leases.counters
        return counters.degraded + counters.dropped + counters.lost

    def check_start(self, asked: Asked, update: SequenceUpdate, excuses: int) -> None:
        """What a client is told at the start of an answer, in a step that counted so many excuses."""
        assert update.cached_tokens is not None
        assert update.cached_tokens % SIZE == 0
        assert update.cached_tokens <= max(0, len(asked.tokens) - MIN_TAIL_TOKENS)
        read = update.lease_read_tokens
        if read:
            self.seen["leases read"] += 1
            assert self.leased[take_fingerprint(pack(asked.tokens[:read]))] == asked.tokens[:read]
        if not asked.use_cache or update.finish == "error":
            return
        kept = {
            (lease.tenant, lease.salt, lease.fingerprint)
            for lease in self.bench.scheduler.leases
            if lease.state == "kept"
        }
        for length, ttl_s in asked.points:
            promised = (asked.tenant, asked.salt, take_fingerprint(pack(asked.tokens[:length])))
            if asked.at + ttl_s > self.bench.now + 0.01:
                self.seen["leases promised"] += not update.leases_degraded
                assert promised in kept or update.leases_degraded or excuses, "a lease was promised and is not kept"

    def check_answers(self) -> None:
        finished = self.finished()
        for seq, asked in self.asked.items():
            answer = self.bench.answer(seq, asked.owner)
            salt = self.bench.runner.model + asked.salt
            alone = choose_answer(salt, asked.tokens, VOCAB, asked.max_tokens, frozenset({EOS}))
            assert answer == alone[: len(answer)]
            if finished.get(seq) in ("stop", "length"):
                assert answer == alone
                self.seen["whole answers"] += 1

    def finished(self) -> dict[int, str]:
        return {seq: u.finish for (_, seq), updates in self.bench.updates.items() for u in updates if u.finish}

    def close(self) -> None:
        """The end of a life."""
        self.check_answers()
        self.bench.check_contents()
        scheduler = self.bench.scheduler
        counters, leases = scheduler.counters, scheduler.leases.counters
        self.seen.update(preemptions=counters.preemptions, cached_tokens=counters.cached_tokens)
        self.seen.update(not_finite=counters.not_finite, shared_tokens=counters.shared_tokens)
        self.seen["siblings that fork"] += counters.forks
        self.seen["copied blocks"] += counters.copied_blocks
        self.seen["drafts"] += counters.drafted_tokens
        self.seen["drafts that are right"] += counters.accepted_tokens
        self.seen["drafts that are wrong"] += counters.drafted_tokens - counters.accepted_tokens
        names = ("granted", "renewed", "degraded", "kept_again", "expired", "dropped", "lost")
        self.seen.update({f"leases {name}": getattr(leases, name) for name in names})
        for tier in self.bench.tiers.tiers:
            self.seen[f"{tier.name} evicted"] += tier.pool.evictions
            if tier.number:
                for name in ("saved", "restored", "dropped", "failed", "torn", "collected"):
                    if tier.name == "disk" or name in ("saved", "restored", "failed"):
                        self.seen[f"{tier.name} {name}"] += getattr(tier.counters, name)

    def end(self) -> None:
        self.finish()
        self.close()
        bench = self.bench
        assert self.asked.keys() - self.aborted <= self.finished().keys(), "a sequence got no answer"
        disk = bench.tiers.tiers[-1].pool
        own = Path(bench.disk.store._own)
        files = {bytes.fromhex(path.stem) for path in self.folder.files() if own in path.parents}
        assert files <= disk.prefixes._by_digest.keys(), "a file belongs to nobody"
        leases = bench.scheduler.leases
        leases.expire(bench.now + 1e4)
        assert len(leases) == 0
        for tier, pool in enumerate(bench.tiers.pools):
            assert leases.num_blocks(tier) == 0
            assert pool.allocate(pool.num_blocks) is not None, "a block leaked"


def run_many(seeds: range, path: Path, *, exact: bool = True, commands: int = COMMANDS) -> Counter[str]:
    seen: Counter[str] = Counter(dict.fromkeys(REACHED, 0))
    for seed in seeds:
        try:
            fuzz = Fuzz(seed, path / str(seed))
            fuzz.exact = exact
            seen.update(fuzz.run(commands))
        except BaseException as error:
            error.add_note(f"Fuzz seed {seed}")
            raise
    return seen


@pytest.fixture(autouse=True)
def small_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.tiers.upkeep.ADOPT_AT_ONCE", 3)
    monkeypatch.setattr("engine.tiers.upkeep.RELEASE_AT_ONCE", 3)
    monkeypatch.setattr("engine.tiers.saving.CHAINS_AT_ONCE", 2)
    # Each look at the clock finds it a little later: a copy takes no other time than what happens meanwhile.
    monkeypatch.setattr("engine.tiers.copying.time", SimpleNamespace(monotonic=itertools.count(0, 1 / 128).__next__))


def weaken(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    exact = HASHES["xxh3_128"]

    def weak(data: bytes) -> bytes:
        return (int.from_bytes(exact(data), "big") % (1 << bits)).to_bytes(DIGEST_BYTES, "big")

    monkeypatch.setitem(HASHES, "xxh3_128", weak)


def test_no_life_reads_a_strange_block_breaks_a_promise_or_leaks(tmp_path: Path) -> None:
    seen = run_many(range(120), tmp_path)
    assert seen["commands"] >= 36_000
    assert min(seen[name] for name in REACHED) > 5, f"the fuzzer does not reach everything: {seen}"


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_no_life_does_when_digests_collide(bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weaken(monkeypatch, bits)
    seen = run_many(range(1000, 1030), tmp_path, exact=False)
    assert seen["commands"] >= 9_000


@pytest.mark.slow
def test_no_life_of_many_does(tmp_path: Path) -> None:
    run_many(range(10_000, 10_800), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 4, 6, 8])
def test_no_life_of_many_does_when_digests_collide(bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weaken(monkeypatch, bits)
    run_many(range(20_000, 20_200), tmp_path, exact=False)

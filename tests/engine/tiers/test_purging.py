"""A purge: nothing of a tenant is found any more, in no tier and in no file, whatever is under way; all else stays."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.leases.file import WRITE_INTERVAL_S
from engine.tiers.tier import Amount, PurgeReport
from engine.tiers.upkeep import MOST_PURGES
from tests.fakes.disk_engine import Engine
from tests.fakes.life_bench import Killed, LifeBench
from tests.fakes.scheduler_bench import SIZE, expected, make

A, B = "tenant:1:a;", "tenant:1:b;"
MODEL = "w 8 "
A_KEY = f"{A}key:3:abc;"
A_LIKE = "tenant:2:a;;"
"""A tenant whose name begins like the other's."""


def begin(bench: LifeBench, prefix: str = A) -> list[PurgeReport | None]:
    """The report is in the list when it is over."""
    reports: list[PurgeReport | None] = []
    bench.scheduler.purge(prefix, reports.append)
    return reports


def purged(engine: Engine, prefix: str = A) -> PurgeReport:
    reports = begin(engine.bench, prefix)
    engine.bench.settle()
    assert len(reports) == 1
    assert reports[0] is not None
    return reports[0]


def files_of(path: Path, prefix: str = A) -> list[Path]:
    """Also of leases, and what was left half."""
    found = [file for file in path.rglob("*") if file.is_file() and file.name != "lock"]
    blocks = [file for file in found if file.suffix == ".kv"]
    others = [file for file in found if file.suffix != ".kv" and prefix.encode() in file.read_bytes()]
    return [file for file in blocks if prefix.encode() in file.read_bytes()] + others


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    yield made
    made.check()
    made.kill()


def test_afterwards_a_tenant_finds_nothing_in_any_tier_and_the_others_find_all(engine: Engine, tmp_path: Path) -> None:
    for salt in (A, A_KEY, B, A_LIKE):
        engine.ask(1, salt=salt)
    report = purged(engine)
    assert report.tiers == {
        "device": Amount(10, 10 * engine.bench.tiers.tiers[0].block_bytes),
        "disk": Amount(10, 10 * engine.bench.tiers.tiers[1].block_bytes),
    }
    assert (report.left, report.in_use, report.files) == (0, [], Amount())
    assert files_of(tmp_path) == []
    assert [engine.ask(1, salt=salt) for salt in (A, A_KEY)] == [0, 0]
    assert [engine.ask(1, salt=salt) for salt in (B, A_LIKE)] == [4 * SIZE] * 2
    assert engine.ask(1, salt=A) == 4 * SIZE, "what came afterwards is kept as usual"


def test_the_index_is_told(engine: Engine) -> None:
    engine.ask(1, salt=A)
    engine.ask(1, salt=B)
    engine.bench.listen()
    purged(engine)
    engine.bench.listen()
    assert len(engine.bench.told) == 5


def test_without_lower_tiers_it_is_over_at_once() -> None:
    bench = make()
    bench.submit(1, [1] * 20, salt=A)
    bench.submit(2, [1] * 20, salt=B)
    bench.finish()
    reports: list[PurgeReport | None] = []
    bench.scheduler.purge(A, reports.append)
    assert reports[0] is not None
    assert reports[0].tiers["device"].blocks == 20 // SIZE
    assert reports[0].owner is None
    for seq, salt in ((3, A), (4, B)):
        bench.submit(seq, [1] * 20, salt=salt)
    bench.finish()
    assert [bench.of(seq)[0].cached_tokens for seq in (3, 4)] == [0, 16]


@pytest.mark.parametrize("steps", range(6))
def test_what_runs_or_waits_answers_as_ever_and_leaves_nothing_behind(tmp_path: Path, steps: int) -> None:
    engine = Engine(tmp_path, max_sequences=2, step_tokens=16)
    bench = engine.bench
    asked = [engine.submit(kind, salt=A, max_tokens=9, ttl_s=500.0) for kind in (1, 2, 3)]
    for _ in range(steps):
        bench.step()
    reports = begin(bench)
    bench.finish()
    assert reports[0] is not None
    assert reports[0].sequences == 3
    assert [bench.answer(seq) for seq in (1, 2, 3)] == [expected(tokens, 9, MODEL + A) for tokens in asked]
    assert len(bench.scheduler.leases) == 0
    assert files_of(tmp_path) == []
    assert all(len(pool.prefixes) == 0 for pool in bench.tiers.pools)
    assert [engine.ask(kind, salt=A) for kind in (1, 2, 3)] == [0, 0, 0]
    engine.check()
    engine.kill()


def test_forks_of_what_ran_leave_nothing_behind_either(tmp_path: Path) -> None:
    engine = Engine(tmp_path, max_sequences=4)
    tokens, _ = [engine.submit(1, salt=A, max_tokens=12, group=(7, 3)) for _ in range(2)]
    engine.bench.step()
    begin(engine.bench)
    engine.submit(1, salt=A, max_tokens=12, group=(7, 3))
    engine.bench.finish()
    assert [engine.bench.answer(seq) for seq in (1, 2, 3)] == [expected(tokens, 12, MODEL + A)] * 3
    engine.check()
    engine.kill()


def test_a_preempted_sequence_leaves_nothing_behind(tmp_path: Path) -> None:
    engine = Engine(tmp_path, blocks=12, disk=400)
    asked = [engine.submit(kind, 4 * SIZE, salt=A, max_tokens=10) for kind in (1, 2)]
    engine.bench.step()
    begin(engine.bench)
    engine.bench.finish()
    assert engine.bench.scheduler.counters.preemptions > 0
    assert [engine.bench.answer(seq) for seq in (1, 2)] == [expected(tokens, 10, MODEL + A) for tokens in asked]
    assert all(len(pool.prefixes) == 0 for pool in engine.bench.tiers.pools)
    engine.kill()


def test_leases_end_in_memory_and_on_disk(engine: Engine, tmp_path: Path) -> None:
    engine.ask(1, salt=A, ttl_s=500.0)
    engine.ask(2, SIZE - 1, salt=A, ttl_s=500.0)
    engine.ask(1, salt=B, ttl_s=500.0)
    engine.wait(2 * WRITE_INTERVAL_S)
    assert [file.suffix for file in files_of(tmp_path)].count(".leases") == 1
    report = purged(engine)
    assert report.leases == 2
    assert files_of(tmp_path) == []
    assert [lease.salt for lease in engine.bench.scheduler.leases] == [B]
    assert any(B.encode() in path.read_bytes() for path in tmp_path.rglob("*.leases"))


def test_files_of_other_models_and_of_engines_that_are_gone_go_and_those_of_living_ones_are_named(
    tmp_path: Path,
) -> None:
    gone, kin, lives = Engine(tmp_path, weights="gone"), Engine(tmp_path), Engine(tmp_path, weights="lives")
    own = Engine(tmp_path)
    for other in (gone, kin, lives):
        other.ask(1, salt=A_KEY, ttl_s=500.0)
        other.ask(1, salt=B, ttl_s=500.0)
        other.wait(2 * WRITE_INTERVAL_S)
    half = gone.bench.disk.store._own / "00"
    gone.kill()
    kin.kill()
    half.mkdir(exist_ok=True)
    (half / f"{'0' * 32}.1.1.tmp").write_bytes(b"half a block")
    (half / f"{'0' * 32}.kv").write_bytes(b"nobody can tell whose this is")
    report = purged(own)
    assert report.left == 0
    assert report.files.blocks == 2 * (10 + 1) + 2, "all that engines left that are gone"
    assert report.in_use == [lives.bench.tiers.owner], "only that engine can purge it"
    assert files_of(tmp_path) == files_of(lives.bench.disk.store._own)
    assert purged(lives).in_use == [own.bench.tiers.owner]
    assert files_of(tmp_path) == []
    for engine in (own, lives):
        engine.check()
        engine.kill()


def test_there_is_no_purge_before_the_start_is_over(tmp_path: Path) -> None:
    engine = Engine(tmp_path, settled=False)
    assert begin(engine.bench) == [None]
    engine.bench.settle()
    assert purged(engine).left == 0
    engine.kill()


def test_stray_files_that_no_start_took_over_go(engine: Engine, tmp_path: Path) -> None:
    engine.ask(1, salt=A)
    block = files_of(tmp_path)[0]
    content = block.read_bytes()
    purged(engine)
    block.write_bytes(content)
    assert purged(engine).files.blocks == 1
    assert files_of(tmp_path) == []


def test_a_file_that_cannot_be_deleted_is_counted(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.ask(1, salt=A)
    with monkeypatch.context() as patched:

        def refuse(path: str) -> None:
            raise PermissionError(path)

        patched.setattr("os.unlink", refuse)
        report = purged(engine)
        assert report.left == 5 + 1, "its blocks, and perhaps leases"
    assert len(files_of(tmp_path)) == 5
    assert purged(engine).left == 0
    assert files_of(tmp_path) == []


def test_only_so_many_wait(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    waiting = [begin(engine.bench) for _ in range(MOST_PURGES)]
    assert begin(engine.bench) == [None]
    engine.bench.settle()
    assert all(len(reports) == 1 and reports[0] is not None for reports in waiting)
    assert len(begin(engine.bench)) == 0
    engine.bench.settle()
    engine.kill()


Key = tuple[str, list[int]]


class Fuzz:
    """Requests of two tenants, copies that are interrupted at every block, purges, kills and starts."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.rng = path, random.Random(seed)
        self.before: list[Key] = []  # what tenant a was asked before purges that are not over
        self.allowed: list[Key] = []  # and since
        self.pending = 0
        self.depth = self.count = self.done = self.hits = 0
        self.engine = self.begin()

    def begin(self) -> Engine:
        self.asked: dict[int, Key] = {}  # those of tenant a that have not begun to answer
        self.ran: set[int] = set()  # those that a purge found running,
        self.waited: set[int] = set()  # or waiting
        return Engine(
            self.path,
            weights=self.rng.choice("wwv"),
            blocks=self.rng.choice([20, 60]),
            disk=self.rng.choice([20, 60]),
            meanwhile=self.meanwhile,
            settled=False,
            step_tokens=32,
            max_sequences=4,
        )

    def meanwhile(self, bench: LifeBench) -> None:
        if bench is not self.engine.bench:
            raise Killed
        if self.depth < 2 and self.rng.random() < 0.4:
            self.depth += 1
            self.do()
            self.depth -= 1
            if bench is not self.engine.bench:
                raise Killed

    def do(self) -> None:
        rules: dict[Callable[[], None], float] = {self.submit: 8, self.step: 12, self.work: 30, self.deliver: 28}
        rules |= {self.purge: 2, self.wait: 1, self.kill: 0.3}
        self.count += 1
        self.rng.choices([*rules], [*rules.values()])[0]()
        self.check()

    def submit(self) -> None:
        """Prompts that begin alike."""
        engine, rng = self.engine, self.rng
        salt = rng.choice([A, A, A_KEY, B])
        kind, length = rng.randint(0, 2), rng.randint(1, 30)
        max_tokens = rng.randint(1, 6)
        ttl_s = rng.choice([None, None, 200.0])
        tokens = engine.submit(kind, length, salt, ttl_s, max_tokens=max_tokens, tenant=salt[9])
        if salt != B:
            scope = engine.bench.runner.model + salt
            self.asked[engine.seq] = scope, tokens
            self.allowed.append((scope, tokens + expected(tokens, max_tokens, scope)))

    def step(self) -> None:
        self.engine.bench.step()

    def work(self) -> None:
        self.rng.choice(sorted(self.engine.bench.workers.items()))[1].work()

    def deliver(self) -> None:
        self.rng.choice(sorted(self.engine.bench.workers.items()))[1].deliver()

    def wait(self) -> None:
        self.engine.bench.now += self.rng.choice([1.0, 40.0])

    def purge(self) -> None:
        bench, reports = self.engine.bench, list[PurgeReport | None]()
        if not bench.tiers.can_purge:
            return
        self.pending += 1
        self.before, self.allowed = self.before + self.allowed, []
        for sequence in bench.scheduler._sequences.all():
            if sequence.salt != B and sequence.seq not in self.waited:
                (self.waited if sequence.cached_tokens is None else self.ran).add(sequence.seq)

        def done(report: PurgeReport | None) -> None:
            reports.append(report)
            if bench is not self.engine.bench:
                return
            assert report is not None
            assert report.left == 0
            self.pending -= 1
            self.done += 1
            if not self.pending:
                self.before = []
                if not self.allowed:
                    assert files_of(self.path) == []

        bench.scheduler.purge(A, done)

    def kill(self) -> None:
        self.engine.kill()
        if self.pending:  # it was never said to be over
            self.pending, self.allowed, self.before = 0, self.before + self.allowed, []
        self.engine = self.begin()

    def check(self) -> None:
        bench = self.engine.bench
        bench.check_counts()
        for seq, key in list(self.asked.items()):
            updates = bench.of(seq)
            if updates and updates[0].cached_tokens is not None:
                del self.asked[seq]
                most = 0 if seq in self.waited else max((_common(key, other) for other in self.allowed), default=0)
                assert updates[0].cached_tokens <= most or seq in self.ran, f"sequence {seq} found too much"
                self.hits += updates[0].cached_tokens > 0

    def end(self) -> None:
        self.depth = 9
        self.engine.bench.finish()
        self.check()
        self.engine.bench.check_contents()
        self.allowed = []
        self.purge()
        self.engine.bench.settle()
        assert files_of(self.path) == []
        self.engine.kill()


def _common(one: Key, other: Key) -> int:
    """Leading tokens that both have, under one salt and of one model."""
    if one[0] != other[0]:
        return 0
    pairs = zip(one[1], other[1], strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(one[1]), len(other[1])))


@pytest.mark.parametrize("seed", range(12))
def test_nothing_of_a_purged_tenant_comes_back_whatever_is_under_way(tmp_path: Path, seed: int) -> None:
    fuzz = Fuzz(tmp_path, seed)
    while fuzz.count < 1500:
        fuzz.do()
    fuzz.end()
    assert fuzz.done > 1
    assert fuzz.hits > 1

"""What tiers cost the steps, and what a prefix on disk is worth: the demo model over real files.

    OMP_NUM_THREADS=1 python -m tests.bench.tiers [--tokens 1000,4000,12000] [--rounds 5] [--folder DIR]

First token, milliseconds inside the engine, medians:

    cold      nothing of the prompt is known
    hot       its blocks are where the model runs
    disk      a new engine found them on disk at its start, in the system's page cache
    platter   the same, after the page cache was told to let go of the files

Steps: the time from one step's start to the next one's, while eight sequences decode. Windows alternate: in one nothing
is copied, in the next prefixes of 500 blocks are saved one after the other, as fast as it goes, in the third one of
them is restored from the page cache every 20 steps. The loop's CPU is what its thread itself used for a step.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from engine.compute.model import LoadedModel, load_model
from engine.compute.runner import ModelRunner
from engine.config import EngineSettings
from engine.loop import EngineLoop
from engine.pool.blocks import BlockPool
from engine.protocol import Sampling, StepFrame, Submit, chain_digests, split_digests
from engine.scheduler import Scheduler
from engine.sequence import Step
from engine.tiers.storage import build_tiers
from engine.tiers.tiers import Chain

LIMIT_S = 300.0
DECODES = 8
WINDOW_STEPS = 300
RESTORE_EVERY = 20
"""Steps between two restores of 500 blocks."""

SAVED = 12
"""Prefixes of 500 blocks that can be saved in one window; when all are, it goes on with nothing."""


class Engine:
    """One start of an engine in this process."""

    def __init__(self, model: LoadedModel, settings: EngineSettings) -> None:
        runner = ModelRunner(model, settings, threads=1)
        pool = BlockPool(runner.num_blocks, settings.block_size)
        self.namespace = model.namespace(settings.block_size, settings.hash_name)
        self.tiers = build_tiers(settings, self.namespace, pool, runner.cache)
        self.scheduler = Scheduler(
            pool,
            self.namespace,
            settings,
            context_tokens=model.context_tokens,
            vocab_size=model.vocab_size,
            tiers=self.tiers,
        )
        self._run = runner.run
        runner.run = self._spy  # type: ignore[method-assign]
        self.starts: list[float] = []  # of steps, seconds
        self.cpu: list[float] = []  # of the loop's thread at the same moments, seconds
        self.after_step: Callable[[], object] | None = None  # on the loop's thread
        self._changed = threading.Condition()
        self._firsts: dict[int, float] = {}
        self._ended: set[int] = set()
        self._last = 0
        self.loop = EngineLoop(self.scheduler, runner, on_frames=self._on_frames, on_blocks=lambda events: None)
        self.loop.start()
        assert self.loop.wait_restored(LIMIT_S)

    def _spy(self, step: Step) -> list[int | None]:
        self.starts.append(time.perf_counter())
        self.cpu.append(time.thread_time())
        if self.after_step is not None:
            self.after_step()
        return self._run(step)

    def _on_frames(self, frames: dict[str, StepFrame]) -> None:
        now = time.perf_counter()
        with self._changed:
            for frame in frames.values():
                for update in frame.updates:
                    self._firsts.setdefault(update.seq, now)
                    if update.finish:
                        self._ended.add(update.seq)
            self._changed.notify_all()

    def submit(self, tokens: list[int], max_tokens: int) -> int:
        self._last += 1
        sampling = Sampling(max_tokens, temperature=0.0, ignore_eos=True)
        packed = array("I", tokens).tobytes()
        self.loop.submit("bench", Submit(self._last, packed, self.digests(packed), sampling))
        return self._last

    def wait(self, holds: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(holds, LIMIT_S):
                raise TimeoutError("the engine does not answer")

    def first_token_ms(self, tokens: list[int]) -> float:
        began = time.perf_counter()
        seq = self.submit(tokens, 1)
        self.wait(lambda: seq in self._ended)
        if not self.loop.wait_idle(LIMIT_S):
            raise TimeoutError("saving does not end")
        return (self._firsts[seq] - began) * 1000

    def digests(self, packed: bytes) -> bytes:
        return chain_digests(self.namespace.root(), packed, self.namespace.block_size)

    def chain(self, tokens: list[int]) -> Chain:
        size = self.namespace.block_size
        packed = array("I", tokens[: len(tokens) // size * size]).tobytes()
        return Chain("", packed, split_digests(self.digests(packed)))

    def invent(self, rng: random.Random, num_blocks: int = 500) -> Chain:
        """A prefix that the first tier holds as if it had been computed; what is in it does not matter here."""
        size, pool = self.namespace.block_size, self.scheduler.pool
        chain = self.chain([rng.randrange(10, 1000) for _ in range(num_blocks * size)])

        def register() -> None:
            blocks, parent = pool.allocate(num_blocks), None
            assert blocks is not None
            for block, key in zip(blocks, chain.keys(0, num_blocks, size), strict=True):
                pool.register(block, parent, key.salt, key.digest, key.tokens)
                parent = block
            pool.release(blocks)

        self.call(register)
        return chain

    def call(self, command: Callable[[], object]) -> None:
        """Does something on the loop's thread, and waits for it."""
        done = threading.Event()
        self.loop._intake.post(lambda: (command(), done.set()))
        assert done.wait(LIMIT_S)

    def evict(self) -> None:
        """Empties the first tier."""
        pool = self.scheduler.pool

        def evict() -> None:
            blocks = pool.allocate(pool.available)
            assert blocks is not None
            pool.release(blocks)

        self.call(evict)


@contextmanager
def running(model: LoadedModel, settings: EngineSettings) -> Iterator[Engine]:
    engine = Engine(model, settings)
    try:
        yield engine
    finally:
        assert engine.loop.stop(LIMIT_S)


def let_go(folder: Path) -> None:
    """Tells the page cache to drop the files, once they are on the disk."""
    for path in folder.rglob("*.kv"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def first_tokens(model: LoadedModel, settings: EngineSettings, lengths: list[int], rounds: int) -> None:
    rng = random.Random(1)
    print("| prompt tokens | cold ms | hot ms | disk ms | platter ms | disk / cold |")
    print("| --- | --- | --- | --- | --- | --- |")
    for length in lengths:
        rows: dict[str, list[float]] = {name: [] for name in ("cold", "hot", "disk", "platter")}
        for _ in range(rounds):
            tokens = [rng.randrange(10, model.vocab_size) for _ in range(length)]
            with running(model, settings) as engine:
                rows["cold"].append(engine.first_token_ms(tokens))
                rows["hot"].append(engine.first_token_ms(tokens))
            with running(model, settings) as engine:
                rows["disk"].append(engine.first_token_ms(tokens))
            assert settings.disk_dir is not None
            let_go(settings.disk_dir)
            with running(model, settings) as engine:
                rows["platter"].append(engine.first_token_ms(tokens))
                restored = engine.tiers.stats()["disk"]["restored"]
                assert restored == (length - 4) // settings.block_size, restored
        medians = {name: statistics.median(values) for name, values in rows.items()}
        print(
            f"| {length:,} | {' | '.join(f'{value:,.1f}' for value in medians.values())} "
            f"| {100 * medians['disk'] / medians['cold']:.1f}% |",
            flush=True,
        )


def replace_settings(settings: EngineSettings, **changes: object) -> EngineSettings:
    return settings.model_copy(update=changes)


class Windows:
    """Step times of windows in which one thing happens below the steps, and how many blocks that moved."""

    def __init__(self) -> None:
        self.wall_ms: list[list[float]] = []
        self.cpu_ms: list[list[float]] = []
        self.moved = 0

    def row(self, name: str) -> str:
        shares = (0.5, 0.9, 0.99, 1.0)
        wall = [statistics.median(quantile(window, share) for window in self.wall_ms) for share in shares]
        cpu = statistics.median(quantile(window, 0.5) for window in self.cpu_ms)
        count = sum(len(window) for window in self.wall_ms)
        return f"| {name} | {' | '.join(f'{ms:.2f}' for ms in wall)} | {cpu:.2f} | {self.moved / count:.1f} |"


def steps(model: LoadedModel, settings: EngineSettings, rounds: int) -> None:
    """Step times with and without copies, in windows that alternate."""
    rng = random.Random(2)
    taken = {name: Windows() for name in ("nothing is copied", "blocks are saved", "blocks are restored")}
    with running(model, settings) as engine:
        disk = engine.tiers.disk
        assert disk is not None
        below = [engine.invent(rng) for _ in range(rounds * WINDOW_STEPS // RESTORE_EVERY)]
        for chain in below:
            engine.call(lambda chain=chain: engine.tiers.save(chain))  # type: ignore[misc]
            assert engine.loop.wait_idle(LIMIT_S)
        engine.evict()
        above = [engine.invent(rng) for _ in range(SAVED * rounds)]
        mode = "nothing is copied"

        def feed() -> None:
            """On the loop's thread, once a step."""
            if mode == "blocks are saved" and engine.tiers.idle:
                if above:
                    engine.tiers.save(above.pop())
            elif mode == "blocks are restored" and len(engine.starts) % RESTORE_EVERY == 0 and below:
                engine.tiers.restore(below.pop(), 0, time.monotonic())

        engine.after_step = feed
        for _ in range(rounds):
            for name, windows in taken.items():
                for _ in range(DECODES):
                    engine.submit([rng.randrange(10, model.vocab_size) for _ in range(40)], WINDOW_STEPS)
                started = len(engine.starts)
                engine.wait(lambda: engine.loop.load.running == DECODES)
                before = disk.counters.saved + disk.counters.restored
                mode = name
                engine.wait(lambda: len(engine._ended) == engine._last)
                mode = "nothing is copied"
                windows.moved += disk.counters.saved + disk.counters.restored - before
                for clock, kept in ((engine.starts, windows.wall_ms), (engine.cpu, windows.cpu_ms)):
                    kept.append([(b - a) * 1000 for a, b in pairwise(clock[started + 20 : -20])])
                assert engine.loop.wait_idle(LIMIT_S)
    print("| while | p50 ms | p90 ms | p99 ms | longest ms | loop's CPU, p50 ms | blocks copied per step |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, windows in taken.items():
        print(windows.row(name))


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1000,4000,12000", help="lengths of prompts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--folder", type=Path, help="where the disk tier is; a temporary folder without it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvasir-tiers-", dir=options.folder) as folder:
        settings = EngineSettings(model=options.model, kv_cache_bytes=1 << 30, threads=1, disk_dir=Path(folder))
        model = load_model(settings)
        block = model.cache_shape.token_bytes * settings.block_size
        print(f"{model.name}, {model.dtype}, blocks of {block:,} bytes\n")
        first_tokens(model, settings, [int(length) for length in options.tokens.split(",")], options.rounds)
        print()
        steps(model, replace_settings(settings, disk_dir=Path(folder) / "steps"), options.rounds)


if __name__ == "__main__":
    main()

"""An engine over a folder of blocks, for tests that look at what is there: it asks, waits and is killed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fakes.life_bench import Folder, LifeBench, start
from tests.fakes.oracle_runner import Prefixes
from tests.fakes.scheduler_bench import SIZE, prompt

AGE_S = 1000.0
_PREFIXES: dict[Path, Prefixes] = {}  # what a block's bytes mean, to all engines over a folder


class Engine:
    """One life over a folder, and what a test does with it."""

    def __init__(
        self,
        path: Path,
        *,
        weights: str = "w",
        disk: int = 400,
        blocks: int = 200,
        meanwhile: Callable[[LifeBench], None] = lambda bench: None,
        settled: bool = True,
        **changes: Any,
    ) -> None:
        """
        meanwhile  called wherever a copy can be interrupted
        settled    what earlier ones left has been looked through
        """
        self.folder = Folder(path)
        self.bench: LifeBench = start(
            self.folder,
            _PREFIXES.setdefault(path, Prefixes()),
            meanwhile,
            weights=weights,
            layout="8",
            blocks=blocks,
            disk=disk,
            max_age_s=AGE_S,
            context_tokens=blocks * SIZE,
            eos_ids=(),
            queue_bytes=1 << 20,
            part_blocks=64,
            lease_share=1.0,
            lease_tenant_share=1.0,
            **changes,
        )
        self.seq = 0
        if settled:
            self.bench.settle()

    def submit(
        self, kind: int, length: int = 5 * SIZE, salt: str = "", ttl_s: float | None = None, **options: Any
    ) -> list[int]:
        """Returns the tokens."""
        tokens = prompt(length, kind)
        self.seq += 1
        points = () if ttl_s is None else ((length, ttl_s),)
        digests = self.bench.digests(tokens, salt)
        options.setdefault("max_tokens", 1)
        self.bench.submit(self.seq, tokens, salt=salt, digests=digests, breakpoints=points, **options)
        return tokens

    def ask(self, kind: int, length: int = 5 * SIZE, salt: str = "", ttl_s: float | None = None) -> int:
        """Returns the cached tokens."""
        self.submit(kind, length, salt, ttl_s)
        self.bench.finish()
        return self.bench.of(self.seq)[0].cached_tokens or 0

    def flood(self) -> None:
        """Nothing is left where the model runs."""
        pool = self.bench.pool
        pool.release(pool.allocate(pool.available) or [])

    def wait(self, seconds: float) -> None:
        """As an idle engine does: it looks when something is due."""
        end_s, tiers = self.bench.now + seconds, self.bench.tiers
        while (due_s := tiers.next_s) is not None and due_s <= end_s:
            self.bench.now = max(self.bench.now, due_s)
            self.pump()
        self.bench.now = end_s
        self.pump()

    def pump(self) -> None:
        self.bench.scheduler.leases.expire(self.bench.now)
        self.bench.tiers.pump(self.bench.now)
        self.bench.settle()

    @property
    def disk_blocks(self) -> int:
        return len(self.bench.tiers.pools[-1].prefixes)

    @property
    def files(self) -> int:
        return len(list(self.bench.disk.store._own.rglob("*.kv")))

    def check(self) -> None:
        self.bench.check_counts()
        self.bench.check_contents()
        assert self.disk_blocks == self.files

    def kill(self) -> None:
        self.bench.kill(self.folder)


def make_older(path: Path, seconds: float) -> None:
    for file in path.rglob("*"):
        if file.is_file() and file.name != "lock":
            then = file.stat().st_mtime - seconds
            os.utime(file, (then, then))

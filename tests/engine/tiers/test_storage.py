"""A real model over real tiers: what comes back from host memory or disk computes the very same numbers."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.compute.runner import ModelRunner
from engine.config import ConfigError, EngineSettings
from engine.loop import EngineLoop
from engine.pool.blocks import BlockPool
from engine.protocol import Sampling, StepFrame, Submit
from engine.scheduler import Scheduler
from engine.tiers import storage
from engine.tiers.copying import CopyThread
from engine.tiers.storage import build_tiers
from tests.fakes.tiny_models import CONTEXT, VOCABULARY, make_loaded, make_module, random_ids
from tests.fakes.tuned import tuned

LIMIT_S = 30.0
PROMPT = random_ids(300, 1)


@dataclass
class Engine:
    """A loop with a tiny model; `logits` is what each answer's first token was chosen from."""

    loop: EngineLoop
    scheduler: Scheduler
    runner: ModelRunner
    changed: threading.Condition = field(default_factory=threading.Condition)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    logits: list[torch.Tensor] = field(default_factory=list)

    def on_frames(self, frames: dict[str, StepFrame]) -> None:
        with self.changed:
            for frame in frames.values():
                for update in frame.updates:
                    self.tokens.setdefault(update.seq, []).extend(update.tokens)
                    if update.cached_tokens is not None:
                        self.cached[update.seq] = update.cached_tokens
                    if update.finish:
                        assert update.finish == "length", update
                        self.ended.add(update.seq)
            self.changed.notify_all()

    def ask(self, seq: int, tokens: list[int]) -> tuple[list[int], int, torch.Tensor]:
        """Tokens of the greedy answer, cached tokens, and the logits of its first token."""
        self.logits.clear()
        self.loop.submit("g", Submit(seq, array("I", tokens).tobytes(), b"", Sampling(8, temperature=0.0)))
        with self.changed:
            assert self.changed.wait_for(lambda: seq in self.ended, LIMIT_S)
        assert self.loop.wait_idle(LIMIT_S), "saving does not end"
        return self.tokens[seq], self.cached[seq], self.logits[-8]


@contextmanager
def engine(kind: str, dtype: torch.dtype, **changes: Any) -> Iterator[Engine]:
    """One run of an engine; what it leaves in `disk_dir` is there for the next."""
    settings = tuned(EngineSettings, **{"kv_cache_bytes": 1 << 20, "threads": 1, "step_tokens": 256, **changes})
    model = make_loaded(make_module(kind, dtype))
    runner = ModelRunner(model, settings)
    pool = BlockPool(runner.num_blocks, settings.block_size)
    namespace = model.namespace(settings.block_size, "xxh3_128")
    tiers = build_tiers(settings, namespace, pool, runner.cache)
    scheduler = Scheduler(pool, namespace, settings, context_tokens=CONTEXT, vocab_size=VOCABULARY, tiers=tiers)
    made: list[Engine] = []
    loop = EngineLoop(
        scheduler,
        runner,
        on_frames=lambda frames: made[0].on_frames(frames),
        on_blocks=lambda events: None,
        idle_check_s=0.01,
    )
    made.append(Engine(loop, scheduler, runner))
    forward = runner._forward

    def spy(*given: Any) -> torch.Tensor:
        logits = forward(*given)
        made[0].logits.append(logits.clone())
        return logits

    runner._forward = spy  # type: ignore[method-assign]
    loop.start()
    try:
        assert loop.wait_restored(LIMIT_S)
        yield made[0]
    finally:
        assert loop.stop(LIMIT_S)
    stats = loop.stats()
    assert (stats["errors"], stats["failed_steps"], stats["invariant_violations"]) == (0, 0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral with a window", "gpt2"])
def test_an_answer_after_a_restart_is_computed_from_the_same_bits(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    with engine(kind, dtype, disk_dir=tmp_path) as first:
        cold, cached, logits = first.ask(1, PROMPT)
        hot = first.ask(2, PROMPT)
        assert cached == 0
        assert first.loop.stats()["tiers"]["disk"]["blocks"] == 300 // 16 + ((300 + 7) // 16 > 300 // 16)
    with engine(kind, dtype, disk_dir=tmp_path) as second:
        warm = second.ask(1, PROMPT)
        assert warm[:2] == (cold, 288) == hot[:2]
        assert torch.equal(warm[2], hot[2]), "what came from disk is what stayed in memory"
        if dtype == torch.float32:
            assert torch.equal(warm[2], logits)
        assert second.loop.stats()["tiers"]["disk"]["restored"] == 18


def test_what_was_evicted_comes_back_from_host_memory(tmp_path: Path) -> None:
    changes = {"host_bytes": 4 << 20, "disk_dir": tmp_path}
    with engine("llama", torch.float32, **changes) as running:
        cold = running.ask(1, PROMPT)
        evicted = running.scheduler.pool.evictions
        for seq in range(2, 14):
            running.ask(seq, random_ids(300, seq))
        assert running.scheduler.pool.evictions > evicted
        warm = running.ask(20, PROMPT)
        assert (warm[0], warm[1]) == (cold[0], 288)
        assert torch.equal(warm[2], cold[2])
        stats = running.loop.stats()["tiers"]
        assert stats["host"]["restored"] > 0
        assert stats["disk"]["restored"] == 0
        assert stats["host"]["saved"] == stats["disk"]["saved"]


def test_another_model_finds_nothing_and_leaves_the_first_ones_blocks(tmp_path: Path) -> None:
    with engine("llama", torch.float32, disk_dir=tmp_path) as first:
        first.ask(1, PROMPT)
    with engine("llama", torch.bfloat16, disk_dir=tmp_path) as other:
        assert other.ask(1, PROMPT)[1] == 0
    with engine("llama", torch.float32, disk_dir=tmp_path) as again:
        assert again.ask(1, PROMPT)[1] == 288


def test_a_disk_that_cannot_be_written_costs_nothing_but_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with engine("llama", torch.float32, disk_dir=tmp_path / "file") as running:
        cold = running.ask(1, PROMPT)
        assert running.ask(2, PROMPT)[:2] == (cold[0], 288)
        assert running.loop.stats()["tiers"]["disk"]["failed"] > 0
    assert len([record for record in caplog.records if "disk tier failed" in record.getMessage()]) == 1


@pytest.mark.parametrize("setting", ["host_bytes", "disk_bytes"])
def test_a_budget_below_one_block_is_a_setting_error(setting: str, tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=f"engine.{setting}: 1 bytes"),
        engine("llama", torch.float32, **{"disk_dir": tmp_path, setting: 1}),
    ):
        pass


def test_without_a_folder_or_bytes_there_is_one_tier(tmp_path: Path) -> None:
    for changes in ({}, {"disk_dir": tmp_path, "disk_bytes": 0}):
        with engine("llama", torch.float32, **changes) as running:
            running.ask(1, PROMPT)
            assert list(running.loop.stats()["tiers"]) == ["device"]
    assert list(tmp_path.iterdir()) == []


def test_a_copy_thread_does_jobs_in_order_and_leaves_out_what_is_left_when_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    posted: list[object] = []
    inside, go = threading.Event(), threading.Event()

    def job(number: int) -> int:
        inside.set()
        assert go.wait(LIMIT_S)
        return number

    thread = CopyThread("copy-test", lambda command: posted.append(command()))
    for number in range(3):
        thread.run(lambda number=number: job(number), lambda result: result)  # type: ignore[misc]
    assert inside.wait(LIMIT_S)
    with monkeypatch.context() as patch:
        patch.setattr("engine.tiers.copying.CLOSE_LIMIT_S", 0.0)
        thread.close(lambda: None)
    go.set()
    thread.close(lambda: None)
    assert posted == [0]


def test_what_another_arithmetic_computed_is_not_read_and_stays_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine("llama", torch.float32, disk_dir=tmp_path) as first:
        first.ask(1, PROMPT)
    with monkeypatch.context() as other:
        other.setattr(storage, "find_numerics", lambda device: "torch 99.0")
        with engine("llama", torch.float32, disk_dir=tmp_path) as updated:
            assert updated.ask(1, PROMPT)[1] == 0
    with engine("llama", torch.float32, disk_dir=tmp_path) as again:
        assert again.ask(1, PROMPT)[1] > 0

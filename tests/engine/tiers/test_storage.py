"""A real model over real tiers: what comes back from disk computes the very same numbers."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.compute.kv_cache import CacheShape, KVCache
from engine.compute.runner import ModelRunner
from engine.config import ConfigError, EngineSettings
from engine.loop import EngineLoop
from engine.pool.blocks import BlockPool
from engine.protocol import Sampling, StepFrame, Submit
from engine.scheduler import Scheduler
from engine.tiers import storage
from engine.tiers.copying import BlockKey, Copied, CopyThread, Payload, copy_blocks
from engine.tiers.storage import CacheStore, build_tiers
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


def test_a_budget_below_one_block_is_a_setting_error(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"engine\.disk_bytes: 1 bytes"),
        engine("llama", torch.float32, disk_dir=tmp_path, disk_bytes=1),
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


CPU = torch.device("cpu")
NUM_BLOCKS = 9


def key(index: int) -> BlockKey:
    return BlockKey(bytes([index]) * 16, None, index, "", b"")


def keys(count: int) -> list[BlockKey]:
    return [key(index) for index in range(count)]


def filled(dtype: torch.dtype, seed: int) -> KVCache:
    """A cache with random bits in every block, NaNs among them."""
    cache = KVCache(CacheShape(3, 2, 8, dtype), NUM_BLOCKS, 4, CPU)
    generator = torch.Generator().manual_seed(seed)
    bits = cache.data.view(torch.uint8)
    bits.copy_(torch.randint(0, 256, bits.shape, generator=generator, dtype=torch.uint8))
    return cache


def bits(cache: KVCache, block: int) -> list[int]:
    slots = cache.data[:, block * 4 : block * 4 + 4].contiguous()
    return slots.view(torch.uint8).flatten().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_blocks_go_down_and_come_back_bit_for_bit_anywhere_else(dtype: torch.dtype) -> None:
    source, target = filled(dtype, 1), filled(dtype, 2)
    before = [bits(target, block) for block in range(NUM_BLOCKS + 1)]
    device, below = CacheStore(source), CacheStore(filled(dtype, 3))
    assert copy_blocks(device, [7, 1, 2], below, [4, 0, 3], keys(3)) == Copied(3)
    assert copy_blocks(below, [4, 0, 3], CacheStore(target), [0, 8, 5], keys(3)) == Copied(3)
    moved = {0: 7, 8: 1, 5: 2}
    for block in range(NUM_BLOCKS + 1):
        assert bits(target, block) == (bits(source, moved[block]) if block in moved else before[block])


def test_a_payload_is_laid_out_as_it_is_promised() -> None:
    cache = KVCache(CacheShape(3, 2, 8, torch.float32), NUM_BLOCKS, 4, CPU)
    cache.layers[1][5 * 4 + 2, 1, 0, 3] = 7.0
    row = CacheStore(cache).read([5], keys(1))[0]
    assert row.view(np.float32).reshape(3, 4, 2, 2, 8)[1, 2, 1, 0, 3] == 7.0
    assert np.count_nonzero(row.view(np.float32)) == 1


class Faulty:
    """A store that is not sound or fails from some block on."""

    def __init__(self, sound: int = 100, fails: int = 100) -> None:
        self.sound, self.fails = sound, fails

    def read(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> Payload:
        return np.zeros((max(0, min(len(keys), self.sound - keys[0].index)), 8), np.uint8)

    def write(self, slots: Sequence[int], keys: Sequence[BlockKey], payload: Payload) -> None:
        if keys[-1].index >= self.fails:
            raise OSError("no room")

    def drop(self, digests: Sequence[bytes]) -> None:
        raise AssertionError("not asked for")


def test_a_copy_reports_how_far_it_came() -> None:
    slots = [*range(10)]
    for sound in range(11):
        assert copy_blocks(Faulty(sound), slots, Faulty(), slots, keys(10)) == Copied(sound)
    failed = copy_blocks(Faulty(), slots, Faulty(fails=5), slots, keys(10))
    assert (failed.count, str(failed.error)) == (0, "no room")

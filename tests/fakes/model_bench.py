"""A real scheduler, pool and runner around a tiny random model, driven by hand as tests/fakes/scheduler_bench.py is."""

from __future__ import annotations

from typing import Any, cast

from engine.config import EngineSettings
from engine.pool.blocks import BlockPool
from engine.scheduler import Scheduler
from tests.fakes.oracle_runner import OracleRunner
from tests.fakes.scheduler_bench import NAMESPACE, SIZE, Bench
from tests.fakes.tiny_models import CONTEXT, VOCABULARY, make_runner
from tests.fakes.tuned import PATIENT, tuned


def make_model_bench(num_blocks: int = 1000, *, eos_ids: tuple[int, ...] = (), **changes: Any) -> Bench:
    """With blocks of SIZE tokens, at most as many as the runner has."""
    runner = make_runner("llama", block_size=SIZE)
    pool = BlockPool(min(num_blocks, runner.num_blocks), SIZE)
    settings = tuned(
        EngineSettings, **{"block_size": SIZE, "step_tokens": 256, "max_sequences": 32, **PATIENT, **changes}
    )
    scheduler = Scheduler(pool, NAMESPACE, settings, context_tokens=CONTEXT, vocab_size=VOCABULARY, eos_ids=eos_ids)
    return Bench(pool, scheduler, cast("OracleRunner", runner))

"""What an engine is made of: the model, what it says of itself, and the loop with everything that belongs to it.

The composition root of the engine: nothing else knows which eviction, which tiers and which grammars there are. torch
is imported when something is made, so that a gateway without it can import what serves.
"""

from __future__ import annotations

import logging
import time
import uuid
from typing import TYPE_CHECKING

from engine.config import EngineSettings
from engine.protocol import Hello, TokenizerFiles
from engine.server import OnBlocks, OnFrames

if TYPE_CHECKING:
    from engine.compute.model import LoadedModel
    from engine.compute.runner import ModelRunner
    from engine.loop import EngineLoop

log = logging.getLogger(__name__)


def load(settings: EngineSettings) -> tuple[LoadedModel, ModelRunner]:
    """The model, and what runs it. Takes seconds. Raises ConfigError for a model or settings that cannot be used."""
    from engine.compute.model import load_model
    from engine.compute.runner import ModelRunner

    model = load_model(settings)
    for warning in model.warnings:
        log.warning("%s", warning)
    return model, ModelRunner(model, settings)


def make_hello(settings: EngineSettings, model: LoadedModel, num_blocks: int) -> Hello:
    """What this engine says of itself, as a new incarnation."""
    return Hello(
        incarnation=uuid.uuid4().hex,
        model=model.name,
        namespace=model.namespace(settings.block_size, settings.hash_name),
        context_tokens=min(model.context_tokens, num_blocks * settings.block_size),  # one sequence needs all its blocks
        vocab_size=model.vocab_size,
        num_blocks=num_blocks,
        max_sequences=settings.max_sequences,
        eos_ids=model.eos_ids,
        tokenizer=model.tokenizer.fingerprint(),
        created=int(time.time()),
    )


def make_loop(
    settings: EngineSettings,
    hello: Hello,
    tokenizer: TokenizerFiles,
    runner: ModelRunner,
    on_frames: OnFrames,
    on_blocks: OnBlocks,
) -> EngineLoop:
    """The loop, not started, with everything that it owns: pool, tiers, scheduler, grammars.

    on_frames, on_blocks  called on its thread
    """
    from engine.loop import EngineLoop
    from engine.pool.blocks import BlockPool
    from engine.pool.hit_density import HitDensity
    from engine.sampling.grammar_pool import GrammarPool
    from engine.scheduler import Scheduler
    from engine.tiers.storage import build_tiers

    num_blocks, block_size = hello.num_blocks, hello.namespace.block_size
    policy = HitDensity(num_blocks, block_size) if settings.eviction == "hit-density" else None
    pool = BlockPool(num_blocks, block_size, policy)
    scheduler = Scheduler(
        pool,
        hello.namespace,
        settings,
        context_tokens=hello.context_tokens,
        vocab_size=hello.vocab_size,
        eos_ids=hello.eos_ids,
        tiers=build_tiers(settings, hello.namespace, pool, runner.cache),
    )
    grammars = GrammarPool(
        tokenizer.tokenizer_json,
        hello.vocab_size,
        hello.eos_ids,
        max_kept=settings.grammar_cache,
        max_waiting=settings.max_waiting,
    )
    return EngineLoop(
        scheduler,
        runner,
        on_frames=on_frames,
        on_blocks=on_blocks,
        grammars=grammars,
        max_pending=settings.max_waiting,
    )

"""What an engine is made of follows its settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.compute.kv_cache import CacheShape, KVCache
from engine.config import EngineSettings
from engine.pool.eviction import LeastRecentlyUsed
from engine.pool.hit_density import HitDensity
from engine.serving import make_loop
from tests.fakes.fake_engine import TOKENIZER, make_hello


@pytest.mark.parametrize(("name", "policy"), [("lru", LeastRecentlyUsed), ("hit-density", HitDensity)])
def test_the_setting_chooses_who_is_evicted(name: Any, policy: type) -> None:
    settings = EngineSettings(eviction=name, disk_bytes=0)
    hello = make_hello(num_blocks=200)
    cache = KVCache(CacheShape(1, 1, 8, torch.float32), hello.num_blocks, 16, torch.device("cpu"))
    runner: Any = SimpleNamespace(cache=cache, find_not_finite=lambda blocks: [])
    loop = make_loop(settings, hello, TOKENIZER, runner, lambda frames: None, lambda events: None)
    assert type(loop._scheduler.pool.policy) is policy

"""The index of a real vLLM cache, whose manager runs without a model, against what that manager itself finds."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from engine.protocol import Namespace, chain_digests
from gateway.index.memory_index import MemoryIndex
from gateway.replicas.events import decode
from gateway.replicas.residency import Residency
from tests.fakes import vllm_server

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not vllm_server.installed(), reason=vllm_server.HOW)]

SCRIPT = Path(__file__).parents[2] / "fakes/vllm_cache.py"
SPACE = Namespace(weights="m@1", dtype="", kv_dtype="", block_size=16)
LIMIT_S = 240.0


@pytest.mark.parametrize("report_bytes", [False, True], ids=["int", "bytes"])
@pytest.mark.parametrize(("block_size", "num_blocks", "hybrid"), [(16, 96, 0), (128, 48, 0), (48, 64, 0), (16, 160, 1)])
def test_the_index_holds_what_the_cache_holds(
    block_size: int, num_blocks: int, hybrid: int, report_bytes: bool
) -> None:
    environ = {**os.environ, "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": str(int(not report_bytes))}
    environ.pop("PYTHONPATH", None)
    numbers = [str(number) for number in (block_size + hybrid, block_size, num_blocks, 400, hybrid)]
    command = [str(vllm_server.FOLDER / "bin/python"), str(SCRIPT), *numbers]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=LIMIT_S, check=True, env=environ)
    residency, index = Residency(SPACE, 10_000), MemoryIndex()
    hits = misses = exact = checked = 0
    for payload, checks in msgspec.msgpack.decode(done.stdout):
        for changes in residency.apply(decode(payload)):
            index.apply("r", changes)
        for tokens, salt, found in checks:
            packed = b"".join(token.to_bytes(4, "little") for token in tokens)
            digests = chain_digests(replace(SPACE, salt=salt).root(), packed, SPACE.block_size)
            predicted = index.prefix("r", digests) * SPACE.block_size // block_size * block_size
            assert predicted == found or (hybrid and predicted < found)
            exact, checked = exact + (predicted == found), checked + 1
            hits, misses = hits + bool(found), misses + (found < len(tokens) // block_size * block_size)
    assert hits > 100
    assert misses > 100
    assert not residency.unaligned
    # What a hybrid model computes again from a prompt's first token, because the window of its other layers is gone,
    # cannot be told from a report: of two copies only one is counted.
    assert exact >= (0.9 if hybrid else 1) * checked
    assert residency._held <= num_blocks * max(1, block_size // SPACE.block_size)

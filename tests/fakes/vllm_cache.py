"""vLLM's own cache manager at work, without a model: what it publishes, and what it then finds. Run by vLLM's Python.

    PYTHON tests/fakes/vllm_cache.py SEED BLOCK_SIZE NUM_BLOCKS STEPS HYBRID

Writes a MessagePack list to stdout, an entry for each step: [payload, [[tokens, salt, hit tokens], ...]]. Prompts of a
few conversations and tenants come and go while the cache is too small for all; some ask for a report of what they
reuse. HYBRID 1 adds a group of layers with a sliding window.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import msgspec
import torch
from vllm.distributed.kv_events import KVEventBatch  # type: ignore[import-not-found]
from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found]
from vllm.utils.hashing import sha256  # type: ignore[import-not-found]
from vllm.v1.core import kv_cache_utils as utils  # type: ignore[import-not-found]
from vllm.v1.core.kv_cache_manager import KVCacheManager  # type: ignore[import-not-found]
from vllm.v1.kv_cache_interface import (  # type: ignore[import-not-found]
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request  # type: ignore[import-not-found]


def main(seed: int, block_size: int, num_blocks: int, steps: int, hybrid: int) -> None:
    source = random.Random(seed)
    utils.init_none_hash(sha256)
    shape: dict[str, Any] = {"block_size": block_size, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**shape))]
    if hybrid:
        groups.insert(0, KVCacheGroupSpec(["window"], SlidingWindowSpec(**shape, sliding_window=2 * block_size)))
    config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    manager = KVCacheManager(
        config,
        max_model_len=1 << 14,
        scheduler_block_size=block_size,
        hash_block_size=block_size,
        enable_kv_cache_events=True,
    )
    hasher = utils.get_request_block_hasher(block_size, sha256)
    serial = 0

    def request(tokens: list[int], salt: str, *, report: bool = False) -> Any:
        nonlocal serial
        serial += 1
        sampling = SamplingParams(max_tokens=8, extra_args={"kv_cache_report_mode": "full"} if report else None)
        sampling.update_from_generation_config({}, 0)
        return Request(str(serial), tokens, sampling, None, cache_salt=salt or None, block_hasher=hasher)

    chats: list[tuple[str, list[int]]] = []
    running: list[Any] = []
    written = []
    for _ in range(steps):
        # 1. A conversation begins or goes on; some requests end.
        if not chats or source.random() < 0.3:
            head = [7] * source.randrange(3 * block_size) if source.random() < 0.5 else []
            chats.append((source.choice(["", "t1", "t2"]), head))
        salt, tokens = chats[source.randrange(max(0, len(chats) - 6), len(chats))]
        tokens += [source.randrange(50_000) for _ in range(source.randrange(1, 5 * block_size))]
        new = request(list(tokens), salt, report=source.random() < 0.3)
        blocks, hit, *_ = manager.get_computed_blocks(new)
        if manager.allocate_slots(new, new.num_tokens - hit, hit, blocks) is not None:
            new.num_computed_tokens = new.num_tokens
            running.append(new)
        for one in list(running):
            if source.random() < 0.4 or len(running) > 3:
                running.remove(one)
                manager.free(one)
            elif source.random() < 0.5:  # it goes on: a token is generated
                one.append_output_token_ids(source.randrange(50_000))
                if manager.allocate_slots(one, 1) is not None:
                    one.num_computed_tokens += 1
        if source.random() < 0.02 and not running:
            manager.reset_prefix_cache()
        # 2. What is published, and what could be reused now.
        events = manager.take_events()
        payload = msgspec.msgpack.encode(KVEventBatch(ts=time.time(), events=events, data_parallel_rank=0))
        checks = []
        for salt, tokens in chats[-12:]:
            # One more token, which is never held: the manager never reuses a prompt's last one.
            probe = request([*tokens, 1], salt)
            hashes = probe.block_hashes
            found = (
                manager.coordinator.find_longest_cache_hit(hashes, probe.num_tokens - 1)[1]
                if not hybrid
                else full_hit(manager, hashes)
            )
            checks.append([tokens, salt, found])
        written.append([payload, checks])
    sys.stdout.buffer.write(msgspec.msgpack.encode(written))


def full_hit(manager: Any, hashes: list[bytes]) -> int:
    """Leading tokens that the group with full attention holds."""
    count = 0
    while count < len(hashes) and manager.block_pool.get_cached_block(hashes[count], [1]):
        count += 1
    return count * int(manager.kv_cache_config.kv_cache_groups[1].kv_cache_spec.block_size)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

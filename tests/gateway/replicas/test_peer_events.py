"""Bytes of real encoders: vLLM and SGLang of several years, taken from their packages when the tests run."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import pytest

from engine.protocol import Namespace, chain_digests
from gateway.index.memory_index import MemoryIndex
from gateway.replicas.events import Cleared, Removed, Stored, decode
from gateway.replicas.residency import Residency
from tests.fakes.peers import encode

pytestmark = pytest.mark.slow

SPACE = Namespace(weights="m@1", dtype="", kv_dtype="", block_size=16)
TOKENS = list(range(1000, 1064))

# version: what its events say of salt, tier, adapter, rank
VLLM = {
    "0.9.2": "rank",
    "0.10.2": "rank tier",
    "0.14.1": "rank tier adapter",
    "0.18.1": "rank tier adapter salt",
    "0.22.1": "rank tier adapter salt group",
    "0.23.0": "rank tier adapter salt group",
    "0.24.0": "rank tier adapter salt group",
    "0.29.0": "rank tier adapter salt group",
    "0.33.0": "rank tier adapter salt group",
}
SGLANG = {
    "0.4.6.post5": "",
    "0.4.9": "rank",
    "0.5.9": "rank tier",
    "0.5.19": "rank tier",
    "0.5.21": "rank tier salt",
    "0.5.23": "rank tier salt adapter",
}
VERSIONS = [
    *(pytest.param("vllm", version, set(says.split()), id=f"vllm-{version}") for version, says in VLLM.items()),
    *(pytest.param("sglang", version, set(says.split()), id=f"sglang-{version}") for version, says in SGLANG.items()),
]


@pytest.fixture(scope="module", autouse=True)
def _index() -> None:
    try:
        socket.create_connection(("pypi.org", 443), 10).close()
    except OSError as error:
        pytest.skip(f"the package index is not reachable: {error}")


def digests(salt: str, adapter: str, tokens: list[int]) -> bytes:
    root = replace(SPACE, salt=salt, adapter=adapter).root()
    return chain_digests(root, b"".join(token.to_bytes(4, "little") for token in tokens), 16)


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


@pytest.mark.parametrize(("package", "version", "says"), VERSIONS)
def test_events_of_a_version_become_the_digests_of_its_prompts(package: str, version: str, says: set[str]) -> None:
    salt, adapter = ("t1" if "salt" in says else ""), ("poet" if "adapter" in says else "")
    keys = [key for key in (adapter, salt) if key]
    group = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    common = {"block_size": 16, "medium": "GPU", "lora_name": adapter or None, "cache_salt": salt or None, **group}
    first = event(
        "BlockStored",
        **common,
        block_hashes=[11, -12],
        parent_block_hash=None,
        token_ids=TOKENS[:32],
        extra_keys=[keys or None, [adapter] if adapter else None],
    )
    second = event(
        "BlockStored",
        **common,
        block_hashes=[13, 2**63 - 1],
        parent_block_hash=-12,
        token_ids=TOKENS[32:],
        extra_keys=[[adapter] if adapter else None] * 2,
    )
    lower = {**second, "medium": "CPU" if package == "vllm" else "CPU_PINNED"}
    other = {**second, "block_hashes": [77, 78], "group_idx": 0, "kv_cache_spec_kind": "sliding_window"}
    removed = event("BlockRemoved", block_hashes=[2**63 - 1], medium="GPU", group_idx=1)
    batches = [[first, second], [lower], [removed], [event("AllBlocksCleared")]]
    if "group" in says:
        batches[0].insert(1, other)
    payloads = encode(package, version, batches)
    read = [decode(payload) for payload in payloads]
    assert [batch.rank for batch in read] == [3 if "rank" in says else None] * 4

    assert [type(item) for batch in read for item in batch.events] == [Stored, Stored, Stored, Removed, Cleared]
    one = read[0].events[0]
    assert isinstance(one, Stored)
    assert (one.salt, one.adapter, one.full) == (salt, adapter, "group" in says)
    below = read[1].events[0]
    assert isinstance(below, Stored)
    assert below.tier == ("host" if "tier" in says else "device")

    residency, index = Residency(SPACE, 1000), MemoryIndex()
    found = []
    for batch in read:
        for changes in residency.apply(batch):
            index.apply("r", changes)
        found.append(index.prefix("r", digests(salt, adapter, TOKENS)))
    # Without a tier the second store is one more copy, which the removal takes: the block is held as before.
    assert found == [4, 4, 4, 0]
    assert not residency.unaligned
    assert not residency.orphans


@pytest.mark.parametrize(("package", "version", "says"), [one for one in VERSIONS if "vllm" in str(one.id)])
def test_hashes_of_bytes(package: str, version: str, says: set[str]) -> None:
    store = event("BlockStored", block_hashes=[b"a" * 32], token_ids=TOKENS[:16], block_size=16, medium="GPU")
    (payload,) = encode(package, version, [[store, event("BlockRemoved", block_hashes=[b"a" * 32], medium="GPU")]])
    stored, removed = decode(payload).events
    assert isinstance(stored, Stored)
    assert isinstance(removed, Removed)
    assert [*stored.hashes] == [*removed.hashes] == [b"a" * 32]


def test_what_only_the_newest_versions_say() -> None:
    store = event("BlockStored", block_hashes=[1], token_ids=TOKENS[:16], block_size=16, medium="GPU")
    far = {**store, "locality": "REMOTE", "medium": "STORAGE"}
    picture = {**store, "extra_keys": [[["mm-hash", 3], "t1"]], "session_id": "s"}
    ahead = {**store, "lookahead_token_ids": [[5]], "ownership": "tier-1", "locality": "LOCAL"}
    read = [decode(payload).events for payload in encode("vllm", "0.33.0", [[far], [picture], [ahead]])]
    assert read[0] == ()
    assert [(one.salt, bool(one.extra)) for one in read[1] if isinstance(one, Stored)] == [("t1", True)]
    assert [(one.salt, bool(one.extra)) for one in read[2] if isinstance(one, Stored)] == [("", False)]
    pairs = {**store, "token_ids": [[token, token + 1] for token in TOKENS[:16]]}
    (payload,) = encode("sglang", "0.5.23", [[pairs]])
    assert [one.tokens for one in decode(payload).events if isinstance(one, Stored)] == [TOKENS[:16]]

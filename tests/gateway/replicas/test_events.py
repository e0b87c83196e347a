"""Payloads of KV events: arrays, maps, what later versions added, and bytes that are none."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.replicas import events
from gateway.replicas.events import Cleared, EventBatch, EventError, Removed, Stored, decode


def batch(*items: Any, rank: Any = 0) -> EventBatch:
    return decode(msgspec.msgpack.encode([1.5, list(items), rank]))


def stored(**fields: Any) -> list[Any]:
    """The events that one BlockStored becomes; two blocks of two tokens where nothing else is said."""
    base = {"block_hashes": [1, 2], "parent_block_hash": None, "token_ids": [1, 2, 3, 4], "block_size": 2}
    return list(batch({"type": "BlockStored", "lora_id": None, **base, **fields}).events)


TWO = Stored([1, 2], None, [1, 2, 3, 4], 2, "device", "", "")


def test_maps_and_arrays_say_the_same() -> None:
    fields = [[1, 2], 7, [1, 2, 3, 4], 2, None, "CPU", None, [None, None], 0, "full_attention", None]
    names = "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys group_idx"
    keys = [*names.split(), "kv_cache_spec_kind", "kv_cache_spec_sliding_window"]
    wanted = Stored([1, 2], 7, [1, 2, 3, 4], 2, "host", "", "", 0, full=True)
    assert batch(["BlockStored", *fields]).events == (wanted,)
    assert batch({"type": "BlockStored", **dict(zip(keys, fields, strict=True))}).events == (wanted,)
    assert batch(["BlockRemoved", [1], "CPU", 0]).events == (Removed([1], "host", 0),)
    assert batch({"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU", "group_idx": 0}).events == (
        Removed([1], "host", 0),
    )
    assert batch(["AllBlocksCleared"], {"type": "AllBlocksCleared"}).events == (Cleared(), Cleared())


@pytest.mark.parametrize("length", range(5, 12))
def test_an_array_may_end_early(length: int) -> None:
    whole = ["BlockStored", [1, 2], None, [1, 2, 3, 4], 2, None, "GPU", None, None, None, None, None]
    assert batch(whole[:length]).events == (TWO,)


def test_what_is_not_known_is_skipped() -> None:
    later = ["BlockStored", [1, 2], None, [1, 2, 3, 4], 2, None, "GPU", None, None, None, None, None, "LOCAL", {}, [1]]
    assert batch(later, ["BlockPinned", [1]], {"type": "BlockPinned"}, {"type": 3}).events == (TWO,)
    assert stored(hint={"a": [1]}, lookahead_token_ids=[[1], [2]], session_id="s", locality="LOCAL") == [TWO]


def test_a_batch_may_be_an_array_with_or_without_rank_or_a_map() -> None:
    items = [["AllBlocksCleared"]]
    assert decode(msgspec.msgpack.encode([1, items])) == EventBatch((Cleared(),), None)
    assert decode(msgspec.msgpack.encode([1, items, 3, "more"])) == EventBatch((Cleared(),), 3)
    assert decode(msgspec.msgpack.encode({"ts": 1, "events": items, "data_parallel_rank": 2})).rank == 2
    assert decode(msgspec.msgpack.encode({"ts": 1, "events": items, "attn_dp_rank": 1})).rank == 1


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, "device"),
        ("", "device"),
        ("gpu", "device"),
        ("GPU", "device"),
        ("cpu", "host"),
        ("CPU", "host"),
        ("CPU_PINNED", "host"),
        ("STORAGE", "disk"),
        ("DISK", "disk"),
        ("EXTERNAL", "disk"),
        ("tape", "disk"),
    ],
)
def test_media_are_tiers(medium: str | None, tier: str) -> None:
    assert stored(medium=medium)[0].tier == tier
    assert batch(["BlockRemoved", [1], medium]).events == (Removed([1], tier),)  # type: ignore[arg-type]


def test_hashes_are_numbers_or_bytes() -> None:
    assert stored(block_hashes=[b"x" * 32, -(2**63)], parent_block_hash=2**64 - 1)[0].hashes == [b"x" * 32, -(2**63)]


@pytest.mark.parametrize(
    ("fields", "salt", "adapter"),
    [
        ({}, "", ""),
        ({"extra_keys": [None, None]}, "", ""),
        ({"extra_keys": [["s"], None]}, "s", ""),
        ({"extra_keys": [["lora"], ["lora"]], "lora_name": "lora"}, "", "lora"),
        ({"extra_keys": [["lora", "s"], ["lora"]], "lora_name": "lora"}, "s", "lora"),
        ({"extra_keys": [["same", "same"], ["same"]], "lora_name": "same"}, "same", "same"),
        ({"cache_salt": "s", "lora_name": "lora"}, "s", "lora"),
        ({"lora_id": 3}, "", "lora_id 3"),
    ],
)
def test_a_salt_is_told_from_an_adapter(fields: dict[str, Any], salt: str, adapter: str) -> None:
    assert stored(**fields) == [TWO._replace(salt=salt, adapter=adapter)]


@pytest.mark.parametrize(
    "keys",
    [[["image", 0], "s"], ["image", "s"]],
)
def test_a_block_with_an_image_is_not_the_text_of_its_tokens(keys: list[Any]) -> None:
    first, second = stored(extra_keys=[keys, [["other", -3]]])
    assert (first.salt, first.hashes, first.tokens, first.parent) == ("s", [1], [1, 2], None)
    assert (second.hashes, second.tokens, second.parent) == ([2], [3, 4], 1)
    assert "image" in first.extra
    assert "other" in second.extra


def test_blocks_before_and_behind_an_image_are_plain() -> None:
    parts = stored(
        block_hashes=[1, 2, 3, 4, 5], token_ids=list(range(10)), extra_keys=[["s"], None, [["i", 1]], None, None]
    )
    assert [(part.hashes, part.parent, part.tokens, bool(part.extra)) for part in parts] == [
        ([1, 2], None, [0, 1, 2, 3], False),
        ([3, 4, 5], 2, [4, 5, 6, 7, 8, 9], True),
    ]
    assert [part.salt for part in stored(mm_keys=[None, [{"hash": "x"}]])] == ["", ""]
    assert len(stored(mm_keys=[None, [{"hash": "x"}]])) == 2
    assert stored(mm_keys=["x"])[0].extra  # which block is not known: all of them


def test_digests_of_embeddings_are_extras() -> None:
    assert stored(extra_keys=[[b"digest"], None])[0].extra
    assert stored(parent_block_hash=9, extra_keys=[["x"], None])[0].extra


def test_groups_without_full_attention_are_left_out() -> None:
    for kind in ("sliding_window", "mamba", "chunked_local_attention", "sliding_window_mla", "cross_attention"):
        assert stored(group_idx=1, kv_cache_spec_kind=kind) == []
    for kind in ("full_attention", "mla_attention", "sink_full_attention"):
        assert stored(group_idx=1, kv_cache_spec_kind=kind) == [TWO._replace(group=1, full=True)]
    assert stored(group_idx=1, kv_cache_spec_kind="unknown") == [TWO._replace(group=1)]


def test_blocks_of_another_server_are_left_out() -> None:
    assert stored(locality="REMOTE") == []
    assert batch({"type": "BlockRemoved", "block_hashes": [1], "locality": "REMOTE"}).events == ()


def test_a_placeholder_has_hashes_alone() -> None:
    assert stored(token_ids=[], block_size=0, medium="CPU") == [TWO._replace(tokens=[], block_size=0, tier="host")]


def test_offloaded_blocks_whose_salt_is_not_known_have_no_tokens() -> None:
    assert stored(medium="CPU", group_idx=0)[0].tokens == []
    assert stored(medium="CPU", group_idx=0, parent_block_hash=7)[0].tokens
    assert stored(medium="CPU", group_idx=0, extra_keys=[["s"], None])[0].tokens
    assert stored(medium="CPU_PINNED")[0].tokens  # of SGLang, which names the salt if there is one


def test_eagle_pairs_stand_for_their_first_tokens() -> None:
    assert stored(token_ids=[[1, 2], [2, 3], [3, 4], [4, 5]])[0].tokens == [1, 2, 3, 4]


def test_token_ids_may_be_texts() -> None:
    assert stored(token_ids=[1, "2", "3", 4])[0].tokens == [1, 2, 3, 4]
    assert stored(token_ids=[1, "2", "x", 4])[0].tokens == []
    assert stored(token_ids=[1.5, 2, 3, 4])[0].tokens == []


def test_removals_one_by_one_become_one() -> None:
    items = [["BlockRemoved", [number], "GPU"] for number in range(5)]
    assert batch(*items).events == (Removed([0, 1, 2, 3, 4], "device"),)
    assert len(batch(items[0], ["BlockRemoved", [1], "CPU"], items[2]).events) == 3


def test_pages_one_by_one_become_one() -> None:
    pages = [["BlockStored", [number + 1], number, [number], 1, None, "GPU"] for number in range(1, 6)]
    assert batch(*pages).events == (Stored([2, 3, 4, 5, 6], 1, [1, 2, 3, 4, 5], 1, "device", "", ""),)
    first = ["BlockStored", [1], None, [0], 1, None, "GPU"]
    assert [event.parent for event in batch(first, *pages).events if isinstance(event, Stored)] == [None, 1]
    assert len(batch(pages[0], pages[2]).events) == 2


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        b"\xdd\xff\xff\xff\xff",  # a list of four billion entries, of which none is there
        b"\x91" * 100_000,
        b"\x81\x80\x01",
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode("text"),
        msgspec.msgpack.encode([1, {"type": "BlockStored"}]),
        msgspec.msgpack.encode([1, [5]]),
        msgspec.msgpack.encode([1, [[]]]),
        msgspec.msgpack.encode([1, [["BlockStored"]]]),
        msgspec.msgpack.encode([1, [["BlockStored", [1.5], None, [1], 1]]]),
        msgspec.msgpack.encode([1, [["BlockStored", [[1]], None, [1], 1]]]),
        msgspec.msgpack.encode([1, [["BlockStored", [True], None, [1], 1]]]),
        msgspec.msgpack.encode([1, [["BlockStored", [b"x" * 65], None, [1], 1]]]),
        msgspec.msgpack.encode([1, [["BlockStored", [1], "x", [1], 1]]]),
        msgspec.msgpack.encode([1, [["BlockStored", [1], None, "text", 1]]]),
        msgspec.msgpack.encode([1, [["BlockStored", [1], None, [1], -1]]]),
        msgspec.msgpack.encode([1, [["BlockStored", [1], None, [1], None]]]),
        msgspec.msgpack.encode([1, [["BlockRemoved", 7]]]),
        msgspec.msgpack.encode([1, [{"type": "BlockStored", "block_hashes": [1], "block_size": 1, "lora_name": 7}]]),
        msgspec.msgpack.encode(
            [1, [{"type": "BlockStored", "block_hashes": [1], "block_size": 1, "cache_salt": "s" * 2000}]]
        ),
    ],
)
def test_other_bytes_are_refused(payload: bytes) -> None:
    with pytest.raises(EventError, match="KV events"):
        decode(payload)


def test_large_payloads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_PAYLOAD_BYTES", 100)
    with pytest.raises(EventError, match="101 bytes"):
        decode(b"x" * 101)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(
    st.lists(ANY, max_size=13) | st.dictionaries(st.text(), ANY), st.sampled_from(["BlockStored", "BlockRemoved"]), ANY
)
def test_whatever_an_event_holds_nothing_else_is_raised(fields: Any, kind: str, around: Any) -> None:
    names = [*events._STORED_FIELDS, "cache_salt", "mm_keys", "locality"]
    full = {"type": kind, **dict(zip(names, fields, strict=False))} if isinstance(fields, list) else fields
    item = [kind, *fields] if isinstance(fields, list) else {"type": kind, **fields}
    for value in ([1, [item]], [1, [full]], around, [around, around, around]):
        try:
            decode(msgspec.msgpack.encode(value))
        except EventError:
            continue


@given(st.binary(max_size=200))
def test_whatever_the_bytes_are_nothing_else_is_raised(payload: bytes) -> None:
    try:
        decode(payload)
    except EventError:
        return

"""Residency against a slow twin: a table of what was announced, searched block by block for every prompt."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import TIER_CODES, BlockEvents, Namespace, chain_digests, split_digests
from engine.publish import ResidencyTable
from gateway.index.memory_index import MemoryIndex
from gateway.replicas.events import decode
from gateway.replicas.residency import Residency

UNIT = 16
SPACE = Namespace(weights="m@1", dtype="", kv_dtype="", block_size=UNIT)
MEDIA = {"device": "GPU", "host": "CPU_PINNED", "disk": "STORAGE"}
TIERS = list(TIER_CODES)

Block = tuple[str, tuple[tuple[int, ...], ...]]  # salt, and the tokens of every block up to this one


class Twin:
    """What a server announced. A block is held as often as it was stored and not removed."""

    def __init__(self, *, positional: bool, as_bytes: bool) -> None:
        self.positional = positional
        self.as_bytes = as_bytes
        self.held: dict[Block, dict[str, int]] = {}
        self.every: set[Block] = set()
        self.shared: set[bytes] = set()  # digests that were in several blocks: their tier is that of any one

    def key(self, block: Block) -> int | bytes:
        digest = hashlib.sha256(repr(block).encode()).digest()
        return digest if self.as_bytes else int.from_bytes(digest[:8], "big", signed=True)

    def payload(self, *events: list[Any]) -> bytes:
        """Fields in their order behind the type; None at the end of an array is left out, as omit_defaults does."""
        names = {
            "BlockStored": "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys",
            "BlockRemoved": "block_hashes medium group_idx",
            "AllBlocksCleared": "",
        }
        if self.positional:
            return msgspec.msgpack.encode([1.5, events, 0])
        maps = [{"type": kind, **dict(zip(names[kind].split(), values, strict=False))} for kind, *values in events]
        return msgspec.msgpack.encode([1.5, maps, 0])

    def store(self, salt: str, blocks: tuple[tuple[int, ...], ...], start: int, tier: str) -> bytes:
        """Blocks from `start` on, which have one size."""
        chain = [(salt, blocks[: index + 1]) for index in range(len(blocks))]
        for block in chain[start:]:
            counts = self.held.setdefault(block, dict.fromkeys(TIERS, 0))
            counts[tier] = counts[tier] + 1 if tier == "device" and start else max(counts[tier], 1)
        self.every.update(chain)
        extra = [[salt] if salt and not index else None for index in range(start, len(blocks))]
        return self.payload(
            [
                "BlockStored",
                [self.key(block) for block in chain[start:]],
                self.key(chain[start - 1]) if start else None,
                [token for block in blocks[start:] for token in block],
                len(blocks[-1]),
                None,
                MEDIA[tier],
                None,
                extra,
            ]
        )

    def remove(self, blocks: list[Block], tier: str) -> bytes:
        for block in blocks:
            if block in self.held:
                counts = self.held[block]
                counts[tier] = max(0, counts[tier] - 1)
                if not any(counts.values()):
                    del self.held[block]
        return self.payload(["BlockRemoved", [self.key(block) for block in blocks], MEDIA[tier]])

    def clear(self) -> bytes:
        self.held.clear()
        return self.payload(["AllBlocksCleared"])

    def reachable(self) -> set[Block]:
        return {
            block for block in self.held if all((block[0], block[1][:i]) in self.held for i in range(1, len(block[1])))
        }

    def digests(self) -> dict[bytes, str]:
        """What has to be in the index, with the tier of the block in which it ends."""
        found: dict[bytes, str] = {}
        for salt, blocks in self.reachable():
            tokens = [token for block in blocks for token in block]
            before = len(tokens) - len(blocks[-1])
            fastest = next(tier for tier in TIERS if self.held[salt, blocks][tier])
            for digest in chain(salt, tokens)[before // UNIT :]:
                if digest in found:
                    self.shared.add(digest)
                found[digest] = fastest
        return found

    def longest(self, salt: str, prompt: list[int]) -> int:
        """Leading units of a prompt that are held; a server reuses those that fill whole blocks of its own."""
        best = 0
        for own_salt, blocks in self.reachable():
            tokens = [token for block in blocks for token in block]
            equal = next(
                (i for i, (one, two) in enumerate(zip(tokens, prompt, strict=False)) if one != two), len(tokens)
            )
            if own_salt == salt:
                best = max(best, min(equal, len(prompt)) // UNIT)
        return best


def chain(salt: str, tokens: list[int]) -> list[bytes]:
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    return split_digests(chain_digests(replace(SPACE, salt=salt).root(), packed, UNIT))


class Checked:
    """A residency and what reads its events, which must find closed prefixes after each single one."""

    def __init__(self, max_blocks: int = 1 << 20) -> None:
        self.residency = Residency(SPACE, max_blocks)
        self.memory = MemoryIndex()
        self.table = ResidencyTable()
        self.parents: dict[bytes, bytes | None] = {}

    def feed(self, payload: bytes, blocks: set[Block]) -> None:
        for salt, parts in blocks:
            digests = chain(salt, [token for block in parts for token in block])
            self.parents.update(zip(digests, [None, *digests], strict=False))
        for changes in self.residency.apply(decode(payload)):
            self.take(changes)

    def take(self, changes: BlockEvents) -> None:
        stored, removed = split_digests(changes.stored), split_digests(changes.removed)
        assert len(set(removed)) == len(removed)
        for index, digest in enumerate(stored):
            parent = self.parents[digest]
            assert parent is None or parent in self.table or parent in stored[:index], "a child before its parent"
        assert not [digest for digest in removed if digest not in self.table], "what was not there is removed"
        for index, digest in enumerate(removed):
            assert self.parents[digest] not in removed[:index], "a parent before its child"
        self.memory.apply("r", changes)
        self.table.apply(changes)
        assert all(parent is None or parent in self.table for parent in map(self.parents.get, self.table)), "a gap"
        places = {digest: place for place, digest in enumerate(self.table)}
        assert all(
            places[parent] < place for digest, place in places.items() if (parent := self.parents[digest]) is not None
        ), "a parent behind its child in the table that is written to Redis"


def compare(twin: Twin, checked: Checked) -> None:
    wanted = twin.digests()
    assert set(checked.table) == set(wanted)
    assert checked.residency.blocks == len(wanted)
    for digest, tier in wanted.items():
        assert digest in twin.shared or checked.table.tier(digest) == tier
    for salt, blocks in twin.every:
        prompt = [token for block in blocks for token in block] + [9] * 3
        packed = b"".join(chain(salt, prompt))
        assert checked.memory.prefix("r", packed) == twin.longest(salt, prompt)
    apart = set(twin.held) - twin.reachable()
    assert checked.residency.orphans == sum(max(1, len(blocks[-1]) // UNIT) for _, blocks in apart)


SIZES = (1, 4, 8, 16, 24, 32, 48, 128)


def run(data: st.DataObject, *, mixed: bool) -> None:
    twin = Twin(positional=data.draw(st.booleans()), as_bytes=data.draw(st.booleans()))
    checked = Checked()
    size = data.draw(st.sampled_from(SIZES))
    for _ in range(data.draw(st.integers(1, 25))):
        act = data.draw(
            st.sampled_from(["store", "store", "store", "missed", "again", "remove", "remove", "all", "move"])
        )
        known = sorted(twin.every)
        payload = b""
        if act in ("store", "missed", "again"):
            salt, blocks = "", ()
            if known and data.draw(st.integers(0, 3)):
                salt, blocks = data.draw(st.sampled_from(known))
                if act != "again":
                    blocks = blocks[: data.draw(st.integers(0, len(blocks)))]
            elif data.draw(st.booleans()):
                salt = data.draw(st.sampled_from("ab"))
            step = data.draw(st.sampled_from(SIZES)) if mixed else size
            old = len(blocks)
            if act != "again" or not blocks:
                more = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=max(1, 96 // step)))
                blocks += tuple((filling,) * step for filling in more)
            start = len(blocks) - 1
            while start and len(blocks[start - 1]) == len(blocks[-1]):
                start -= 1  # of one size, as in one event
            if start < old and data.draw(st.booleans()):
                start = data.draw(st.integers(start, min(old, len(blocks) - 1)))
            before = {block: dict(counts) for block, counts in twin.held.items()}
            payload = twin.store(salt, blocks, start, data.draw(st.sampled_from(TIERS[:2] + TIERS)))
            if act == "missed":  # the subscriber came later, or lost it
                twin.held = before
                continue
        elif act == "all" and data.draw(st.integers(0, 4)) == 0:
            payload = twin.clear()
        elif known:
            picked = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=6))
            if data.draw(st.booleans()):  # the end of a chain, last block first or in order
                salt, blocks = picked[0]
                picked = [(salt, blocks[: index + 1]) for index in range(len(blocks))][-data.draw(st.integers(1, 9)) :]
                picked = picked[::-1] if data.draw(st.booleans()) else picked
            tier = data.draw(st.sampled_from(TIERS))
            if act == "move":
                for salt, blocks in picked:
                    if (salt, blocks) in twin.held:
                        checked.feed(twin.store(salt, blocks, len(blocks) - 1, "host"), twin.every)
            payload = twin.remove(picked, tier)
        if payload:
            checked.feed(payload, twin.every)
            compare(twin, checked)
    everything = sorted(twin.held)
    for tier in TIERS:
        while rest := [block for block in everything if block in twin.held and twin.held[block][tier]]:
            checked.feed(twin.remove(rest, tier), twin.every)
    compare(twin, checked)
    assert not checked.residency.blocks
    assert not checked.residency.orphans
    assert not checked.residency._runs
    assert not checked.residency._waiting
    assert not checked.residency._again


@settings(max_examples=60)
@given(st.data())
def test_an_index_finds_what_a_table_of_all_events_finds(data: st.DataObject) -> None:
    run(data, mixed=False)


@settings(max_examples=60)
@given(st.data())
def test_chains_of_blocks_of_several_sizes_are_found(data: st.DataObject) -> None:
    run(data, mixed=True)


@settings(max_examples=40)
@given(st.data())
def test_a_small_table_holds_a_part_of_it_with_closed_prefixes(data: st.DataObject) -> None:
    twin, limit = Twin(positional=False, as_bytes=False), data.draw(st.integers(8, 60))
    checked = Checked(limit)
    for _ in range(data.draw(st.integers(1, 30))):
        known = sorted(twin.every)
        salt, blocks = data.draw(st.sampled_from(known)) if known and data.draw(st.booleans()) else ("", ())
        blocks += tuple((data.draw(st.integers(0, 3)),) * UNIT for _ in range(data.draw(st.integers(1, 6))))
        start = data.draw(st.integers(0, len(blocks) - 1))
        payload = twin.store(salt, blocks, start, data.draw(st.sampled_from(TIERS)))
        checked.feed(payload, twin.every)
        if data.draw(st.integers(0, 3)) == 0:
            picked = data.draw(st.lists(st.sampled_from(sorted(twin.every)), min_size=1, max_size=4))
            checked.feed(twin.remove(picked, data.draw(st.sampled_from(TIERS))), twin.every)
        residency = checked.residency
        assert residency.blocks + residency.orphans == residency._held <= limit
        assert residency.orphans <= limit // 4
        assert set(checked.table) <= {digest for salt, parts in twin.every for digest in chain(salt, sum(parts, ()))}
    checked.take(checked.residency.clear())
    assert not len(checked.table)


@pytest.mark.slow
@settings(max_examples=800)
@given(st.data())
def test_many_more_sequences_of_events(data: st.DataObject) -> None:
    run(data, mixed=data.draw(st.booleans()))

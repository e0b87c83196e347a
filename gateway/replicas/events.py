"""KV events of vLLM, SGLang and TensorRT-LLM: one payload of their event stream as values. Pure.

A payload is MessagePack: [time, events, rank]. An event is a map, {"type": "BlockStored", "block_hashes": ...}, or in
vLLM before 0.24 and SGLang before 0.5.20 an array, ["BlockStored", block_hashes, ...], whose end may be missing. Keys,
types and fields at the end of an array that are not known here are skipped: nearly every release adds some.

Its neighbours are stream.py, which receives payloads, and residency.py, which learns from the values what can be hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from engine.protocol import Tier

MAX_PAYLOAD_BYTES: Final = 32 << 20
"""A batch of a million tokens in pages of one token has 15 MB."""

MAX_HASH_BYTES: Final = 64
MAX_TEXT_CHARS: Final = 1024  # of a salt, 128 in vLLM and SGLang, and of an adapter's name

Key = int | bytes
"""A server's own name of a block: a hash over everything before it. Opaque, and another one on every server."""


class EventError(ValueError):
    """A payload that is no batch of KV events, or larger than MAX_PAYLOAD_BYTES."""


class Stored(NamedTuple):
    """Blocks that follow one another and can be hit from now on."""

    hashes: Sequence[Key]  # never empty
    parent: Key | None  # block before the first one; None: the first one begins a prompt
    tokens: list[int]  # of all of them; where there are not block_size for each, they cannot be told apart
    block_size: int
    tier: Tier
    salt: str  # of the chain; only known where it begins
    adapter: str  # empty without one; only known for certain where the chain begins
    group: int | None = None  # of layers with one cache; None: the event names none
    full: bool = False  # the event says that this group has full attention
    extra: str = ""  # what else the first block stands for, as images; equal prompts have equal ones


class Removed(NamedTuple):
    """Blocks of which one tier holds one copy less."""

    hashes: Sequence[Key]
    tier: Tier
    group: int | None = None


class Cleared(NamedTuple):
    """Nothing is held any more."""


class EventBatch(NamedTuple):
    """What happened in one step of the server, in order. Events of one block each are joined where that is the same."""

    events: tuple[Stored | Removed | Cleared, ...]
    rank: int | None  # data-parallel; None: the payload has none


_STORED_FIELDS: Final = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"),
    *("group_idx", "kv_cache_spec_kind"),
)
_REMOVED_FIELDS: Final = ("block_hashes", "medium", "group_idx")
"""Of events that are arrays, behind the type."""

_TIERS: Final[dict[str, Tier]] = {"gpu": "device", "cpu": "host", "cpu_pinned": "host", "host": "host"}
"""Any other medium (DISK, STORAGE, EXTERNAL, ...) is slower than these."""

_FULL_ATTENTION: Final = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_UNKNOWN_KINDS: Final = frozenset({None, "", "unknown"})

_decoder: Final = msgspec.msgpack.Decoder()


def decode(payload: bytes) -> EventBatch:
    """The batch in one payload. What concerns groups without full attention and other servers is left out.

    Raises EventError.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise EventError(f"KV events: a payload of {len(payload)} bytes, more than {MAX_PAYLOAD_BYTES}")
    try:
        batch = _decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise EventError(f"KV events: not MessagePack: {str(error)[:200]}") from error
    if type(batch) is dict:  # in one commit of vLLM
        events, rank = batch.get("events"), batch.get("data_parallel_rank", batch.get("attn_dp_rank"))
    elif type(batch) is list and len(batch) >= 2:
        events, rank = batch[1], batch[2] if len(batch) > 2 else None
    else:
        raise EventError("KV events: a batch has to be [time, events, rank]")
    if type(events) is not list:
        raise EventError("KV events: the events of a batch have to be a list")
    read: list[Stored | Removed | Cleared] = []
    for event in events:
        _read(event, read)
    return EventBatch(tuple(read), rank if type(rank) is int else None)


def _read(event: Any, read: list[Stored | Removed | Cleared]) -> None:
    """Adds what an event says to those before it."""
    if type(event) is dict:
        kind, fields = event.get("type"), event
    elif type(event) is list and event:
        kind = event[0]
        names = _STORED_FIELDS if kind == "BlockStored" else _REMOVED_FIELDS
        fields = dict(zip(names, event[1:], strict=False))
    else:
        raise EventError("KV events: an event has to be a map, or an array that begins with its type")
    if kind == "AllBlocksCleared":
        read.append(Cleared())
    elif kind not in ("BlockStored", "BlockRemoved") or fields.get("locality") == "REMOTE":
        return  # of a type that came later, or of blocks that another server holds
    elif kind == "BlockStored":
        _read_stored(fields, read)
    elif hashes := _hashes(fields):
        tier, group, last = _tier(fields), _group(fields), read[-1] if read else None
        if type(last) is Removed and type(last.hashes) is list and last.tier == tier and last.group == group:
            last.hashes.extend(hashes)  # vLLM removes blocks one by one
        else:
            read.append(Removed(hashes, tier, group))


def _read_stored(fields: dict[str, Any], read: list[Stored | Removed | Cleared]) -> None:
    hashes, kind = _hashes(fields), fields.get("kv_cache_spec_kind")
    if not hashes or (kind not in _UNKNOWN_KINDS and kind not in _FULL_ATTENTION):
        return  # the other groups of a hybrid model: a hit of full attention is an upper bound for theirs
    parent, size, tier, group = fields.get("parent_block_hash"), fields.get("block_size"), _tier(fields), _group(fields)
    if parent is not None:
        _check((parent,), "parent_block_hash")
    if type(size) is not int or size < 0:
        raise EventError("KV events: block_size has to be a whole number from 0")
    tokens = _tokens(fields.get("token_ids"))
    if parent is None and tier != "device" and group is not None and not fields.get("extra_keys"):
        tokens = []  # vLLM's offloading leaves extra_keys out: whether this chain has a salt is not known
    adapter = _text(fields.get("lora_name"))
    salt, extras = _extras(fields, len(hashes), adapter)
    if not adapter and type(fields.get("lora_id")) is int:
        adapter = f"lora_id {fields['lora_id']}"  # an adapter of which no more is known
    stored = Stored(hashes, parent, tokens, size, tier, salt, adapter, group, kind in _FULL_ATTENTION)
    if extras:
        read += _split(stored, extras)
    elif not (read and type(read[-1]) is Stored and _joined(read[-1], stored)):
        read.append(stored)


def _joined(last: Stored, stored: Stored) -> bool:
    """Adds blocks to the event before, if it is one chain: SGLang before 0.5.21 announces pages one by one."""
    if (
        last.parent is None  # what begins a prompt may be a re-announcement, which counts differently
        or last.hashes[-1] != stored.parent
        or last[3:] != stored[3:]
        or len(last.tokens) != len(last.hashes) * last.block_size
        or type(last.hashes) is not list
        or type(stored.hashes) is not list
    ):
        return False
    last.hashes.extend(stored.hashes)
    last.tokens.extend(stored.tokens)
    return True


def _split(stored: Stored, extras: dict[int, list[Any]]) -> list[Stored]:
    """One event for each block that stands for more than its tokens, and what follows it."""
    hashes, size, parts = stored.hashes, stored.block_size, []
    usable = len(stored.tokens) == len(hashes) * size
    starts = sorted({0, *extras})
    for start, end in zip(starts, [*starts[1:], len(hashes)], strict=True):
        above = hashes[start - 1] if start else stored.parent
        tokens = stored.tokens[start * size : end * size] if usable else []
        extra = repr(extras[start])[:MAX_TEXT_CHARS] if start in extras else ""
        parts.append(stored._replace(hashes=hashes[start:end], parent=above, tokens=tokens, extra=extra))
    return parts


def _extras(fields: dict[str, Any], num_blocks: int, adapter: str) -> tuple[str, dict[int, list[Any]]]:
    """The salt, and by position of the block what else is in its hash."""
    salt, extras = _text(fields.get("cache_salt")), dict[int, list[Any]]()
    for index, keys in _per_block(fields.get("extra_keys"), num_blocks):
        found, rest = _salt_of(keys, adapter)
        if index == 0 and fields.get("parent_block_hash") is None:
            salt = found or salt
        elif found:
            rest.append(found)
        if rest:
            extras[index] = rest
    for index, keys in _per_block(fields.get("mm_keys"), num_blocks):  # TensorRT-LLM
        extras[index] = extras.get(index, []) + keys
    return salt, extras


def _salt_of(keys: list[Any], adapter: str) -> tuple[str, list[Any]]:
    """The salt in the extra keys of a chain's first block, and what is neither a salt nor the adapter.

    vLLM writes, without saying which is which: the adapter's name, [media id, offset] pairs (before 0.20 ids alone),
    the salt, digests of prompt embeddings. A text that is alone is taken for a salt: a media id taken for one makes a
    chain that no request asks for.
    """
    rest = list(keys)
    if adapter and rest and rest[0] == adapter:
        del rest[0]
    texts = [index for index, key in enumerate(rest) if type(key) is str]
    return (_text(rest.pop(texts[-1])), rest) if texts else ("", rest)


def _per_block(keys: Any, num_blocks: int) -> list[tuple[int, list[Any]]]:
    """Blocks that have keys, by position; what cannot be assigned to blocks belongs to the first one."""
    if not keys:
        return []
    if type(keys) is list and len(keys) == num_blocks and all(key is None or type(key) is list for key in keys):
        return [(index, key) for index, key in enumerate(keys) if key]
    return [(0, [keys])]


def _hashes(fields: dict[str, Any]) -> list[Key]:
    hashes = fields.get("block_hashes")
    if type(hashes) is not list:
        raise EventError("KV events: block_hashes has to be a list")
    _check(hashes, "block_hashes")
    return hashes


def _check(hashes: Any, name: str) -> None:
    kinds = set(map(type, hashes))
    if kinds - {int, bytes}:
        raise EventError(f"KV events: {name} has to be whole numbers or bytes")
    if bytes in kinds and any(type(one) is bytes and len(one) > MAX_HASH_BYTES for one in hashes):
        raise EventError(f"KV events: {name} has more than {MAX_HASH_BYTES} bytes")


def _tokens(tokens: Any) -> list[int]:
    """Token ids; of SGLang's EAGLE, which announces pairs of a token and the next one, the first of each. Empty where
    one is no token id."""
    if tokens is None:
        return []
    if type(tokens) is not list:
        raise EventError("KV events: token_ids has to be a list")
    kinds = set(map(type, tokens))
    if kinds <= {int}:
        return tokens
    if kinds <= {list} and all(tokens):
        return _tokens([pair[0] for pair in tokens])
    if kinds <= {int, str} and all(type(one) is int or (one.isascii() and one.isdigit()) for one in tokens):
        return [int(one) if len(str(one)) <= 10 else -1 for one in tokens]  # TensorRT-LLM
    return []


def _tier(fields: dict[str, Any]) -> Tier:
    medium = fields.get("medium")
    return _TIERS.get(medium.lower(), "disk") if type(medium) is str and medium else "device"


def _group(fields: dict[str, Any]) -> int | None:
    group = fields.get("group_idx")
    return group if type(group) is int else None


def _text(text: Any) -> str:
    if text is None:
        return ""
    if type(text) is not str or len(text) > MAX_TEXT_CHARS:
        raise EventError(f"KV events: a salt or an adapter has to be a text of {MAX_TEXT_CHARS} characters at most")
    return text

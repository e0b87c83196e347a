"""In which order lines run: along their prompts' prefixes, depth first, across all jobs of a tenant. Pure.

    place = path | job | line | tokens

A path is the beginning of the chain digests at a ladder of depths. A digest stands for the prompt up to its block, so
lines with the same first entries share that prefix, and are neighbours in byte order. A collision of entries costs a
worse order and nothing else.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from engine.protocol import DIGEST_BYTES

ENTRY_BYTES: Final = 3
MAX_ENTRIES: Final = 40
GROWTH: Final = 1.25
"""Prompts that part between two depths may be mixed there: a quarter of what they share, at most, is computed again."""

MAX_TOKENS: Final = 0xFFFFFFFF
_REF: Final = struct.Struct(">16sI")
_TOKENS: Final = struct.Struct(">I")


def _ladder() -> list[int]:
    depths = [1]
    while len(depths) < MAX_ENTRIES:
        depths.append(max(depths[-1] + 1, round(depths[-1] * GROWTH)))
    return depths


LADDER: Final = _ladder()
"""Depths in blocks; the last is beyond 10,000 tokens whatever their size."""


class Ref(NamedTuple):
    """A line: which of which job, from 0."""

    job: str
    line: int


def path_of(digests: bytes) -> bytes:
    """At most MAX_ENTRIES * ENTRY_BYTES bytes; empty for a prompt without a full block."""
    starts = (DIGEST_BYTES * (depth - 1) for depth in LADDER if DIGEST_BYTES * depth <= len(digests))
    return b"".join(digests[start : start + ENTRY_BYTES] for start in starts)


def ref_bytes(ref: Ref) -> bytes:
    """20 bytes."""
    return _REF.pack(bytes.fromhex(ref.job), ref.line)


def ref_of(written: bytes) -> Ref:
    """Of `ref_bytes`."""
    job, line = _REF.unpack(written)
    return Ref(job.hex(), line)


def place_of(path: bytes, ref: Ref, tokens: int) -> bytes:
    """Where a line stands among those that wait."""
    return path + ref_bytes(ref) + _TOKENS.pack(min(tokens, MAX_TOKENS))


def ref_at(place: bytes) -> Ref:
    """The line of a place."""
    return ref_of(place[-_REF.size - _TOKENS.size : -_TOKENS.size])


def tokens_at(place: bytes) -> int:
    """What its line is expected to cost."""
    tokens: int = _TOKENS.unpack(place[-_TOKENS.size :])[0]
    return tokens

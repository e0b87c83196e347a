"""The bytes between an engine and the processes of its grammars: frames of a kind, a length and a body.

    engine -> worker   COMPILE  JSON of a grammar          answered by COMPILED or REFUSED
                       MASKS    rows: id, count, tokens    each row answered in a MASKS frame, in order
                       DROP     ids
    worker -> engine   COMPILED bytes that it takes up, the mask of the start
                       REFUSED  JSON of path and reason
                       MASKS    bytes that it takes up; rows: id, microseconds, whether it is alive, mask

    engine -> fork server   SPAWN id, with the worker's socket; KILL id
    fork server -> engine   READY; FAILED and a reason; EXITED id, signal or exit status

A mask is one bit for each token id, the lowest first. Values only; engine/sampling/grammar_server.py and
grammar_worker.py are the two ends.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Final

COMPILE, MASKS, DROP, COMPILED, REFUSED = range(1, 6)

HEADER: Final = struct.Struct("<BI")  # kind, bytes of the body
NUMBER: Final = struct.Struct("<I")
ROW_ASKED: Final = struct.Struct("<II")  # id, number of tokens that follow
ROW: Final = struct.Struct("<IIB")  # id, microseconds, whether anything may come; then the mask

SPAWN, KILL, READY, FAILED, EXITED = range(1, 6)
CONTROL: Final = struct.Struct("<BIi")  # kind, id or length of the reason, signal (above 0) or exit status (below 1)


@dataclass(frozen=True)
class Options:
    """What the fork server is told on its command line."""

    control_fd: int
    tokenizer_fd: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    compile_s: float  # processor seconds that a grammar may take to compile
    mask_s: float  # the same for one mask
    memory_bytes: int  # that one worker may take up beside what it shares
    stack_bytes: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def memory_reason(memory_bytes: int) -> str:
    return f"it needs more than {memory_bytes >> 20} MiB of memory"


def frame(kind: int, body: bytes | bytearray) -> bytes:
    return HEADER.pack(kind, len(body)) + body


class FrameReader:
    """Frames out of bytes that are cut anywhere."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """The frames that are complete now: kind and body."""
        buffer = self._buffer
        buffer += data
        while len(buffer) >= HEADER.size:
            kind, length = HEADER.unpack_from(buffer)
            end = HEADER.size + length
            if len(buffer) < end:
                return
            body = bytes(buffer[HEADER.size : end])
            del buffer[:end]
            yield kind, body

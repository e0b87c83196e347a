"""What an engine and the processes of its grammars say to each other: messages of multiprocessing.connection.

    worker -> engine   empty: it has begun
    engine -> worker   JSON of a grammar
    worker -> engine   REFUSED, JSON of path and reason; or COMPILED, bytes that it takes up, the mask of the start
    engine -> worker   rows: id, count, tokens; a row of FORGET ends an id instead
    worker -> engine   bytes that it takes up; rows: id, microseconds, whether it is alive, mask; often in parts

    engine -> fork server   SPAWN id, with the worker's socket; KILL id
    fork server -> engine   READY; FAILED and a reason; EXITED id, signal or exit status

An engine sends rows when all before them are answered: then the worker reads, so neither end ever waits for the other
to make room. A mask is one bit for each token id, the lowest first. Values only; engine/sampling/grammar_server.py and
grammar_worker.py are the two ends.
"""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Final

COMPILED: Final = b"c"
REFUSED: Final = b"r"
FORGET: Final = 2**32 - 1

NUMBER: Final = struct.Struct("<I")
ROW_ASKED: Final = struct.Struct("<II")  # id, number of tokens that follow
ROW: Final = struct.Struct("<IIB")  # id, microseconds, whether anything may come; then the mask

SPAWN, KILL, READY, FAILED, EXITED = range(1, 6)
CONTROL: Final = struct.Struct("<BIi")  # kind, id or length of the reason, signal (above 0) or exit status (below 1)

_STUCK_S: Final = 5
"""In the middle of a message; longer, and the other end is taken to be gone."""


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


def connect(sock: socket.socket) -> Connection:
    """The engine's end: a process that is stopped in the middle of a message raises OSError there."""
    for limit in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, limit, struct.pack("@ll", _STUCK_S, 0))
    return Connection(sock.detach())

"""Answers of upstreams as bytes, in the pieces that they came in, and what is known of them besides. Pure.

    {"form": ..., "type": ..., "label": ..., "tokens": ..., "ms": ..., "sizes": ...} LF pieces

No answer of recording.py can be read as one of these: its JSON has other names, and no line ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import orjson


class Form(NamedTuple):
    """What a client wants: a stream or not, and a stream with or without its usage."""

    stream: bool
    usage: bool


class Kept(NamedTuple):
    """An answer as it was kept.

    type    its Content-Type
    label   of its model, for metrics
    tokens  of its prompt, and of itself
    ms      that it took
    """

    form: Form
    type: str
    label: str
    tokens: tuple[int, int]
    ms: float
    pieces: Sequence[bytes]


def write(kept: Kept) -> bytes:
    head = {
        "form": list(kept.form),
        "type": kept.type,
        "label": kept.label,
        "tokens": kept.tokens,
        "ms": round(kept.ms, 1),
        "sizes": [len(piece) for piece in kept.pieces],
    }
    return orjson.dumps(head) + b"\n" + b"".join(kept.pieces)


def find_kept(body: bytes) -> Kept | None:
    """None for what `write` did not write."""
    head, _, joined = body.partition(b"\n")
    try:
        read = orjson.loads(head)
        cuts = pairwise([0, *accumulate(read["sizes"])])
        pieces = [joined[start:end] for start, end in cuts]
        return Kept(Form(*read["form"]), read["type"], read["label"], tuple(read["tokens"]), read["ms"], pieces)
    except (ValueError, KeyError, TypeError):
        return None

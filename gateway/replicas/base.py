"""What the parts of a fleet share: what a server says of itself, and how far the index of its cache is trusted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from engine.protocol import BlockEvents
from engine.protocol.frozen import dataclass
from gateway.config import ReplicaKind

Kind = ReplicaKind

Trust = Literal["exact", "degraded", "fallback"]
"""exact: the index holds what the server's cache holds. degraded: it holds a part, because older events are lost.
fallback: the server publishes no events, or they cannot be followed; the index holds what this gateway sent there."""

OnBlocks = Callable[[str, BlockEvents | None], None]
"""Takes an incarnation and changes of its blocks; None: this gateway follows its events no more."""

BLOCK_TOKENS: Final = 16
"""Tokens of a block of the index, whatever the server's own block size is, if one divides the other."""


class EventSource(NamedTuple):
    """Where one data-parallel rank of a server publishes its KV events: ZMQ endpoints, tcp://host:port."""

    events: str
    replay: str | None = None  # None: what was missed cannot be asked for
    topic: str = ""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself. Numbers are 0, texts empty, where it does not say."""

    kind: Kind
    version: str
    models: tuple[str, ...]  # names that requests may use, the base model's first
    root: str  # folder or hub id of the weights
    context_tokens: int
    tokenizer: str = ""  # folder or hub id of its tokeniser, where it is another one than root
    lifetime: str = ""  # another one after every restart
    weight_version: str = ""  # another one after weights were updated in place
    ranks: int = 1  # data-parallel: independent caches
    sources: tuple[EventSource | None, ...] = ()  # of each rank; None: it publishes nothing
    no_events: str = ""  # why no rank has a source, where one was looked for
    num_blocks: int = 0  # of one rank, in blocks of the server
    block_size: int = 0  # tokens of a block of the server
    max_sequences: int = 0  # that run at the same time, of one rank
    features: frozenset[str] = frozenset()  # see servers.py

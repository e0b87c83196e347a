"""Reads traces of real requests that name their prompts' blocks, for the benchmarks that replay them without a model.

gzip JSON lines. The first one is {"meta": {"block": tokens per block, "partial_tail": bool, ...}}; every other one is a
request, by time: {"t": arrival second, "in": prompt tokens, "out": output tokens, "r": [[first id, count], ...]}, with
"s", its session, and "g", the seconds that its client waited after the answer before it, where the source knows them.
"r" is a run-length coding of chained block ids: two prompts share their first j blocks exactly when their first j ids
are equal. With partial_tail the last id may stand for a block that is not full. Sources of such traces: Mooncake's
conversation trace (Apache-2.0, github.com/kvcache-ai/Mooncake) and Claude Code sessions (Apache-2.0,
github.com/callanjfox/kv-cache-tester).
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `blocks` are numbers of full blocks, from 0 in the order of their first appearance."""

    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: list[int]
    session: str
    think_s: float = 0.0  # from the end of its session's last answer to this request; 0 where the source has none


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests by time, with prompts cut into blocks of block_tokens."""

    name: str
    block_tokens: int
    num_unique: int
    requests: list[Request]

    def part(self, first: float, last: float) -> Trace:
        """The requests between two fractions of their number; blocks keep their numbers."""
        count = len(self.requests)
        requests = self.requests[int(first * count) : int(last * count)]
        unique = len({block for request in requests for block in request.blocks})
        return Trace(f"{self.name} {first:.0%}-{last:.0%}", self.block_tokens, unique, requests)


def read_trace(path: Path, block_tokens: int = BLOCK_TOKENS) -> Trace:
    """Joins shorter blocks to such of block_tokens: chained ids, so the last one names them all. Raises ValueError
    for a file whose blocks do not fit into them."""
    numbers: dict[int, int] = {}
    requests: list[Request] = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        meta = json.loads(next(lines))["meta"]
        if block_tokens % meta["block"]:
            raise ValueError(f"{path}: blocks of {meta['block']} tokens do not fit into blocks of {block_tokens}")
        joined = block_tokens // meta["block"]
        for line in lines:
            item = json.loads(line)
            ids = [first + offset for first, count in item["r"] for offset in range(count)]
            if meta.get("partial_tail"):
                ids = ids[: item["in"] // meta["block"]]
            blocks = [numbers.setdefault(number, len(numbers)) for number in ids[joined - 1 :: joined]]
            think_s = float(item.get("g") or 0.0)
            requests.append(Request(item["t"], item["in"], item["out"], blocks, str(item.get("s", "")), think_s))
    return Trace(path.name.split(".")[0], block_tokens, len(numbers), requests)

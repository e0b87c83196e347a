"""How much of its machine an engine uses while it computes: model FLOPs and memory bandwidth, as shares of what the
machine was measured to do (engine/compute/peaks.py).

MFU   Model FLOPs Utilisation, appendix B of the PaLM paper (arXiv:2204.02311): the FLOPs that the model itself takes,
      over seconds times peak. A forward pass takes 2 for each parameter that a token meets, and 4 * layers * heads *
      head_dim for each key that it attends to (the paper's 6N + 12LHQT is for a forward and a backward pass). Here a
      token attends to the keys before it, within its layer's window, and to no padding; embeddings are looked up,
      and cost nothing; the output layer is asked for the rows that are sampled. Whatever else an implementation
      computes, or leaves out, makes no difference.
MBU   Model Bandwidth Utilisation, after Databricks' "LLM Inference Performance Engineering: Best Practices": the bytes
      of the parameters and of the keys and values that a step has to read, each once, over seconds times peak. Above
      1 where a small model stays in the processor's caches, which are quicker than memory, or where others kept the
      memory busy when it was measured.

Both are over the seconds in which steps were computed, scheduling included; an idle engine changes neither. No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.sequence import Step

RATE_MEMORY_S = 30.0
"""Seconds of computing after which a measurement counts a third."""


@dataclass(frozen=True, slots=True)
class Peak:
    """What the machine does at best, for one engine."""

    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Cost:
    """What steps of one model take.

    token_params  parameters that each token meets, besides embeddings and the output layer
    row_params    of the output layer
    weight_bytes  of what every step reads
    expert_bytes  of experts, of which each token meets `expert_share`
    row_bytes     of the output layer
    windows       layers that see so many tokens back; None: all
    pair_flops    of one layer, for a token and a key that it attends to
    kv_bytes      of one token, in one layer
    """

    token_params: float
    row_params: int
    weight_bytes: int
    row_bytes: int
    windows: dict[int | None, int]
    pair_flops: int
    kv_bytes: int
    expert_bytes: int = 0
    expert_share: float = 1.0

    def of(self, step: Step) -> tuple[float, float]:
        """FLOPs, and bytes to be read."""
        tokens = rows = pairs = keys = 0
        for item in step.work:
            start, count = item.start, item.num_rows
            tokens += count
            rows += item.samples * item.num_asked
            for window, layers in self.windows.items():
                pairs += layers * _pairs(start, count, window)
                keys += layers * (start + count if window is None else min(start + count, window + count - 1))
        if not tokens:
            return 0.0, 0.0
        met = 1.0 - (1.0 - self.expert_share) ** tokens  # of the experts, if each is as likely as the others
        flops = 2.0 * (tokens * self.token_params + rows * self.row_params) + pairs * self.pair_flops
        read = self.weight_bytes + met * self.expert_bytes + bool(rows) * self.row_bytes + keys * self.kv_bytes
        return flops, read


def _pairs(start: int, count: int, window: int | None) -> int:
    """Keys that the tokens from `start` on attend to, added up: one at position p to p + 1, or to its window."""
    end = start + count
    if window is None or end <= window:
        return count * (start + end + 1) // 2
    inside = max(0, window - start)  # tokens that see all before them
    return inside * (start + window + 1) // 2 + (count - inside) * window


class Utilisation:
    """Of one engine since its start. Written by the loop's thread."""

    def __init__(self, cost: Cost, peak: Peak) -> None:
        self._cost, self._peak = cost, peak
        self._peak_flops_per_s = peak.flops_per_s  # raised by a step that shows that others were busy at the start
        self._flops, self._read_bytes = Rate(), Rate()
        self.flops = self.read_bytes = 0.0

    def add(self, step: Step, seconds: float) -> None:
        """A step took so long."""
        flops, read_bytes = self._cost.of(step)
        self.flops += flops
        self.read_bytes += read_bytes
        if seconds > 0:
            self._peak_flops_per_s = max(self._peak_flops_per_s, flops / seconds)
        self._flops.add(flops, seconds)
        self._read_bytes.add(read_bytes, seconds)

    def stats(self) -> dict[str, float]:
        """Values for JSON."""
        return {
            "flops": self.flops,
            "read_bytes": self.read_bytes,
            "peak_flops_per_s": self._peak_flops_per_s,
            "peak_bytes_per_s": self._peak.bytes_per_s,
            "mfu": self._flops.per_s / self._peak_flops_per_s,
            "mbu": self._read_bytes.per_s / self._peak.bytes_per_s,
        }


class Rate:
    """An amount per second as a moving average; long steps weigh more than short ones."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        keep = math.exp(-seconds / RATE_MEMORY_S)
        self._amount = self._amount * keep + amount
        self._seconds = self._seconds * keep + seconds

    @property
    def per_s(self) -> float:
        """0 before anything was measured."""
        return self._amount / self._seconds if self._seconds > 0 else 0.0

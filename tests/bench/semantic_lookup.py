"""What a look-up by meaning costs: embedding a short question, neighbours, guard and budget.

    python -m tests.bench.semantic_lookup [--sizes 1000 10000 100000] [--lookups 200]

Questions are made of common words with a fixed seed, 20 wordpieces each, all in one situation. Their vectors are random
directions with a common part, so that neighbours are as near as those of one topic are; the one of the look-up is
computed. One thread. Milliseconds: median and 95th percentile, and the median of the processor's time, which is what
counts where others use the machine.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from gateway.config import SemanticCacheSettings
from gateway.responses.embedding.text_model import find_folder, load
from gateway.responses.semantic.entry import Entry, digest_of
from gateway.responses.semantic.space import Space
from gateway.types import EmbeddingInput

WORDS = re.findall(
    r"\w+",
    "how can we find the best way to move old files from one server into another folder without losing user names when "
    "disk space runs low and backup jobs fail during night because network cables break or power goes away again",
)
SCOPE = hashlib.sha256(b"one situation").digest()


def question(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(18))


def fill(space: Space, size: int, dimensions: int, rng: random.Random) -> None:
    numbers = np.random.default_rng(7)
    common = numbers.standard_normal(dimensions)
    while len(space) < size:
        vector = common + numbers.standard_normal(dimensions)
        vector /= np.linalg.norm(vector)
        text = question(rng)
        key = digest_of(f"{len(space)} {text}")
        entry = Entry(key, SCOPE, key, text, vector.astype("<f4").tobytes(), "yes", digest_of("yes"), 0.0, 1e12)
        space.remember(entry)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1000, 10_000, 100_000])
    parser.add_argument("--lookups", type=int, default=200)
    options = parser.parse_args()
    folder = find_folder(None)
    assert folder is not None, "the extra `semantic` is missing"
    model, rng = load(folder), random.Random(7)
    most = max(options.sizes)
    settings = SemanticCacheSettings(max_entries=most, max_scope_entries=most, max_bytes=1 << 40)
    space = Space(settings, random=rng.random, now=lambda: 0.0)
    for size in sorted(options.sizes):
        began = time.perf_counter()
        fill(space, size, model.dimensions, rng)
        filled_s = time.perf_counter() - began
        embedded, looked, processor = [], [], []
        for _ in range(options.lookups):
            text = question(rng)
            used, start = time.thread_time(), time.perf_counter()
            (vector,) = model.vectors([EmbeddingInput(model.tokens(text), model.dimensions)])
            middle = time.perf_counter()
            space.look(space.question(SCOPE, text, vector))
            embedded.append((middle - start) * 1e3)
            looked.append((time.perf_counter() - middle) * 1e3)
            processor.append((time.thread_time() - used) * 1e3)
        both = [one + other for one, other in zip(embedded, looked, strict=True)]
        cells = " | ".join(
            f"{name} {statistics.median(times):.2f} p95 {statistics.quantiles(times, n=20)[-1]:.2f}"
            for name, times in (("embedding", embedded), ("look", looked), ("both", both))
        )
        used_ms = statistics.median(processor)
        print(f"{size:7} entries | filled in {filled_s:.0f} s | {cells} | processor {used_ms:.2f}", flush=True)


if __name__ == "__main__":
    main()

"""What a look-up by meaning costs: embedding a short question, neighbours, guard and budget; and what adding costs.

    python -m tests.bench.semantic_lookup [--sizes 1000 10000 20000] [--lookups 200] [--vectors FILE]

Questions are made of common words with a fixed seed, 20 wordpieces each, all in one situation; the one of the look-up
is embedded. The vectors that it is compared with are sums of few directions and some noise, about as those of
sentences are; or those of FILE, which semantic_quality keeps, and sums of two of them. One thread. Milliseconds:
median and 95th percentile, and the median of the processor's time, which is what counts where others use the machine.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import numpy.typing as npt

from gateway.config import SemanticCacheSettings
from gateway.responses.embedding.text_model import TextModel, find_folder, load
from gateway.responses.semantic.questions import AnsweredQuestion, digest_of
from gateway.responses.semantic.space import Space
from gateway.types import EmbeddingInput
from tests.fakes.tuned import tuned

WORDS = re.findall(
    r"\w+",
    "how can we find the best way to move old files from one server into another folder without losing user names when "
    "disk space runs low and backup jobs fail during night because network cables break or power goes away again",
)
SIZES = (1000, 10_000, 20_000)
LOOKUPS = 200
MEANINGS, NOISE = 48, 1.5
"""Directions that vectors are sums of, and how much each differs from that in every dimension."""

SCOPE = hashlib.sha256(b"one situation").digest()


def question(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(18))


Floats = npt.NDArray[np.float32]


def made_up(size: int, dimensions: int) -> Floats:
    """(size, dimensions), of length 1."""
    numbers = np.random.default_rng(7)
    common, directions = numbers.standard_normal(dimensions), numbers.standard_normal((MEANINGS, dimensions))
    made = numbers.standard_normal((size, MEANINGS)).astype(np.float32) @ directions.astype(np.float32)
    made += (NOISE * numbers.standard_normal((size, dimensions)) + common).astype(np.float32)
    return made / np.linalg.norm(made, axis=1, keepdims=True)


def kept(file: Path, size: int) -> Floats:
    """The same, of what semantic_quality keeps."""
    numbers, found = np.random.default_rng(7), np.load(file, allow_pickle=False)["vectors"].astype(np.float32)
    numbers.shuffle(found)
    first, second = (found[numbers.integers(0, len(found), max(size - len(found), 0))] for _ in range(2))
    made = np.concatenate([found, first + 0.7 * second])[:size]
    return made / np.linalg.norm(made, axis=1, keepdims=True)


def fill(space: Space, vectors: Floats, rng: random.Random) -> list[float]:
    """Milliseconds of the processor for each that is added."""
    times = []
    for vector in vectors:
        text = question(rng)
        key = digest_of(f"{len(space)} {text}")
        entry = AnsweredQuestion(
            key, SCOPE, key, text, vector.astype("<f4").tobytes(), "yes", digest_of("yes"), 0.0, 1e12
        )
        used = time.thread_time()
        space.remember(entry)
        times.append((time.thread_time() - used) * 1e3)
    return times


def measure(sizes: Sequence[int], lookups: int, file: Path | None = None) -> None:
    """Prints a row for each size."""
    folder = find_folder(None)
    assert folder is not None, "the extra `semantic` is missing"
    model, rng, most = load(folder), random.Random(7), max(sizes)
    settings = tuned(SemanticCacheSettings, max_scope_entries=most)
    space = Space(settings, random=rng.random, now=lambda: 0.0)
    vectors = made_up(most, model.dimensions) if file is None else kept(file, most)
    print("ms, p50 and p95; adding and processor are of the processor's time, adding is p50 and the most")
    print("| questions | embedding | look | both | processor | adding one |")
    print("| --- | --- | --- | --- | --- | --- |")
    for size in sorted(sizes):
        added = fill(space, vectors[len(space) : size], rng)
        times = [_look_up(model, space, question(rng)) for _ in range(lookups)]
        embedding, look, both, processor = zip(*times, strict=True)
        cells = [
            f"{statistics.median(one):.2f}, {statistics.quantiles(one, n=20)[-1]:.2f}"
            for one in (embedding, look, both)
        ]
        cells += [f"{statistics.median(processor):.2f}", f"{statistics.median(added):.2f}, {max(added):.1f}"]
        print(f"| {size} | {' | '.join(cells)} |", flush=True)


def _look_up(model: TextModel, space: Space, text: str) -> tuple[float, float, float, float]:
    """Milliseconds: embedding, look, both, and the processor's time for both."""
    used, start = time.thread_time(), time.perf_counter()
    (vector,) = model.vectors([EmbeddingInput(model.tokens(text), model.dimensions)])
    middle = time.perf_counter()
    space.look(space.question(SCOPE, text, vector))
    end = time.perf_counter()
    return (middle - start) * 1e3, (end - middle) * 1e3, (end - start) * 1e3, (time.thread_time() - used) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--lookups", type=int, default=LOOKUPS)
    parser.add_argument("--vectors", type=Path)
    options = parser.parse_args()
    measure(options.sizes, options.lookups, options.vectors)


if __name__ == "__main__":
    main()

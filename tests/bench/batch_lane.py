"""A thousand questions to twenty documents: as one batch, and online in the order in which they were written.

    python -m tests.bench.batch_lane --data DIR [--lines 1000] [--chars 12000] [--in-flight 32]

DIR has book_*.txt.gz, of which the documents are cut, and questions.jsonl.gz ("turns"). The lines are in random order,
each has its document before its question, and no two are the same. Both ways go through a `kvasir serve` of its own
with the demo model, over HTTP with the openai SDK; its cache holds a quarter of the documents, and nothing is kept on
disk. What was computed is what the engine says. Distinct tokens are those of the tree of all prompts; up to a block of
each prompt is computed besides, behind the last whole block of its document.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[2]))

from tokenizers import Tokenizer

from engine.demo import MODEL_DIR
from tests.fakes.server import Server

ENDPOINT: Final = "/v1/completions"
DOCUMENTS = 20
ANSWER_TOKENS = 4
BYTES_PER_TOKEN = 2560  # of the demo model's cache in bfloat16
BLOCK_TOKENS = 16
LIMIT_S = 3600.0
COMPUTED, FASTER = 1.05, 2.0
TITLES = {"batch": "as one batch", "online": "online, in the given order"}
ENDS = ("completed", "failed", "expired", "cancelled")

Line = dict[str, Any]


def make_lines(data: Path, count: int, chars: int) -> tuple[list[Line], list[str]]:
    """The lines, and their documents."""
    rng = random.Random(1)
    books = [gzip.decompress(path.read_bytes()).decode() for path in sorted(data.glob("book_*.txt.gz"))]
    half = DOCUMENTS // len(books)
    texts = [book[number * chars : (number + 1) * chars] for book in books for number in range(half)]
    with gzip.open(data / "questions.jsonl.gz", "rt", encoding="utf-8") as file:
        questions = [json.loads(row)["turns"][0][:200] for row in file]
    asked = [(text, f"{number}. {rng.choice(questions)}") for text in texts for number in range(count // len(texts))]
    rng.shuffle(asked)
    lines: list[Line] = [
        {"model": "demo", "prompt": f"{text}\n\n{question}\n", "max_tokens": ANSWER_TOKENS, "temperature": 0}
        for text, question in asked
    ]
    return lines, texts


def count_tokens(lines: list[Line], documents: list[str]) -> tuple[int, int, int]:
    """Tokens of the tree of all prompts, of the prompts, and of the documents."""
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    prompts = sorted(tokenizer.encode(line["prompt"], add_special_tokens=False).ids for line in lines)
    distinct = len(prompts[0])
    for before, prompt in pairwise(prompts):
        shared = next((i for i, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b), len(before))
        distinct += len(prompt) - shared
    held = sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in documents)
    return distinct, sum(map(len, prompts)), held


def as_batch(server: Server, lines: list[Line]) -> None:
    client = server.client()
    rows = [
        {"custom_id": str(number), "method": "POST", "url": ENDPOINT, "body": body} for number, body in enumerate(lines)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file = client.files.create(file=("lines.jsonl", text), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
    server.wait_until(lambda: client.batches.retrieve(made.id).status in ENDS, "the batch has ended", LIMIT_S)
    ended = client.batches.retrieve(made.id)
    if ended.request_counts is None or ended.request_counts.completed != len(lines):
        raise RuntimeError(f"{ended.status}: {ended.request_counts}")


def online(server: Server, lines: list[Line], in_flight: int) -> None:
    async def work() -> None:
        async with server.async_client() as client:
            room = asyncio.Semaphore(in_flight)

            async def ask(body: Line) -> None:
                async with room:
                    await client.with_options(timeout=LIMIT_S).completions.create(**body)

            async with asyncio.TaskGroup() as group:
                for body in lines:
                    group.create_task(ask(body))

    asyncio.run(work())


def timed(send: Callable[[Server], None], cache_tokens: int) -> tuple[float, int]:
    """Seconds, and tokens of prompts that were computed."""
    config = (
        f"[engine]\nkv_cache_bytes = {cache_tokens * BYTES_PER_TOKEN}\ndisk_bytes = 0\nthreads = 1\n"
        f"block_size = {BLOCK_TOKENS}\ndtype = 'bfloat16'\n[queue]\nmax_wait_s = {LIMIT_S}\n"
        f"[server]\nrequest_timeout_s = {LIMIT_S}\n"
    )
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder), config=config) as server:
        before = computed(server)
        began_s = time.perf_counter()
        send(server)
        return time.perf_counter() - began_s, computed(server) - before


def computed(server: Server) -> int:
    (engine,) = server.get("/admin/stats")["engines"]
    return int(engine["sharing"]["prefilled_tokens"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the texts")
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--chars", type=int, default=12_000, help="of each document")
    parser.add_argument("--only", choices=("batch", "online"), help="one of the two ways")
    parser.add_argument("--in-flight", type=int, default=32, help="online requests at a time, as batches.max_in_flight")
    options = parser.parse_args()
    lines, documents = make_lines(options.data, options.lines, options.chars)
    distinct, every, held = count_tokens(lines, documents)
    cache_tokens = held // 4
    print(f"{len(lines)} lines, {every:,} tokens, {distinct:,} of them distinct, cache of {cache_tokens:,}\n")
    print("| | seconds | computed | of the distinct tokens |\n| --- | --- | --- | --- |", flush=True)
    ways: dict[str, Callable[[Server], None]] = {
        "batch": lambda server: as_batch(server, lines),
        "online": lambda server: online(server, lines, options.in_flight),
    }
    spent = {}
    for name, send in ways.items():
        if options.only in (None, name):
            seconds, tokens = spent[name] = timed(send, cache_tokens)
            print(f"| {TITLES[name]} | {seconds:.1f} | {tokens:,} | {tokens / distinct:.3f} |", flush=True)
    if "batch" in spent:
        print(f"\ncomputed {spent['batch'][1] / distinct:.3f} of the distinct tokens (wanted: {COMPUTED} at most)")
    if len(spent) == len(ways):
        print(f"{spent['online'][0] / spent['batch'][0]:.2f} times as fast (wanted: {FASTER} at least)")


if __name__ == "__main__":
    main()

"""What speculation wins where answers copy, and what it costs where they do not.

    OMP_NUM_THREADS=1 python -m tests.bench.speculation --data DIR

DIR holds `aider_chats.jsonl.gz`, `doc_qa_xquad_en.jsonl.gz` and `book_sherlock_holmes.txt.gz`. The model is that of
engine_speed.py, 40 million random float32 weights, and computes all that it is asked for; then the next token of a
recorded text is made the likeliest, so that it copies what those who wrote the texts copied, neither more nor less:

    edits     after a conversation with a coding assistant its last answer again, with one name changed
    recorded  the answers of that assistant as they were
    quotes    after some paragraphs and a question the sentence that answers it
    prose     a book goes on, for one sequence, 8 and 32
    noise     nothing is dictated: what the random model samples at temperature 1

With `--draft` the demo model, an eighth of the size, drafts as well: it knows the book of `prose` nearly by heart, and
nothing of the rest. `noise` is left out then, because its tokens are not in that model's vocabulary.

Both sides take turns, text by text. Seconds are CPU seconds of one thread while it decodes; prefills are left out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.compute.model import load_model
from engine.config import EngineSettings
from engine.demo import MODEL_DIR
from engine.pool.blocks import BlockPool
from engine.protocol import Namespace
from engine.sampling.sampler import Row, Sampler
from engine.scheduler import Scheduler
from tests.bench.engine_speed import BLOCK_SIZE, CONTEXT, make_runner
from tests.fakes.scheduler_bench import Bench

Text = tuple[list[int], list[int]]
PROMPT, ANSWER = 2500, 160  # tokens at most


class Dictated(Sampler):
    """Continues texts as they were written, where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[int, list[int]] = {}

    def choose(self, logits: Tensor, rows: list[Row], masks: Any = None) -> list[int]:
        for values, row in zip(logits, rows, strict=True):
            text, at = self.texts.get(row.sequence.seq, []), row.sequence.num_generated + len(row.drafted)
            if at < len(text):
                values[text[at]] = 1e4
        return super().choose(logits, rows, masks)


def read_lines(data: Path, name: str) -> Iterator[Any]:
    with gzip.open(data / name, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def conversations(data: Path, encode: Any, count: int, *, again: bool) -> list[Text]:
    """The assistant's longest answers, one of each conversation; `again` asks for them with a name changed."""
    texts: list[Text] = []
    for chat in read_lines(data, "aider_chats.jsonl.gz"):
        said = [(message["role"], str(message["content"])) for message in chat["messages"]]
        answers = [i for i, (role, text) in enumerate(said) if role == "assistant" and i and len(text) > 300]
        if not answers:
            continue
        at = max(answers, key=lambda i: len(said[i][1]))
        before, answer = "\n".join(text for _, text in said[:at])[-8000:], said[at][1]
        names = sorted(set(re.findall(r"[a-z]+_[a-z_]+", answer[:800])), key=answer.count)
        if again and not names:
            continue
        if again:
            before = f"{before[-2000:]}\n{answer[:3000]}\nPlease write {names[-1]}_new for {names[-1]}."
            answer = answer.replace(names[-1], names[-1] + "_new")
        texts.append((encode(before)[-PROMPT:], encode(answer)[:ANSWER]))
        if len(texts) == count:
            break
    return texts


def quotes(data: Path, encode: Any, count: int) -> list[Text]:
    texts: list[Text] = []
    for document in read_lines(data, "doc_qa_xquad_en.jsonl.gz"):
        paragraphs = document["paragraphs"]
        question = paragraphs[1]["qas"][0]
        (sentence, *_) = [s for s in re.split(r"(?<=[.]) ", paragraphs[1]["context"]) if question["a"] in s] or [""]
        context = "\n\n".join(one["context"] for one in paragraphs[:3])
        if len(sentence) > 80:
            answer = f'{question["a"]}. The text says: "{sentence}"'
            texts.append((encode(f"{context}\n\n{question['q']}")[-PROMPT:], encode(answer)[:ANSWER]))
        if len(texts) == count:
            break
    return texts


def prose(data: Path, encode: Any, count: int) -> list[Text]:
    book = gzip.decompress((data / "book_sherlock_holmes.txt.gz").read_bytes()).decode()
    parts = [encode(book[at : at + 4000]) for at in range(20_000, 20_000 + count * 5000, 5000)]
    return [(part[:1000], part[1000 : 1000 + ANSWER // 2]) for part in parts]


class Side:
    """An engine without its loop, of one way of speculation."""

    def __init__(self, runner: Any, way: str, draft: str | None) -> None:
        self.runner = runner
        settings = EngineSettings(block_size=BLOCK_SIZE, speculation=way, draft_model=draft, max_sequences=64)
        pool = BlockPool(runner.num_blocks, BLOCK_SIZE)
        namespace = Namespace(weights=way, dtype="float32", kv_dtype="float32", block_size=BLOCK_SIZE)
        scheduler = Scheduler(pool, namespace, settings, context_tokens=CONTEXT, vocab_size=32_000)
        self.bench, self._seq = Bench(pool, scheduler, runner), 0

    def run(self, texts: list[Text], *, temperature: float = 0.0) -> tuple[int, float]:
        """Tokens, and seconds of the steps in which all decode or have ended."""
        scheduler, sampler = self.bench.scheduler, self.runner._sampler
        sampler.texts.clear()
        for prompt, answer in texts:
            self._seq += 1
            if not temperature:
                sampler.texts[self._seq] = answer
            self.bench.submit(
                self._seq, prompt, max_tokens=len(answer), temperature=temperature, seed=self._seq, use_cache=False
            )
        tokens, seconds = 0, 0.0
        while True:
            began, before = time.thread_time(), scheduler.counters.decoded_tokens
            step = scheduler.schedule(self.bench.now)
            if step is None:
                return tokens, seconds
            scheduler.commit(step, self.runner.run(step), self.bench.now)
            taken = time.thread_time() - began
            scheduler.learn(step, taken)
            if not any(work.is_prefill for work in step.work):
                tokens, seconds = tokens + scheduler.counters.decoded_tokens - before, seconds + taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=10)
    parser.add_argument("--draft", action="store_true", help="the demo model drafts, too")
    parser.add_argument("--only", nargs="*", metavar="TEXT", help="some of the texts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokeniser = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokeniser.encode(text).ids
        return ids

    count, rng = options.texts, Random(1)
    cases: list[tuple[str, int, float, list[Text]]] = [
        ("edits", 1, 0.0, conversations(options.data, encode, count, again=True)),
        ("quotes", 1, 0.0, quotes(options.data, encode, count)),
        ("recorded", 1, 0.0, conversations(options.data, encode, count, again=False)),
        ("prose", 1, 0.0, prose(options.data, encode, count)),
        ("noise", 1, 1.0, [([rng.randrange(32_000) for _ in range(300)], [0] * 80) for _ in range(count)]),
        ("prose", 8, 0.0, prose(options.data, encode, 16)),
        ("edits", 8, 0.0, conversations(options.data, encode, 16, again=True)),
        ("prose", 32, 0.0, prose(options.data, encode, 64)),
    ]
    demo = EngineSettings(dtype="float32", max_context_tokens=CONTEXT)
    runner = make_runner(torch.float32, 1, load_model(demo) if options.draft else None)
    runner._sampler = Dictated()
    if runner._draft is not None:
        runner._draft._cache.data.zero_()  # the system's pages are there, as those that prefills touch
    print("text      batch   without      with  ratio  median  drafted accepted")
    for name, batch, temperature, texts in cases:
        if (options.only and name not in options.only) or (options.draft and temperature):
            continue
        drafts = {"none": None, "prompt-lookup": "demo" if options.draft else None}
        sides = {way: Side(runner, way, draft) for way, draft in drafts.items()}
        found: dict[str, list[tuple[int, float]]] = {way: [] for way in sides}
        for number in range(0, len(texts) - batch + 1, batch):
            for way in sorted(sides, reverse=bool(number // batch % 2)):
                found[way].append(sides[way].run(texts[number : number + batch], temperature=temperature))
        rates = {way: sum(n for n, _ in runs) / sum(s for _, s in runs) for way, runs in found.items()}
        pairs = zip(found["none"], found["prompt-lookup"], strict=True)
        median = statistics.median((n2 / s2) / (n1 / s1) for (n1, s1), (n2, s2) in pairs)
        counters = sides["prompt-lookup"].bench.scheduler.counters
        print(
            f"{name:9s} {batch:5d} {rates['none']:9.1f} {rates['prompt-lookup']:9.1f} "
            f"{rates['prompt-lookup'] / rates['none']:6.2f} {median:7.2f} "
            f"{counters.drafted_tokens:8d} {counters.accepted_tokens:8d}",
            flush=True,
        )


if __name__ == "__main__":
    main()

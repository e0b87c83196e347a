"""What int8 keys and values change in a model's answers, against those in the model's dtype, over real text.

    python -m tests.bench.kv_quality --data ../shared/data/text

Each text's first tokens go through the model twice, as prompts of which every row is scored: KL divergence of the next
token's distribution, how often its likeliest token is the same, and the perplexity of both, over all rows. Prints one
line for each file and one for all. The texts are data of others and stay where they are.
"""

from __future__ import annotations

import argparse
import gzip
import json
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional

from engine.compute.attention import StepAttention
from engine.compute.batch import Batch, make_batch
from engine.compute.model import load_model
from engine.compute.runner import ModelRunner
from engine.config import EngineSettings
from engine.protocol import Sampling
from engine.sequence import Sequence, Step, Work

ASKS = Sampling(max_tokens=1, temperature=0.0)


def read_texts(file: Path, count: int) -> Iterator[str]:
    """The first texts of a file: a book's parts, or all strings of each line of JSON."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        if file.name.endswith(".txt.gz"):
            whole = lines.read()
            yield from (whole[at : at + 20_000] for at in range(10_000, 10_000 + count * 20_000, 20_000))
            return
        for _, line in zip(range(count), lines, strict=False):
            yield " ".join(_strings(json.loads(line)))


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _strings(one)


def score(runner: ModelRunner, ids: list[int]) -> torch.Tensor:
    """Log probabilities behind each token, (len(ids), vocab_size), computed in chunks as prefills are."""
    size = runner.cache.block_size
    table = list(range(-(-len(ids) // size)))
    runner.cache.zero(table)
    sequence = Sequence("", 0, array("I", ids), len(ids), [], ASKS, block_table=array("i", table))
    rows, chunk = [], 256
    for start in range(0, len(ids), chunk):
        batch: Batch = make_batch(Step([Work(sequence, start, min(chunk, len(ids) - start), samples=True)]), size)
        batch = replace(batch, scored=torch.arange(batch.num_tokens).numpy())
        tokens, positions = torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions)
        asked = torch.cat((torch.from_numpy(batch.last_rows), torch.arange(batch.num_tokens)))
        attention = StepAttention(runner.cache, batch)
        rows.append(runner.model.forward(tokens, positions, attention, asked)[1:].float().log_softmax(-1))
    return torch.cat(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of .txt.gz and .jsonl.gz files")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--texts", type=int, default=4, help="of each file")
    parser.add_argument("--tokens", type=int, default=1024, help="of each text, at most")
    arguments = parser.parse_args()
    settings = EngineSettings(model=arguments.model, kv_cache_bytes=512 << 20)
    model = load_model(settings)
    small = replace(model, cache_shape=replace(model.cache_shape, dtype=torch.int8))
    plain, int8 = ModelRunner(model, settings), ModelRunner(small, settings)
    print(f"bytes of a token: {model.cache_shape.token_bytes} and {small.cache_shape.token_bytes}")
    tokenizer = Tokenizer.from_str(model.tokenizer.tokenizer_json)
    total = torch.zeros(5, dtype=torch.float64)
    print(f"{'':34} {'rows':>7} {'KL':>10} {'top-1':>8} {'perplexity':>11} {'in int8':>8}")
    for file in sorted(arguments.data.glob("*.gz")):
        sums = torch.zeros(5, dtype=torch.float64)
        for text in read_texts(file, arguments.texts):
            ids = tokenizer.encode(text, add_special_tokens=False).ids[
                : min(arguments.tokens, model.context_tokens - 1)
            ]
            if len(ids) < 2:
                continue
            with torch.inference_mode():
                want, got = score(plain, ids)[:-1], score(int8, ids)[:-1]
            following = torch.tensor(ids[1:])[:, None]
            divergence = functional.kl_div(got, want, reduction="sum", log_target=True)
            same = (want.argmax(-1) == got.argmax(-1)).sum()
            lost = [-one.gather(1, following).sum() for one in (want, got)]
            sums += torch.stack([torch.tensor(float(len(want))), divergence, same, *lost]).double()
        total += sums
        report(file.name, sums)
    report("all", total)


def report(name: str, sums: torch.Tensor) -> None:
    rows, divergence, same, plain, int8 = sums.tolist()
    perplexities = (float(torch.tensor(lost / rows).exp()) for lost in (plain, int8))
    print(f"{name:34} {rows:7.0f} {divergence / rows:10.2e} {same / rows:8.2%} {next(perplexities):11.3f}", end=" ")
    print(f"{next(perplexities):8.3f}", flush=True)


if __name__ == "__main__":
    main()

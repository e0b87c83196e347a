"""How often the judge of the semantic cache takes two answers for the same, and how often wrongly.

    python -m tests.bench.judge_quality --data DIR [--answers 60]

DIR has text/tau_airline_chats.jsonl.gz and text/doc_qa_xquad_en.jsonl.gz, whose agents' messages and paragraphs are
answers here, and semantic/pairs/sick.dev.jsonl.gz, pairs of statements that people compared. From each answer others
are made, by rules and with a fixed seed: what says the same (SAME), and what says something else (DIFFERENT). A row is
the share of pairs that are taken for the same at each cosine; the last rows are precision and recall over all kinds,
each kind weighing the same.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from gateway.responses.embedding.text_model import TextModel, find_folder, load
from gateway.responses.semantic import judge
from gateway.responses.semantic.questions import KEPT_ANSWER_CHARS
from gateway.types import EmbeddingInput

THRESHOLDS = (0.80, 0.85, 0.90, 0.925, 0.95, 0.97)
OTHER_NAMES = ("Keller", "Lisbon", "Okafor", "Denver", "Suzuki", "Norway")
OTHER_NOUNS = ("river", "account", "morning", "teacher", "window", "market", "engine", "village")
SHORTER = {
    " cannot ": " can't ",
    " do not ": " don't ",
    " is not ": " isn't ",
    " will not ": " won't ",
    " I am ": " I'm ",
}
OPPOSITE = {" is ": " is not ", " can ": " cannot ", " will ": " will not ", " was ": " was not ", " are ": " are not "}
Change = Callable[[str, random.Random], str]


def _reordered(text: str, rng: random.Random) -> str:
    """Two sentences, one before the other."""
    sentences = re.split(r"(?<=[.!?])\s+", text)
    return " ".join([*sentences[1:], sentences[0]])


def _shortened(text: str, rng: random.Random) -> str:
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    return text


def _denied(text: str, rng: random.Random) -> str:
    verbs = [verb for verb in OPPOSITE if verb in text]
    return text if not verbs else text.replace(verb := rng.choice(verbs), OPPOSITE[verb], 1)


def _replaced(pattern: str, others: Sequence[str]) -> Change:
    """One match, by something else."""

    def change(text: str, rng: random.Random) -> str:
        found = list(re.finditer(pattern, text))
        if not found:
            return text
        one = rng.choice(found)
        return text[: one.start()] + rng.choice(others) + text[one.end() :]

    return change


SAME: dict[str, Change] = {
    "greeting before": lambda text, rng: f"Certainly! {text}",
    "offer behind": lambda text, rng: f"{text} Is there anything else that I can help you with?",
    "contractions": _shortened,
    "other order": _reordered,
    "as a list": lambda text, rng: "- " + re.sub(r"(?<=[.!?])\s+", "\n- ", text),
}
DIFFERENT: dict[str, Change] = {
    "other number": _replaced(r"\d+", ("17", "205", "4,310", "1.5")),
    "other name": _replaced(r"(?<=[a-z,] )[A-Z][a-z]{2,}", OTHER_NAMES),
    "denied": _denied,
    "other noun": _replaced(r"(?<=\bthe )[a-z]{4,}", OTHER_NOUNS),
}


def answers(data: Path, count: int) -> list[str]:
    """Of a sentence or more each, from both sources."""
    agents = [
        message["content"]
        for row in _rows(data / "text" / "tau_airline_chats.jsonl.gz")
        for message in row["messages"]
        if message["role"] == "assistant" and isinstance(message.get("content"), str)
    ]
    pages = [part["context"] for row in _rows(data / "text" / "doc_qa_xquad_en.jsonl.gz") for part in row["paragraphs"]]
    short = [" ".join(re.split(r"(?<=[.!?])\s+", page)[:2]) for page in pages[::2]]
    rng, chosen = random.Random(7), []
    for texts in (agents, short + pages[1::2]):
        fit = sorted({text.strip() for text in texts if 8 <= len(text.split()) <= 120})
        chosen += rng.sample(fit, min(count, len(fit)))
    return chosen


def _rows(file: Path) -> list[Any]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def pairs(data: Path, count: int) -> dict[tuple[str, bool], list[tuple[str, str]]]:
    """By kind, and whether they say the same."""
    made: dict[tuple[str, bool], list[tuple[str, str]]] = {}
    rng, texts = random.Random(8), answers(data, count)
    for same, kinds in ((True, SAME), (False, DIFFERENT)):
        for kind, change in kinds.items():
            changed = [(text, change(text, rng)) for text in texts]
            made[kind, same] = [(one, other) for one, other in changed if one.split() != other.split()]
    made["another answer", False] = list(pairwise(texts))
    sick = _rows(data / "semantic" / "pairs" / "sick.dev.jsonl.gz")
    for row in rng.sample(sick, len(sick)):
        kind = "statements, same" if row["same"] else f"statements, {row['note']}"
        if row["note"] != "entailment" or row["same"]:
            made.setdefault((kind, bool(row["same"])), []).append((row["a"], row["b"]))
    return {key: found[: 2 * count] for key, found in made.items() if found}


def similarity(model: TextModel, one: str, other: str) -> float:
    """Cosine where vectors decide; 2 for what is the same without them, -2 for what is not."""
    one, other = one[:KEPT_ANSWER_CHARS], other[:KEPT_ANSWER_CHARS]
    same = judge.compare(one, other)
    if same is not None:
        return 2.0 if same else -2.0
    inputs = [EmbeddingInput(model.tokens(text)[: model.max_tokens], model.dimensions) for text in (one, other)]
    here, there = (np.frombuffer(vector, dtype="<f4") for vector in model.vectors(inputs))
    return float(here @ there)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--answers", type=int, default=60, help="of each source")
    options = parser.parse_args()
    folder = find_folder(None)
    assert folder is not None, "the extra `semantic` is missing"
    model, shares = load(folder), {True: [], False: []}
    print("| pairs | say the same | count | " + " | ".join(map(str, THRESHOLDS)) + " |")
    print("| --- " * (3 + len(THRESHOLDS)) + "|")
    for (kind, same), found in pairs(options.data, options.answers).items():
        near = np.array([similarity(model, *pair) for pair in found])
        row = [float((near >= threshold).mean()) for threshold in THRESHOLDS]
        shares[same].append(row)
        _print(kind, "yes" if same else "no", str(len(found)), row)
    right, wrong = np.mean(shares[True], axis=0), np.mean(shares[False], axis=0)
    _print("precision", "", "", list(right / np.maximum(right + wrong, 1e-9)))
    _print("recall", "", "", list(right))


def _print(kind: str, same: str, count: str, row: Sequence[float]) -> None:
    print(f"| {kind} | {same} | {count} | " + " | ".join(f"{share:.3f}" for share in row) + " |", flush=True)


if __name__ == "__main__":
    main()

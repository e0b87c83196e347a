"""Replays real conversations against a running Kvasir with the openai SDK and prints how much was reused.

    ./deploy/serve &
    python -m tests.bench.replay_chats --data DIR [--base-url http://127.0.0.1:8080/v1] [--conversations 40]

DIR holds tau_airline_chats.jsonl.gz and aider_chats.jsonl.gz, one JSON object per line with "s" (session) and
"messages" (OpenAI messages). Public sources: the tau-bench historical trajectories (MIT,
github.com/sierra-research/tau-bench) and aider's chat history (Apache-2.0, github.com/Aider-AI/aider,
tests/fixtures/chat-history.md).

Every assistant turn of a conversation is one request: all messages before it. The answers of the data, not the
generated ones, go into the next turn, as they would in a replayed log. The oracle renders and tokenises every prompt
with transformers, on its own, and keeps every block ever prefilled: reusable is the longest run of whole blocks seen
before, never the whole prompt. Cold times are of the same prompts with a fresh first line, so that nothing matches.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
from transformers import AutoTokenizer

from engine.demo import MODEL_DIR
from tests.bench.asking import ask

KINDS = {"tau-airline": "tau_airline_chats.jsonl.gz", "aider": "aider_chats.jsonl.gz"}
Message = dict[str, Any]


@dataclass
class Figures:
    """What one kind of conversation came to."""

    requests: int = 0
    prompt: int = 0
    reused: int = 0
    reusable: int = 0
    mismatches: int = 0  # requests whose prompt tokens differ from the oracle's own count
    warm_ms: list[float] = field(default_factory=list)
    cold_ms: list[float] = field(default_factory=list)


class Oracle:
    """Remembers every whole block by its full prefix. The naive twin of what the engine does."""

    def __init__(self, tokenizer: Any, block_size: int) -> None:
        self._tokenizer = tokenizer
        self._block_size = block_size
        self._seen: set[tuple[int, bytes]] = set()

    def count(self, messages: list[Message]) -> int:
        return len(self._encode(messages))

    def reusable(self, messages: list[Message]) -> int:
        """Tokens of the prompt that were computed before, in whole blocks; then remembers the prompt."""
        tokens = self._encode(messages)
        size, chain, keys = self._block_size, b"", []
        for start in range(0, len(tokens) - size + 1, size):
            chain = hash((chain, tuple(tokens[start : start + size]))).to_bytes(8, "little", signed=True)
            keys.append((start, chain))
        found = next((index for index, key in enumerate(keys) if key not in self._seen), len(keys))
        self._seen.update(keys)
        return min(found, (len(tokens) - 1) // size) * size

    def _encode(self, messages: list[Message]) -> list[int]:
        text = self._tokenizer.apply_chat_template(
            [_as_templates_want(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def conversations(file: Path) -> Iterator[list[Message]]:
    """Messages of each conversation in the shape that the API wants."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield [_message(message) for message in json.loads(line)["messages"]]


def _message(message: Message) -> Message:
    # aider's log calls what the terminal printed "tool", without a call that it would answer.
    if message["role"] == "tool" and "tool_call_id" not in message:
        return {"role": "user", "content": message["content"]}
    return message


def _as_templates_want(message: Message) -> Message:
    """Chat templates take the arguments of a tool call as an object; the API has them as JSON text."""
    if not message.get("tool_calls"):
        return message
    functions = [
        {**call["function"], "arguments": json.loads(call["function"]["arguments"])} for call in message["tool_calls"]
    ]
    calls = [{**call, "function": function} for call, function in zip(message["tool_calls"], functions, strict=True)]
    return {**message, "tool_calls": calls}


def replay(
    client: openai.OpenAI, model: str, oracle: Oracle, chats: list[list[Message]], arguments: argparse.Namespace
) -> Figures:
    """One kind of conversation, one request after the other."""
    figures, dice = Figures(), random.Random(0)
    for chat in chats:
        for turn, message in enumerate(chat):
            if message["role"] != "assistant" or turn == 0:
                continue
            prompt = chat[:turn]
            if oracle.count(prompt) + arguments.max_tokens + 64 > arguments.context:
                break
            if dice.random() < arguments.cold_share:
                fresh = {"role": "system", "content": f"Conversation {dice.getrandbits(64):x}."}
                cold = ask(client, model, [fresh, *prompt], arguments.max_tokens)
                figures.cold_ms.append(cold.first_ms)
                oracle.reusable([fresh, *prompt])
            reusable = oracle.reusable(prompt)
            warm = ask(client, model, prompt, arguments.max_tokens)
            figures.requests += 1
            figures.prompt += warm.prompt
            figures.reused += warm.cached
            figures.reusable += reusable
            figures.mismatches += warm.prompt != oracle.count(prompt)
            if reusable:
                figures.warm_ms.append(warm.first_ms)
    return figures


def print_table(rows: dict[str, Figures]) -> None:
    columns = ["conversations", "requests", "prompt tokens", "reused", "reusable", "reused / reusable"]
    columns += ["TTFT cold ms", "TTFT warm ms"]
    print("| " + " | ".join(columns) + " |")
    print("| " + " | ".join("---" for _ in columns) + " |")
    for kind, row in rows.items():
        cold = f"{statistics.median(row.cold_ms):.1f}" if row.cold_ms else "-"
        warm = f"{statistics.median(row.warm_ms):.1f}" if row.warm_ms else "-"
        share = row.reused / row.reusable if row.reusable else 1.0
        cells = [kind, f"{row.requests:,}", f"{row.prompt:,}", f"{row.reused:,}", f"{row.reusable:,}", f"{share:.4f}"]
        print("| " + " | ".join([*cells, cold, warm]) + " |")
        if row.mismatches:
            print(f"{kind}: {row.mismatches} prompts were counted differently by the oracle")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the two chat files")
    parser.add_argument("--base-url", default="http://127.0.0.1:8080/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", default=None, help="name of the model; the server's first one when not given")
    parser.add_argument("--tokenizer", default=str(MODEL_DIR), help="folder of the served model, for the oracle")
    parser.add_argument("--context", type=int, default=8192, help="longer prompts are left out")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--conversations", type=int, default=40, help="of each kind; 0 means all")
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("--cold-share", type=float, default=0.1, help="share of requests that are also asked cold")
    arguments = parser.parse_args()

    client = openai.OpenAI(base_url=arguments.base_url, api_key=arguments.api_key, max_retries=0)
    model = arguments.model or client.models.list().data[0].id
    oracle = Oracle(AutoTokenizer.from_pretrained(arguments.tokenizer), arguments.block_size)
    ask(client, model, [{"role": "user", "content": "warm up"}], 1)
    oracle.reusable([{"role": "user", "content": "warm up"}])
    rows = {}
    for kind, name in KINDS.items():
        chats = list(conversations(arguments.data / name))
        rows[kind] = replay(client, model, oracle, chats[: arguments.conversations or None], arguments)
    print_table(rows)


if __name__ == "__main__":
    main()

"""What a chat prompt costs the gateway before an engine sees it: masking, template, cuts, ids, digests.

    python -m tests.bench.prompt_cost [--tokenizer FOLDER]

Prints CPU milliseconds for prompts of three sizes: nothing known, everything known, one turn added to what is known,
and that with two breakpoints (inside of the first message, and at the end of the last); beside it the tokenizers
library encoding the rendered text as a whole, which is what a gateway without memos pays on every request. Messages are
generated, with a fixed seed; every round gets new string objects, as a request would.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

from engine.protocol import Hello, Namespace, Sampling, TokenizerFiles
from gateway.config import PromptSettings
from gateway.prompt.masking import Masking
from gateway.prompt.stage import PromptStage
from gateway.prompt.template import ChatTemplate
from gateway.types import ChatPrompt, EncodedPrompt, Marker, Request, Tenant
from tests.fakes.tuned import tuned

DEMO = Path(__file__).parents[2] / "engine" / "demo" / "model"
SIZES = ((3_000, 5), (16_000, 11), (400_000, 101))  # characters, messages
NEVER_A_THREAD = tuned(PromptSettings, thread_chars=1 << 40)  # so that the CPU time is this thread's


def files_of(folder: Path) -> TokenizerFiles:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    separate = folder / "chat_template.jinja"
    return TokenizerFiles(
        tokenizer_json=(folder / "tokenizer.json").read_text(),
        chat_template=separate.read_text() if separate.exists() else config.get("chat_template"),
        special_tokens={name: text for name, text in config.items() if name.endswith("_token") and type(text) is str},
        add_bos=False,
    )


def hello_of(files: TokenizerFiles) -> Hello:
    return Hello(
        incarnation="bench",
        model="bench",
        namespace=Namespace(weights="bench", dtype="bfloat16", kv_dtype="bfloat16", block_size=16),
        context_tokens=1 << 30,
        vocab_size=1 << 20,
        num_blocks=1,
        max_sequences=1,
        eos_ids=(),
        tokenizer=files.fingerprint(),
        created=0,
    )


def conversation(num_chars: int, num_messages: int, rng: random.Random) -> list[dict[str, Any]]:
    words = ["the", "model", "returns", "if x < y:", "cache", "tokens,", "of", "a", "prefix.", "42", "naïve", "\n\n- "]
    words += ["".join(rng.choices("etaoinshrdlu", k=rng.randrange(2, 9))) for _ in range(500)]
    each = num_chars // num_messages
    return [
        {"role": ("user", "assistant")[i % 2], "content": " ".join(rng.choices(words, k=each // 5))[:each]}
        for i in range(num_messages)
    ]


async def cpu_ms(work: Callable[[], Awaitable[object]], prepare: Callable[[], object], rounds: int) -> float:
    """The least of several rounds: what the work itself costs on a shared machine."""
    best = float("inf")
    for _ in range(rounds):
        prepare()
        start = time.thread_time()
        await work()
        best = min(best, time.thread_time() - start)
    return best * 1e3


async def measure(files: TokenizerFiles, num_chars: int, num_messages: int) -> dict[str, float]:
    hello, rng = hello_of(files), random.Random(num_chars)
    messages = conversation(num_chars, num_messages, rng)
    wire = json.dumps(messages).encode()
    current: dict[str, Any] = {}

    async def fresh_stage() -> None:
        current["stage"] = PromptStage(NEVER_A_THREAD)
        await current["stage"].load(hello, files)

    def parse() -> None:
        current["messages"] = json.loads(wire)

    def add_turn() -> None:
        parse()
        turn = " ".join(rng.choices(["some", "new", "words", "for", "another", "turn"], k=150))
        current["messages"] += [{"role": "assistant", "content": turn}, {"role": "user", "content": turn[::-1]}]

    def add_marked_turn() -> None:
        add_turn()
        last = len(current["messages"]) - 1
        end = len(current["messages"][last]["content"])
        current["markers"] = (Marker(0, num_chars // num_messages // 2, 300.0), Marker(last, end, 300.0))

    async def encode() -> EncodedPrompt:
        prompt = ChatPrompt(current["messages"], markers=current.get("markers", ()))
        request = Request("r", Tenant("t"), "bench", prompt, Sampling(max_tokens=0), received_s=0.0, deadline_s=0.0)
        encoded: EncodedPrompt = await current["stage"].encode(request, hello)
        return encoded

    cold = float("inf")
    for _ in range(3):
        await fresh_stage()
        cold = min(cold, await cpu_ms(encode, parse, 1))
    warm = await cpu_ms(encode, parse, 50)
    turn = await cpu_ms(encode, add_turn, 20)
    marked = await cpu_ms(encode, add_marked_turn, 20)
    current["markers"] = ()

    assert files.chat_template is not None
    rendered = ChatTemplate(files.chat_template, files.special_tokens, Masking([])).render(
        messages, add_generation_prompt=True
    )
    hf = HfTokenizer.from_str(files.tokenizer_json)

    async def whole() -> object:
        return hf.encode(rendered, add_special_tokens=False)

    parse()
    return {
        "tokens": (await encode()).num_tokens,
        "cold": cold,
        "warm": warm,
        "turn": turn,
        "marked": marked,
        "whole": await cpu_ms(whole, parse, 3),
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, default=DEMO, help="folder with tokenizer.json and its chat template")
    files = files_of(parser.parse_args().tokenizer)
    stage = PromptStage(NEVER_A_THREAD)
    await stage.load(hello_of(files), files)
    stats = stage.stats()["bench"]
    print(f"library: {stats['library']}, cuts: {stats['fallback'] or 'yes'}; CPU ms per prompt")
    print(
        f"{'chars':>8} {'messages':>8} {'tokens':>8} {'cold':>8} {'warm':>8} {'one turn':>8} {'marked':>8} "
        f"{'tokenizers, whole':>18}"
    )
    for num_chars, num_messages in SIZES:
        row = await measure(files, num_chars, num_messages)
        print(
            f"{num_chars:>8} {num_messages:>8} {row['tokens']:>8} {row['cold']:>8.2f} {row['warm']:>8.3f} "
            f"{row['turn']:>8.3f} {row['marked']:>8.3f} {row['whole']:>18.1f}"
        )


if __name__ == "__main__":
    asyncio.run(main())

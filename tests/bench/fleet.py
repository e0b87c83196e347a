"""Two real vLLM behind Kvasir, against round robin over the same two, and against one vLLM that has both caches.

    python -m tests.bench.fleet --data DIR [--sessions 8] [--rounds 1] [--blocks 256]

DIR holds agent_requests.jsonl.gz (prompts as deltas of earlier ones), tau_airline_chats.jsonl.gz and
aider_chats.jsonl.gz: real conversations of agents. Of each kind the first are taken whose prompts fit into the demo
model's context, turn by turn until one does not; the airline's policy is cut, so that any fits. The answers of the data
go into the next turn, so that all see the same prompts.

Round robin is by clients that ask in turns at two gateways, each with one vLLM, and by a bare proxy that copies bytes.
All take turns, each round under a salt of its own, which finds nothing of what was there before. `--at-once`
sessions are under way at the same time. Caches are small: what is not sent where its prefix is, is computed again.

Cached tokens are those that vLLM reports. A receipt is exact when x-kvasir-predicted-tokens is what it reports. Goals:
cached tokens >= 97% of those of the one vLLM with both caches, >= 99% of receipts exact.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import itertools
import json
import random
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from transformers import AutoTokenizer

from tests.bench.gateway_overhead import start, wait_for_port
from tests.fakes import vllm_fleet
from tests.fakes.ports import free_port
from tests.fakes.server import Server
from tests.fakes.vllm_server import MODEL, wait_ready

CONTEXT_TOKENS = 2048
ANSWER_TOKENS = 8
POLICY_CHARS = 2500
MAX_TURNS = 12
Messages = list[dict[str, Any]]


# -- the conversations ---------------------------------------------------------------------------------------------


@dataclass
class Session:
    """`turns` has the messages of each request, in order."""

    name: str
    turns: list[Messages] = field(default_factory=list)


def sessions(data: Path, count: int) -> list[Session]:
    """`count` of each kind, mixed by a fixed seed."""
    tokenizer = AutoTokenizer.from_pretrained(str(MODEL))
    found: list[Session] = []
    for kind in (_requests(data), _chats(data / "tau_airline_chats.jsonl.gz"), _chats(data / "aider_chats.jsonl.gz")):
        fitting = (Session(one.name, _fitting(tokenizer, one.turns)) for one in kind)
        found += itertools.islice((one for one in fitting if len(one.turns) > 1), count)
    random.Random(16).shuffle(found)
    return found


def _fitting(tokenizer: Any, turns: list[Messages]) -> list[Messages]:
    def fits(messages: Messages) -> bool:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return len(tokenizer.encode(text, add_special_tokens=False)) + ANSWER_TOKENS <= CONTEXT_TOKENS

    return list(itertools.takewhile(fits, turns[:MAX_TURNS]))


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def _requests(data: Path) -> Iterator[Session]:
    """A prompt is the first `keep` characters of the prompt `base`, and `add`."""
    for entry in _lines(data / "agent_requests.jsonl.gz"):
        texts: list[str] = []
        for one in entry["reqs"]:
            before = "" if one["base"] < 0 else texts[one["base"]][: one["keep"]]
            texts.append(before + one["add"])
        yield Session(entry["s"], [[{"role": "user", "content": text}] for text in dict.fromkeys(texts) if text])


def _chats(file: Path) -> Iterator[Session]:
    """Every answer of the data is a request with all messages before it. Calls and their results are written as text:
    the demo model's template is the same for both sides, and no conversation here is about tools."""
    for entry in _lines(file):
        messages: Messages = []
        turns: list[Messages] = []
        for message in entry["messages"]:
            role = message["role"] if message["role"] in ("system", "assistant") else "user"
            text = message.get("content") or json.dumps(message.get("tool_calls") or "")
            if role == "assistant" and messages:
                turns.append(list(messages))
            messages.append({"role": role, "content": text[:POLICY_CHARS] if role == "system" else text})
        yield Session(entry["s"], turns)


# -- a round -------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """prompt, cached  tokens, as vLLM reports them
    predicted       cached tokens by x-kvasir-predicted-tokens; None where it is not said"""

    prompt: int
    cached: int
    predicted: int | None
    first_token_s: float


async def replay(urls: Sequence[str], chats: Sequence[Session], at_once: int) -> list[Answer]:
    """Every request of all sessions, `at_once` sessions at a time, to one URL after the other. Raises RuntimeError for
    an answer that is none."""
    salt, left, turns, answers = uuid.uuid4().hex, iter(chats), itertools.cycle(urls), list[Answer]()

    async def client() -> None:
        for chat in left:
            for messages in chat.turns:
                answers.append(await _ask(session, next(turns), messages, salt))

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(client())
    return answers


async def _ask(session: aiohttp.ClientSession, url: str, messages: Messages, salt: str) -> Answer:
    body = {"model": "demo", "messages": messages, "cache_salt": salt, "temperature": 0, "max_tokens": ANSWER_TOKENS}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    began_s, first_s, usage = time.monotonic(), 0.0, None
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{url} answered {answer.status}: {await answer.text()}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if not first_s and event["choices"] and event["choices"][0]["delta"].get("content"):
                first_s = time.monotonic() - began_s
            usage = event.get("usage") or usage
        predicted = answer.headers.get("x-kvasir-predicted-tokens")
    if usage is None:
        raise RuntimeError(f"{url} ended an answer without usage")
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    first_s = first_s or time.monotonic() - began_s
    return Answer(usage["prompt_tokens"], cached, None if predicted is None else int(predicted), first_s)


@contextmanager
def bare_proxy(urls: Sequence[str]) -> Iterator[str]:
    """A process that passes bytes on, to one server after the other."""
    own = free_port()
    ports = [str(own), *(str(urlsplit(url).port) for url in urls)]
    process = start("-m", "tests.bench.gateway_overhead", "--role", "proxy", "--ports", *ports)
    try:
        wait_for_port(own)
        yield f"http://127.0.0.1:{own}"
    finally:
        process.terminate()
        process.wait()


# -- the table -----------------------------------------------------------------------------------------------------


def report(found: dict[str, list[Answer]]) -> None:
    bound = sum(answer.cached for answer in found["one with both caches"])
    spread = statistics.mean(answer.first_token_s for answer in found["round robin"])
    print("| | requests | prompt tokens | cached tokens | of the bound | mean TTFT, ms | of round robin's |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, answers in found.items():
        prompt, cached = sum(one.prompt for one in answers), sum(one.cached for one in answers)
        mean_s = statistics.mean(one.first_token_s for one in answers)
        shares = f"{cached / max(1, bound):.1%} | {mean_s * 1e3:.0f} | {mean_s / spread:.2f}"
        print(f"| {name} | {len(answers)} | {prompt} | {cached} | {shares} |")
    receipts = [one for one in found["kvasir"] if one.predicted is not None]
    exact = sum(one.predicted == one.cached for one in receipts)
    print(f"receipts: {exact} of {len(receipts)} exact ({exact / max(1, len(receipts)):.1%})")
    for one in receipts:
        if one.predicted != one.cached:
            print(f"  predicted {one.predicted}, reported {one.cached}, of {one.prompt}")


async def measure(ways: dict[str, Sequence[str]], chats: Sequence[Session], rounds: int, at_once: int) -> None:
    """`ways` by name: URLs that take turns."""
    found: dict[str, list[Answer]] = {}
    for number in range(rounds):
        for name in ways if number % 2 == 0 else reversed(ways):
            began_s = time.monotonic()
            found.setdefault(name, []).extend(await replay(ways[name], chats, at_once))
            print(f"round {number}, {name}: {time.monotonic() - began_s:.0f} s", flush=True)
    report(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sessions", type=int, default=8, help="of each of the three kinds")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--blocks", type=int, default=256, help=f"of each replica's cache, of {vllm_fleet.BLOCK_TOKENS} tokens"
    )
    parser.add_argument("--at-once", type=int, default=4, help="sessions that are under way")
    arguments = parser.parse_args()
    chats = sessions(arguments.data, arguments.sessions)
    print(f"{len(chats)} sessions, {sum(len(one.turns) for one in chats)} requests", flush=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        room = Path(folder)
        (room / "single").mkdir()
        two = stack.enter_context(vllm_fleet.replicas(room, 2, blocks=arguments.blocks, arguments=()))
        one = stack.enter_context(vllm_fleet.replicas(room / "single", 1, blocks=2 * arguments.blocks, arguments=()))
        for url in (*two.urls, *one.urls):
            asyncio.run(wait_ready(url))
        gateway, _ = stack.enter_context(vllm_fleet.gateways(room, two))
        single = []
        for number, server in enumerate(two.servers):
            behind = vllm_fleet.Replicas((server,))
            single.append(stack.enter_context(Server(room / f"rr-{number}", *behind.flags, command="gateway")))
            single[-1].wait_for_line("engine engine-0 joined", vllm_fleet.JOIN_LIMIT_S)
        ways = {
            "kvasir": [gateway.url],
            "round robin": [server.url for server in single],
            "bare proxy": [stack.enter_context(bare_proxy(two.urls))],
            "one with both caches": one.urls,
        }
        asyncio.run(measure(ways, chats, arguments.rounds, arguments.at_once))


if __name__ == "__main__":
    main()

"""Traffic of three tenants in three dialects, for tests in a browser and for screenshots: conversations, the same
question again and in other words, batches, mistakes. Always the same requests in the same order of each tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import aiohttp

from tests.fakes.server import ADMIN_KEY

HOSTILE = '<img src=x onerror="document.title=1">'
"""A client's own name of a model: one of an alias, and of a model that is not there."""

TENANTS = {"atlas": "atlas-key-123", "borealis": "borealis-key-123", "cygnus": "cygnus-key-123"}
CONFIG = f"""
[auth]
admin_keys = ["{ADMIN_KEY}"]
[response_cache]
mode = "on"
truncated = true
[semantic_cache]
mode = "on"
audit_share = 1.0
[ledger]
flush_s = 1.0
{"".join(f'[[tenants]]{chr(10)}name = "{name}"{chr(10)}keys = ["{key}"]{chr(10)}' for name, key in TENANTS.items())}
[[namespaces]]
name = "handbook"
tenants = ["atlas", "borealis"]
[[aliases]]
name = '{HOSTILE}'
target = "demo"
[[prices]]
model = "demo"
input = 0.25
cached_read = 0.025
output = 1.25
"""

HANDBOOK = (
    "You answer for the harbour office. Ships report to the pilot station two hours before they arrive. "
    "Berths are given in the order of arrival, ships with perishable cargo first. Fees are due in thirty days. "
) * 6
QUESTIONS = (
    "When does a ship have to report to the pilot station?",
    "Which ships are given a berth first?",
    "Within how many days are the fees due?",
    "Who answers for the harbour office at night?",
)
GREEDY = {"model": "demo", "max_tokens": 48, "temperature": 0, "stop": [".", ",", "\n"]}
"""Answers that end by themselves, of which some are remembered by meaning."""
ASIDE = "Hi! {} Thanks."
LIMIT_S = 60.0


def requests_of(tenant: str, rounds: int, first: int, alias: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and body of each request. `alias`: of demo, for one of them in each round."""
    for number in range(first, first + rounds):
        question = QUESTIONS[number % len(QUESTIONS)]
        system = f"{HANDBOOK} You speak to {tenant}."
        turns = [{"role": "user", "content": f"{question} This is call {number}."}]
        if tenant == "atlas":
            chat = {**GREEDY, "messages": [_system(system), *turns]}
            yield "/v1/chat/completions", chat
            yield "/v1/chat/completions", {**chat, "stream": True}  # the same again: an exact hit
            for words in (question, ASIDE.format(question)):  # which means the same
                yield "/v1/chat/completions", {**chat, "messages": [_system(system), _user(words)]}
        elif tenant == "borealis":
            body = {"model": "demo", "max_tokens": 16, "system": system}
            longer = [*turns, {"role": "assistant", "content": "I will ask."}, _user("And who pays for that?")]
            yield "/v1/messages", {**body, "messages": turns}
            yield "/v1/messages", {**body, "messages": longer, "stream": True}
        else:
            contents = [{"role": "user", "parts": [{"text": turns[0]["content"]}]}]
            instruction, sampling = {"parts": [{"text": system}]}, {"maxOutputTokens": 10, "temperature": 0.9}
            body = {"systemInstruction": instruction, "contents": contents, "generationConfig": sampling}
            yield "/v1beta/models/demo:generateContent", body
            yield "/v1/chat/completions", {"model": alias, "max_tokens": 6, "temperature": 0.7, "messages": turns}
            if number % 3 == 0:  # mistakes: there is no such model, and no such number of tokens
                yield "/v1/chat/completions", {"model": f"{alias}{number}", "messages": turns}
                yield "/v1/chat/completions", {"model": "demo", "max_tokens": -1, "messages": turns}


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def send(url: str, rounds: int, *, first: int = 0, alias: str = HOSTILE) -> int:
    """Sends `rounds` rounds of all tenants, side by side. How many requests those were."""
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(LIMIT_S)) as session:

        async def one(tenant: str, key: str) -> int:
            sent = 0
            for path, body in requests_of(tenant, rounds, first, alias):
                headers = {"Authorization": f"Bearer {key}", "x-api-key": key, "anthropic-version": "2023-06-01"}
                async with session.post(path, json=body, headers=headers) as answer:
                    await answer.read()
                sent += 1
            return sent

        return sum(await asyncio.gather(*(one(tenant, key) for tenant, key in TENANTS.items())))


async def batch(url: str, lines: int, *, tenant: str = "borealis") -> str:
    """A batch of messages, one of whose lines fails. Its id."""
    key = TENANTS[tenant]
    params = {"model": "demo", "max_tokens": 8, "messages": [_user("Name a ship.")]}
    rows = [{"custom_id": f"line-{number}", "params": params} for number in range(lines)]
    rows.append({"custom_id": "broken", "params": {**params, "model": "missing"}})
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
    async with (
        aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(LIMIT_S)) as session,
        session.post("/v1/messages/batches", json={"requests": rows}, headers=headers) as answer,
    ):
        found: str = (await answer.json())["id"]
        return found


async def load(url: str, over: asyncio.Event) -> None:
    """A round of all tenants about every second, until the event is set."""
    number = 1000
    while not over.is_set():
        await send(url, 1, first=number)
        number += 1
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), 1.0)

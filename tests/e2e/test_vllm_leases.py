"""Leases on a real vLLM, whose cache is flooded three times over. Slow, and skipped where vLLM is not installed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import vllm_server
from tests.fakes.ports import free_ports
from tests.fakes.vllm_server import EAGER, HOW, installed, wait_ready
from tests.fakes.waiting import until
from tests.fakes.whole import Whole, whole

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not installed(), reason=HOW)]

NAME = "demo-vllm"
PAGE, PAGES = 128, 64
CHANCE = random.Random(16)
WORDS = ("the", "traveller", "reaches", "another", "town", "where", "nobody", "knows", "which", "road", "leads", "back")


def text(words: int) -> str:
    return " ".join(CHANCE.choice(WORDS) for _ in range(words))


async def ask(running: Whole, text: str, *, kept: bool = False) -> tuple[Any, int, str]:
    """Usage, the tokens that were physically reused, and what became of the breakpoint."""
    part: dict[str, Any] = {"type": "text", "text": text}
    if kept:
        part["prompt_cache_breakpoint"] = {"mode": "explicit", "ttl": "1h"}
    messages = [{"role": "system", "content": [part]}, {"role": "user", "content": "Well?"}]
    usage, headers = await running.ask(*messages, temperature=0)
    return usage, int(headers["x-kvasir-cached-tokens"]), headers.get("x-kvasir-lease", "")


async def test_leased_prefixes_survive_a_flood_of_three_times_the_cache(tmp_path: Path) -> None:
    events, replay = free_ports(2)
    more: Any = {"dtype": "float32", "events": (events, replay), "cache_blocks": PAGES, "arguments": EAGER}
    with vllm_server.vllm(tmp_path / "vllm.log", NAME, **more) as url:
        await wait_ready(url)
        replica = {"name": "real", "kind": "vllm", "url": url, "model": f"demo = {NAME}"}
        sections = {"replicas": [replica], "response_cache": {"mode": "off"}}
        async with whole(engines=0, sections=sections) as running:
            running.gateway.attach_replicas()
            await running.gateway.registry.wait_joined()
            running.client = running.client.with_options(timeout=120)
            await flood(running)


async def flood(running: Whole) -> None:
    (engine,) = running.gateway.registry.engines
    await until(lambda: getattr(engine, "trust", "") == "exact")
    leased, other = [text(600), text(800)], text(800)
    wrote = [(await ask(running, one, kept=True))[0] for one in leased]
    await ask(running, other)
    tokens, count = 0, 0
    while tokens < 3 * PAGE * PAGES:
        tokens += (await ask(running, text(900)))[0].prompt_tokens
        count += 1
    stats = await engine.fetch_stats()
    assert stats is not None
    figures = stats["leases"]
    read = hit = whole_pages = 0
    for one, before in zip(leased, wrote, strict=True):
        usage, cached, lease = await ask(running, one, kept=True)
        written = before.prompt_tokens_details.cache_write_tokens
        assert usage.prompt_tokens_details.cached_tokens == written  # what one writes, the next one reads
        assert usage.prompt_tokens_details.cache_write_tokens == 0
        assert lease.startswith("kept")
        read, hit, whole_pages = read + written, hit + cached, whole_pages + written // PAGE * PAGE
    _, unleased, _ = await ask(running, other)
    share = figures["recomputed_tokens"] / tokens
    print(  # for the lab notebook
        f"\nflood: {count} prompts, {tokens} tokens, {tokens / PAGE / PAGES:.2f} caches; leased {read} tokens, "
        f"hit {hit} of {whole_pages} in whole pages; not leased: hit {unleased}; touches {figures['touches']}, found "
        f"{figures['touched_tokens']}, computed {figures['recomputed_tokens']} tokens, {share:.2%} of prefill; "
        f"failed {figures['touch_failures']}, lost {figures['lost']}"
    )
    assert hit >= 0.99 * whole_pages > 0
    assert unleased == 0
    assert figures["touches"] > 0
    assert share <= 0.02
    assert not figures["lost"]
    assert not figures["touch_failures"]

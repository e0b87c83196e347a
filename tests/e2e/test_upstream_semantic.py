"""Questions that mean the same in front of a hosted API: two gateways, one Redis, the real encoder and the real SDK."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai

from tests.fakes.redis_process import RedisProcess
from tests.fakes.server import Server, inside
from tests.fakes.upstream import StubUpstream, upstream, whole_chat
from tests.fakes.waiting import until

LIMIT_S = 60.0


def config(stub: StubUpstream) -> str:
    return f"""
[response_cache]
upstreams = "on"
[semantic_cache]
mode = "on"
judged = false
lookup_timeout_s = 10.0
[[upstreams]]
name = "up"
url = "{stub.url}/v1"
key = "sk-upstream"
models = ["up-*"]
"""


async def ask(client: openai.AsyncOpenAI, text: str, system: str = "Be brief.") -> tuple[str, str]:
    """What the cache had, and the answer. It is not kept."""
    turns: Any = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    raw = await client.chat.completions.with_raw_response.create(
        model="up-1", messages=turns, temperature=0, extra_headers={"Cache-Control": "no-store"}
    )
    return raw.headers["x-kvasir-cache"], raw.parse().choices[0].message.content or ""


async def test_what_one_gateway_was_told_another_one_gives_to_who_asks_in_other_words(
    tmp_path: Path, own_redis: RedisProcess
) -> None:
    async with upstream(whole_chat("Click on it."), whole_chat("Another answer.")) as stub:
        one, other = (
            Server(tmp_path / name, "--redis-url", own_redis.url, command="gateway", config=config(stub))
            for name in ("one", "other")
        )
        async with inside(one), inside(other), one.async_client() as here, other.async_client() as there:
            question: Any = [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "How do I reset it?"},
            ]
            await here.chat.completions.create(model="up-1", messages=question, temperature=0)

            async def is_known() -> bool:
                return await ask(there, "how can I reset it") == ("semantic", "Click on it.")

            await until(is_known, LIMIT_S)
            assert await ask(there, "how can I not reset it") == ("miss", "Another answer.")
            assert await ask(there, "how can I reset it", system="Be rude.") == ("miss", "Another answer.")
            (space,) = other.get("/admin/stats")["response_cache"]["semantic"]["spaces"]
            assert (space["owner"], space["model"], space["hits"]) == ("tenant:anonymous", "up-1", 1)

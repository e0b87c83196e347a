"""Other names of models, in every dialect."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from gateway.api.aliases import Aliases
from gateway.config import AliasSettings, TenantSettings
from tests.fakes.gateway import running
from tests.fakes.gemini import gemini
from tests.fakes.upstream import CHAT, upstream

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


def alias(name: str, target: str, *tenants: str) -> AliasSettings:
    return AliasSettings(name=name, target=target, **({"tenants": tenants} if tenants else {}))


def test_an_exact_name_wins_over_patterns_and_the_first_pattern_over_others() -> None:
    aliases = Aliases([alias("claude-*", "big"), alias("claude-haiku", "small"), alias("*", "rest", "t")])

    def target(name: str, tenant: str) -> str | None:
        found = aliases.find(name, tenant)
        return None if found is None else found.target

    assert target("claude-haiku", "t") == "small"
    assert target("claude-x", "t") == "big"
    assert (target("gpt", "t"), target("gpt", "u")) == ("rest", None)
    assert target("big", "u") is None
    assert target("claude-" + "x" * 300, "t") is None
    assert aliases.listed("u") == {"claude-haiku": ("small",)}


async def test_every_dialect_asks_for_a_model_by_another_name() -> None:
    async with running(aliases=[alias("claude-*", "demo"), alias("models-of-ours", "demo")]) as gateway:
        chat = await gateway.sdk().chat.completions.create(model="claude-x", messages=MESSAGES)
        assert chat.model == "demo"
        message = await gateway.anthropic().messages.create(model="claude-x", max_tokens=5, messages=MESSAGES)
        assert message.model == "demo"
        content = await gemini(gateway.url).aio.models.generate_content(model="claude-x", contents="Hi")
        assert content.model_version == "demo"
        assert "models-of-ours" in [model.id async for model in gateway.sdk().models.list()]
        with pytest.raises(openai.NotFoundError, match="gpt"):
            await gateway.sdk().chat.completions.create(model="gpt", messages=MESSAGES)


async def test_an_upstream_gets_the_name_that_is_meant() -> None:
    tenants = [TenantSettings(name=name, keys=(f"the-key-of-{name}",)) for name in ("a", "b")]
    async with upstream(CHAT) as stub:
        options: Any = {"upstreams": [stub.settings("up-1")], "tenants": tenants}
        async with running(aliases=[alias("best", "up-1", "a")], **options) as gateway:
            client = gateway.sdk("the-key-of-a")
            await client.chat.completions.create(model="best", messages=MESSAGES, user="u")
            assert stub.got[0].json == {"messages": MESSAGES, "model": "up-1", "user": "u"}
            with pytest.raises(openai.NotFoundError):
                await gateway.sdk("the-key-of-b").chat.completions.create(model="best", messages=MESSAGES)

"""What a client may ask of the cache, with the real openai SDK against `kvasir serve` and the demo model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.fakes.server import Server

CONFIG = """
[auth]
admin_keys = ["admin-key-123"]
[[tenants]]
name = "north"
keys = ["north-key-123"]
[[tenants]]
name = "south"
keys = ["south-key-123"]
[[namespaces]]
name = "handbook"
tenants = ["north", "south"]
[[namespaces]]
name = "norths"
tenants = ["north"]
"""
BOOK = " ".join(f"Rule {number}: a passenger of class {number % 3} may take {number % 5} bags." for number in range(60))


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two tenants and two namespaces."""
    flags = ("--kv-cache-bytes", str(64 << 20), "--dtype", "float32")
    with Server(tmp_path_factory.mktemp("tenants"), *flags, config=CONFIG) as running:
        yield running


def ask(server: Server, first: str, key: str = "north-key-123", **options: Any) -> openai.types.CompletionUsage:
    """The usage of an answer to a prompt that begins with `first`, which no other test uses, and the book."""
    answer = server.client(key).chat.completions.create(
        model="demo", messages=[{"role": "user", "content": f"{first} {BOOK}"}], max_tokens=2, temperature=0, **options
    )
    assert answer.usage is not None
    return answer.usage


def cached(usage: openai.types.CompletionUsage) -> int:
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens or 0


def test_a_key_and_a_salt_separate_the_requests_of_one_tenant(tenants: Server) -> None:
    scopes: list[dict[str, Any]] = [{}, {"prompt_cache_key": "users-1"}, {"extra_body": {"cache_salt": "users-1"}}]
    assert [cached(ask(tenants, "Keys.", **scope)) for scope in scopes] == [0, 0, 0]
    assert all(cached(ask(tenants, "Keys.", **scope)) > 100 for scope in scopes)


def test_tenants_share_what_they_put_into_a_namespace_and_nothing_else(tenants: Server) -> None:
    shared: Any = {"extra_headers": {"x-kvasir-namespace": "handbook"}}
    assert cached(ask(tenants, "Shared.", "north-key-123", **shared)) == 0
    assert cached(ask(tenants, "Shared.", "south-key-123", **shared)) > 100
    assert cached(ask(tenants, "Shared.", "south-key-123")) == 0
    with pytest.raises(openai.PermissionDeniedError):
        ask(tenants, "Shared.", "south-key-123", extra_headers={"x-kvasir-namespace": "norths"})

"""Who shares blocks with whom: tenants, keys, salts, and the namespaces that the operator named."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import NamespaceSettings, TenantSettings
from gateway.types import ANONYMOUS, Scope, Tenant
from tests.fakes.gateway import Gateway, running

TENANTS = tuple(TenantSettings(name=name, keys=(f"{name}-key-1",)) for name in ("north", "south", "west"))
SHARED = NamespaceSettings(name="shared", tenants=("north", "south"))
ASK: Any = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
COMPLETE: Any = {"model": "demo", "prompt": "hi"}

names = st.text(max_size=12) | st.sampled_from(["tenant:", "1:a;", ";key:1:b;", "north", "64:"])
scopes = st.builds(Scope, tenant=names, namespace=names, key=names, cache_salt=names)


@pytest.mark.parametrize("name", [spec.name for spec in fields(Scope)])
def test_every_field_of_a_scope_makes_another_salt(name: str) -> None:
    scope = Scope(tenant="a", namespace="b", key="c", cache_salt="d")
    salts = {scope.salt, *(replace(scope, **{name: value}).salt for value in ("", "x", "a", "b", "c", "d"))}
    assert len(salts) == 6  # one of the values is its own


@given(one=scopes, two=scopes)
def test_scopes_have_the_same_salt_only_when_they_are_the_same(one: Scope, two: Scope) -> None:
    assert (one.salt == two.salt) == (one == two)


def test_what_clients_made_up_cannot_be_read_in_a_salt() -> None:
    salt = Scope(tenant="acme", key="customer-4711", cache_salt="hunter2").salt
    assert "acme" in salt
    assert "4711" not in salt
    assert "hunter2" not in salt


async def salt_of(gateway: Gateway, body: dict[str, Any], tenant: str = "north", namespace: str | None = None) -> str:
    headers = {"Authorization": f"Bearer {tenant}-key-1"} | ({"x-kvasir-namespace": namespace} if namespace else {})
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    status, answer, _ = await gateway.post(path, body, headers=headers)
    assert status == 200, answer
    return gateway.pipeline.requests[-1].salt


async def test_the_sdks_key_and_salt_separate_in_chat_and_completions() -> None:
    async with running(tenants=TENANTS) as gateway, gateway.sdk("north-key-1") as client:
        await client.chat.completions.create(**ASK, prompt_cache_key="team")
        await client.chat.completions.create(**ASK, extra_body={"cache_salt": "team"})
        await client.completions.create(**COMPLETE, extra_body={"prompt_cache_key": "team"})
        await client.completions.create(**COMPLETE, extra_body={"cache_salt": "team"})
        keyed, salted, *both = [request.salt for request in gateway.pipeline.requests]
    assert both == [keyed, salted]
    assert len({keyed, salted, Tenant("north").salt}) == 3


async def test_the_same_key_of_two_tenants_is_not_the_same() -> None:
    async with running(tenants=TENANTS) as gateway:
        salts = {await salt_of(gateway, {**ASK, "prompt_cache_key": "k"}, tenant) for tenant in ("north", "south")}
    assert len(salts) == 2


async def test_a_request_that_asks_for_nothing_is_its_tenants() -> None:
    async with running(tenants=TENANTS, namespaces=(SHARED,)) as gateway:
        for body in (ASK, {**ASK, "prompt_cache_key": ""}, {**ASK, "prompt_cache_key": None}):
            assert await salt_of(gateway, body) == Tenant("north").salt


async def test_a_key_that_is_a_hint_separates_nothing_and_steers() -> None:
    hinting = TenantSettings(name="hinting", keys=("hinting-key-1",), cache_key="hint")
    async with running(tenants=(*TENANTS, hinting), namespaces=(SHARED,)) as gateway:
        keyed, salted = ASK | {"prompt_cache_key": "s1"}, ASK | {"prompt_cache_key": "s1", "cache_salt": "s"}
        assert await salt_of(gateway, keyed, "hinting") == Tenant("hinting").salt
        assert gateway.pipeline.requests[-1].affinity == "s1"
        assert await salt_of(gateway, salted, "hinting") == Scope(tenant="hinting", cache_salt="s").salt
        assert await salt_of(gateway, keyed, "north") == Scope(tenant="north", key="s1").salt
        assert gateway.pipeline.requests[-1].affinity == ""


async def test_a_tenants_own_setting_wins_over_that_of_all() -> None:
    strict = TenantSettings(name="strict", keys=("strict-key-1",), cache_key="separate")
    keyed = ASK | {"prompt_cache_key": "s1"}
    async with running(tenants=(*TENANTS, strict), cache_key="hint") as gateway:
        assert await salt_of(gateway, keyed, "north") == Tenant("north").salt
        assert await salt_of(gateway, keyed, "strict") == Scope(tenant="strict", key="s1").salt
    async with running(cache_key="hint") as gateway:
        assert await salt_of(gateway, keyed, namespace=None) == Tenant(ANONYMOUS).salt


async def test_tenants_that_ask_for_a_namespace_share_it_and_stay_apart_from_their_own() -> None:
    async with running(tenants=TENANTS, namespaces=(SHARED,)) as gateway:
        north, south = [await salt_of(gateway, ASK, tenant, "shared") for tenant in ("north", "south")]
        assert north == south == Scope(namespace="shared").salt
        keyed = {**ASK, "prompt_cache_key": "k"}
        assert await salt_of(gateway, keyed, "north", "shared") == await salt_of(gateway, keyed, "south", "shared")
        assert await salt_of(gateway, keyed, "north", "shared") not in (north, await salt_of(gateway, keyed, "north"))
        assert [request.tenant.name for request in gateway.pipeline.requests[:2]] == ["north", "south"]


@pytest.mark.parametrize("name", ["shared", "nowhere", "*", "north", "x" * 5000])
async def test_a_namespace_that_is_not_for_the_tenant_or_not_at_all_is_forbidden(name: str) -> None:
    async with running(tenants=TENANTS, namespaces=(SHARED,)) as gateway:
        client = gateway.sdk("west-key-1")
        with pytest.raises(openai.PermissionDeniedError) as refused:
            await client.chat.completions.create(**ASK, extra_headers={"x-kvasir-namespace": name})
        assert len(refused.value.message) < 400
        assert not gateway.pipeline.requests
        await client.close()


async def test_a_default_namespace_is_used_by_its_tenants_unless_they_want_their_own() -> None:
    namespaces = (NamespaceSettings(name="shared", tenants=("north",), default=True), replace_name(SHARED, "other"))
    async with running(tenants=TENANTS, namespaces=namespaces) as gateway:
        assert await salt_of(gateway, ASK) == Scope(namespace="shared").salt
        assert await salt_of(gateway, ASK, namespace="private") == Tenant("north").salt
        assert await salt_of(gateway, ASK, namespace="other") == Scope(namespace="other").salt
        assert await salt_of(gateway, ASK, "south") == Tenant("south").salt


def replace_name(settings: NamespaceSettings, name: str) -> NamespaceSettings:
    return settings.model_copy(update={"name": name})


async def test_a_namespace_for_everybody_is_for_every_tenant_and_for_an_open_server() -> None:
    public = (NamespaceSettings(name="public", tenants=("*",)),)
    async with running(tenants=TENANTS, namespaces=public) as gateway:
        salts = {await salt_of(gateway, ASK, tenant, "public") for tenant in ("north", "south", "west")}
    async with running(namespaces=public) as gateway:
        salts.add(await salt_of(gateway, ASK, namespace="public"))
        assert gateway.pipeline.requests[0].tenant.name == ANONYMOUS
    assert salts == {Scope(namespace="public").salt}

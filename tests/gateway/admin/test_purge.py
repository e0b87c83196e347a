"""POST /admin/cache/blocks/purge over HTTP, and `kvasir purge` which asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from gateway import cli
from gateway.config import AuthSettings, NamespaceSettings, TenantSettings
from gateway.types import Scope
from tests.fakes.gateway import Gateway, running
from tests.fakes.purged import COMPLETE, FakePurged

ADMIN = "admin-key-1"
GUARDED: Mapping[str, Any] = {
    "auth": AuthSettings(admin_keys=(ADMIN,)),
    "tenants": (TenantSettings(name="north", keys=("north-key-1",)),),
    "namespaces": (NamespaceSettings(name="handbook", tenants=("north",)),),
}


async def purge(gateway: Gateway, key: str = ADMIN, **body: Any) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    status, told, _ = await gateway.post("/admin/cache/blocks/purge", body, headers=headers)
    return status, told


async def test_all_engines_are_sent_the_beginning_of_the_salts_and_their_figures_come_back() -> None:
    engines = FakePurged("one"), FakePurged("two")
    async with running(engines=engines, **GUARDED) as gateway:
        status, told = await purge(gateway, tenant="gone-since")
        assert (status, told["complete"], told["in_use"]) == (200, True, [])
        assert told["engines"] == [{"name": name, **COMPLETE} for name in ("one", "two")]
        assert (await purge(gateway, namespace="handbook"))[0] == 200
    salts = [Scope(tenant="gone-since").salt, Scope(namespace="handbook").salt]
    assert [engine.asked for engine in engines] == [salts, salts]
    assert Scope(tenant="gone-since", key="k", cache_salt="s").salt.startswith(salts[0])


@pytest.mark.parametrize(
    ("engines", "in_use"),
    [
        ((FakePurged("one"), FakePurged("two", None)), []),
        ((FakePurged("one", {**COMPLETE, "complete": False, "left": 1}),), []),
        ((FakePurged("one", {"complete": False, "reason": "not over after 60 s"}),), []),
        ((FakePurged("one", {**COMPLETE, "owner": "a", "in_use": ["b", "c"]}), FakePurged("two", None)), ["b", "c"]),
        ((), []),
    ],
    ids=["away", "files left", "late", "folders in use", "no engine"],
)
async def test_what_may_be_left_is_named_and_no_success(engines: tuple[FakePurged, ...], in_use: list[str]) -> None:
    async with running(engines=engines, **GUARDED) as gateway:
        status, told = await purge(gateway, tenant="north")
    assert (status, told["complete"], told["in_use"]) == (502, False, in_use)
    assert told["error"]["message"] == told["message"]
    assert "Repeat the purge" in told["message"]
    assert [one["name"] for one in told["engines"] if "reason" in one] == [
        one.name for one in engines if one.report is None or "reason" in one.report
    ]


async def test_folders_of_engines_that_were_purged_themselves_are_no_reason() -> None:
    engines = [FakePurged(own, {**COMPLETE, "owner": own, "in_use": [other]}) for own, other in ("ab", "ba")]
    async with running(engines=engines, **GUARDED) as gateway:
        assert (await purge(gateway, tenant="north"))[0] == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "tenant"),
        ({"tenant": "north", "namespace": "handbook"}, "namespace"),
        ({"namespace": "nowhere"}, "namespace"),
        ({"tenant": ""}, "tenant"),
        ({"tenant": "a;tenant:1:b"}, "tenant"),
        ({"tenant": "north\n"}, "tenant"),
        ({"tenant": 1}, "tenant"),
    ],
)
async def test_no_engine_hears_of_what_is_no_single_owner(body: Mapping[str, Any], param: str) -> None:
    engine = FakePurged("one")
    async with running(engines=(engine,), **GUARDED) as gateway:
        status, told = await purge(gateway, **body)
    assert (status, told["error"]["param"], engine.asked) == (400, param, [])


async def test_only_an_admin_purges() -> None:
    engine = FakePurged("one")
    async with running(engines=(engine,), **GUARDED) as gateway:
        assert [(await purge(gateway, key, tenant="north"))[0] for key in ("north-key-1", "wrong-key")] == [403, 401]
    assert engine.asked == []


async def kvasir(*arguments: str) -> int:
    """In a thread of its own: the command has its own event loop."""
    return await asyncio.to_thread(cli.main, ["purge", *arguments])


async def test_the_command_shows_what_went_and_fails_when_something_may_be_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = FakePurged("one", {**COMPLETE, "owner": "a", "in_use": ["b"]}), FakePurged("two", None)
    monkeypatch.setenv("MY_ADMIN_KEY", ADMIN)
    async with running(engines=(one, two), **GUARDED) as gateway:
        where = ("--url", gateway.url, "--api-key-env", "MY_ADMIN_KEY")
        assert await kvasir("--tenant", "north", *where) == 1
        shown = capsys.readouterr()
        assert shown.out.splitlines() == [
            "one: complete: device 3 blocks, 300 bytes; files 0 blocks, 0 bytes; 1 leases",
            "two: NOT COMPLETE: It is away.",
            "NOT COMPLETE: a folder of blocks is in use by engine b, which did not answer",
        ]
        assert "Repeat the purge" in shown.err
        one.report = two.report = COMPLETE
        assert await kvasir("--namespace", "handbook", *where) == 0
        assert capsys.readouterr().err == ""
        assert await kvasir("--namespace", "nowhere", *where) == 1
        assert "no namespace of that name is configured" in capsys.readouterr().err
        assert await kvasir("--tenant", "north", "--url", gateway.url, "--api-key-env", "UNSET_KEY") == 1
        assert "needs an admin key" in capsys.readouterr().err
    assert await kvasir("--tenant", "north", *where) == 1
    assert "no answer from" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [(), ("--tenant", "a", "--namespace", "b")])
def test_the_command_wants_exactly_one_owner(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["purge", *arguments])
    assert ended.value.code == 2

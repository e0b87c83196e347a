"""The audit log: what is in it, what never is, and that it stays whole and small."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.admin import audit
from gateway.admin.audit import AuditLog
from gateway.api.routes import ROUTES
from gateway.config import AuthSettings, TenantSettings
from tests.fakes.gateway import FakePurged, Gateway, make_app, running

ADMIN, TENANT = "admin-key-1234", "tenant-key-1234"
KEYS: dict[str, Any] = {
    "auth": AuthSettings(admin_keys=(ADMIN,)),
    "tenants": (TenantSettings(name="north", keys=(TENANT,)),),
}
PURGE = "/admin/cache/blocks/purge"
WHO = hashlib.sha256(ADMIN.encode()).hexdigest()[:12]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def changes_of(gateway: Gateway, query: str = "", key: str = ADMIN) -> list[dict[str, Any]]:
    status, text, _ = await gateway.get(f"/admin/audit{query}", key)
    assert status == 200, text
    found: list[dict[str, Any]] = orjson.loads(text)["changes"]
    return found


def test_every_route_that_may_change_something_says_what_it_changes() -> None:
    """Or that it changes nothing: `changes` is then empty. A new route cannot forget the audit log."""
    own = [route for routes in make_app()[ROUTES].values() for route in routes if route.path.startswith("/admin")]
    assert [route.path for route in own if route.method != "GET" and route.changes is None] == []
    assert [route.path for route in own if route.method == "GET" and route.changes] == []
    assert len([route for route in own if route.changes]) >= 6


async def test_a_change_says_who_what_which_when_and_from_where() -> None:
    async with running(**KEYS, now=lambda: 1_700_000_000.5) as gateway:
        headers = {**bearer(ADMIN), "X-Request-Id": "mine"}
        status, _, _ = await gateway.post(PURGE, {"tenant": "north"}, headers=headers)
        (change,) = await changes_of(gateway)
    assert status == 200
    assert change == {
        "at_s": 1_700_000_000.5,
        "who": WHO,
        "from": "127.0.0.1",
        "what": "blocks purged",
        "which": {"tenant": "north"},
        "status": 200,
        "request_id": "mine",
    }


async def test_what_was_refused_has_changed_nothing_and_a_failure_may_have() -> None:
    async with running(**KEYS, engines=(FakePurged("engine-1", None),)) as gateway:
        for key, body in (("wrong", {"tenant": "north"}), (TENANT, {"tenant": "north"}), (ADMIN, {"tenant": "?"})):
            status, _, _ = await gateway.post(PURGE, body, headers=bearer(key))
            assert 400 <= status < 500
        assert await changes_of(gateway) == []
        await gateway.post(PURGE, {"tenant": "north"}, headers=bearer(ADMIN))
        assert [(one["status"], one["which"]) for one in await changes_of(gateway)] == [(502, {"tenant": "north"})]


async def test_a_dry_run_is_no_change_and_its_token_is_never_written() -> None:
    invalidate = "/admin/cache/invalidate"
    async with running() as gateway:
        _, answer, _ = await gateway.post(invalidate, {"tenant": "anonymous"})
        assert await changes_of(gateway) == []
        token = answer["confirm"]
        assert (await gateway.post(invalidate, {"tenant": "anonymous", "confirm": token}))[0] == 200
        (change,) = await changes_of(gateway)
    assert (change["who"], change["what"], change["which"]) == ("open", "answers removed", {"tenant": "anonymous"})
    assert token not in str(change)


async def test_the_latest_come_first_and_no_more_than_were_asked_for() -> None:
    async with running(**KEYS) as gateway:
        for number in range(5):
            await gateway.post(PURGE, {"tenant": f"tenant-{number}"}, headers=bearer(ADMIN))
        shown = [one["which"]["tenant"] for one in await changes_of(gateway, "?limit=2")]
        assert shown == ["tenant-4", "tenant-3"]
        assert (await gateway.get("/admin/audit?limit=0", ADMIN))[0] == 400
        assert (await gateway.get("/admin/audit", TENANT))[0] == 403


async def add(log: AuditLog, which: Mapping[str, Any]) -> None:
    await log.add("key created", which, who="open", where="", status=200, id_="r")


async def test_the_file_is_this_users_alone_and_is_rotated_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "MAX_BYTES", 2000)
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, lambda: 1.0)
    for number in range(100):
        await add(log, {"id": number})
    kept = [path, tmp_path / "audit.jsonl.1"]
    assert sorted(one.name for one in os.scandir(tmp_path)) == [one.name for one in kept]
    assert all(one.stat().st_size <= 2000 and stat.S_IMODE(one.stat().st_mode) == 0o600 for one in kept)
    numbers = [one["which"]["id"] for one in await log.latest(1000)]
    assert numbers == list(range(99, 99 - len(numbers), -1))
    assert len(numbers) > 10


async def test_a_line_that_was_cut_by_a_crash_hides_no_other_one(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, lambda: 1.0)
    await add(log, {"id": 1})
    path.write_bytes(path.read_bytes() + b'{"at_s": 1, "wh')
    await add(log, {"id": 2})
    assert [one["which"]["id"] for one in await log.latest(10)] == [2, 1]


async def test_what_cannot_be_written_is_counted_and_fails_no_request(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "missing" / "audit.jsonl", lambda: 1.0)
    await add(log, {})
    assert (log.lost, await log.latest(10)) == (1, [])


WRITER = """
import asyncio, sys
from pathlib import Path
from gateway.admin import audit
audit.MAX_BYTES = 20_000
async def main():
    log = audit.AuditLog(Path(sys.argv[1]), lambda: 1.0)
    for number in range(100):
        await log.add("x", {"id": sys.argv[2] + "-" + str(number)}, who="open", where="", status=200, id_="r" * 40)
    assert not log.lost
asyncio.run(main())
"""


async def test_two_workers_write_one_file_and_no_line_is_broken_while_it_is_rotated(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"

    def run(name: str) -> None:
        subprocess.run([sys.executable, "-c", WRITER, str(path), name], check=True)

    await asyncio.gather(*(asyncio.to_thread(run, name) for name in "ab"))
    lines = [line for one in (tmp_path / "audit.jsonl.1", path) for line in one.read_bytes().splitlines()]
    ids = [orjson.loads(line)["which"]["id"] for line in lines]
    assert len(ids) == len(set(ids)) > 100
    for name in "ab":  # each in its order, and the last ones there
        own = [int(one.partition("-")[2]) for one in ids if one.startswith(name)]
        assert own == list(range(100 - len(own), 100))

"""/admin/batches: jobs of all tenants and both APIs, in pages, and their end."""

from __future__ import annotations

from typing import Any

import orjson

from gateway.config import AuthSettings, TenantSettings
from tests.fakes.batch_sdk import ENDS, reached, row, settings, submit
from tests.fakes.gateway import Gateway, running

ADMIN = "admin-key-1234"
KEYS: dict[str, Any] = {
    "auth": AuthSettings(admin_keys=(ADMIN,)),
    "tenants": (TenantSettings(name="a", keys=("key-of-a",)), TenantSettings(name="b", keys=("key-of-b",))),
}
HEADERS = {"Authorization": f"Bearer {ADMIN}"}


async def shown(gateway: Gateway, query: str = "") -> dict[str, Any]:
    status, text, _ = await gateway.get(f"/admin/batches{query}", ADMIN)
    assert status == 200, text
    page: dict[str, Any] = orjson.loads(text)
    return page


async def test_batches_of_all_tenants_and_apis_are_shown_newest_first_in_pages() -> None:
    async with running(**settings(), **KEYS) as gateway:
        first = await submit(gateway.sdk("key-of-a"), row("a"), row("b"), row("bad", {"model": "demo"}))
        message = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
        asked: Any = [{"custom_id": "a", "params": message}]
        second = await gateway.anthropic("key-of-b").messages.batches.create(requests=asked)
        page = await shown(gateway)
        assert [one["id"] for one in page["batches"]] == [second.id, first.id]
        assert [one["tenant"] for one in page["batches"]] == ["b", "a"]
        assert not page["has_more"]
        gateway.worker.start()
        await reached(gateway.sdk("key-of-a"), first.id, *ENDS)
        head = await shown(gateway, "?limit=1")
        tail = await shown(gateway, f"?limit=1&after={second.id}")
    assert ([one["id"] for one in head["batches"]], head["has_more"]) == ([second.id], True)
    (ended,) = tail["batches"]
    assert (ended["id"], ended["status"], ended["errors"], tail["has_more"]) == (first.id, "completed", 0, False)
    counts = {"total": 3, "succeeded": 2, "failed": 1, "cancelled": 0, "expired": 0, "processing": 0}
    assert ended["counts"] == counts
    assert ended["created_s"] <= ended["ended_s"]


async def test_a_batch_of_any_tenant_is_cancelled_and_the_audit_log_says_so() -> None:
    async with running(**settings(), **KEYS) as gateway:
        batch = await submit(gateway.sdk("key-of-a"), row("a"))
        path = f"/admin/batches/{batch.id}/cancel"
        status, answer, _ = await gateway.post(path, {}, headers=HEADERS)
        assert (status, answer["status"]) == (200, "cancelling")
        gateway.worker.start()
        assert (await reached(gateway.sdk("key-of-a"), batch.id, *ENDS)).status == "cancelled"
        assert (await gateway.post(path, {}, headers=HEADERS))[0] == 400
        assert (await gateway.post(path, {}, headers={"Authorization": "Bearer key-of-a"}))[0] == 403
        _, text, _ = await gateway.get("/admin/audit", ADMIN)
    (change,) = orjson.loads(text)["changes"]
    assert (change["what"], change["which"]) == ("batch cancelled", {"id": batch.id})


async def test_what_is_no_batch_is_told() -> None:
    async with running(**settings(), **KEYS) as gateway:
        for name in ("batch_0", "x", "msgbatch_"):
            assert (await gateway.post(f"/admin/batches/{name}/cancel", {}, headers=HEADERS))[0] == 404
        status, text, _ = await gateway.get("/admin/batches?after=x", ADMIN)
    assert (status, orjson.loads(text)["error"]["param"]) == (400, "after")

"""/admin/tenants and /admin/keys over HTTP, and what such keys may do."""

from __future__ import annotations

import asyncio
import hmac
import time
from statistics import median
from typing import Any

import orjson
import pytest
from aiohttp.test_utils import make_mocked_request

from gateway.api import tenants as api_tenants
from gateway.api.tenants import Auth
from gateway.config import AuthSettings, TenantSettings
from gateway.errors import ForbiddenError, UnauthorizedError
from gateway.issued.directory import Directory
from tests.fakes.clock import Clock
from tests.fakes.gateway import LIMIT_S, Gateway, running
from tests.fakes.issued import MemoryIssued
from tests.fakes.pipeline import FakePipeline

ADMIN, NORTH = "admin-key-1234", "north-key-1234"
KEYS: dict[str, Any] = {
    "auth": AuthSettings(admin_keys=(ADMIN,)),
    "tenants": (TenantSettings(name="north", keys=(NORTH,)),),
}
ASK = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def make(gateway: Gateway, what: str, body: object, status: int = 201) -> Any:
    answered, answer, _ = await gateway.post(f"/admin/{what}", body, headers=bearer(ADMIN))
    assert answered == status, answer
    return answer


async def send(gateway: Gateway, method: str, path: str, body: object = None) -> tuple[int, Any]:
    async with gateway.session.request(method, gateway.url + path, json=body, headers=bearer(ADMIN)) as answer:
        return answer.status, await answer.json()


async def ask(gateway: Gateway, key: str, model: str = "demo") -> int:
    return (await gateway.post("/v1/chat/completions", {**ASK, "model": model}, headers=bearer(key)))[0]


async def test_a_key_works_at_once_is_shown_once_and_ends_at_once() -> None:
    async with running(**KEYS) as gateway:
        await make(gateway, "tenants", {"name": "south", "weight": 2, "priority": True})
        made = await make(gateway, "keys", {"tenant": "south", "name": "laptop"})
        assert await ask(gateway, made["key"]) == 200
        tenant = gateway.pipeline.requests[-1].tenant
        assert (tenant.name, tenant.weight, tenant.priority) == ("south", 2.0, True)
        _, listed, _ = await gateway.get("/admin/keys", ADMIN)
        assert made["key"] not in listed
        assert orjson.loads(listed)["keys"] == [{name: value for name, value in made.items() if name != "key"}]
        _, audit, _ = await gateway.get("/admin/audit", ADMIN)
        assert made["key"] not in audit
        assert [one["what"] for one in orjson.loads(audit)["changes"]] == ["key made", "tenant made"]
        assert (await send(gateway, "DELETE", f"/admin/keys/{made['id']}"))[0] == 200
        assert await ask(gateway, made["key"]) == 401
        assert (await send(gateway, "DELETE", f"/admin/keys/{made['id']}"))[0] == 404


async def test_a_key_expires() -> None:
    clock = Clock(1_700_000_000.0)
    async with running(**KEYS, now=clock) as gateway:
        made = await make(gateway, "keys", {"tenant": "north", "name": "laptop", "expires_s": clock() + 5})
        assert await ask(gateway, made["key"]) == 200
        clock.now_s += 5
        assert await ask(gateway, made["key"]) == 401
        await make(gateway, "keys", {"tenant": "north", "name": "laptop", "expires_s": clock()}, 400)


async def test_limits_of_a_tenant_hold_and_change() -> None:
    async with running(**KEYS) as gateway:
        await make(gateway, "tenants", {"name": "south", "requests_per_minute": 1})
        key = (await make(gateway, "keys", {"tenant": "south", "name": "laptop"}))["key"]
        assert [await ask(gateway, key) for _ in range(2)] == [200, 429]
        status, changed = await send(gateway, "PATCH", "/admin/tenants/south", {"requests_per_minute": None})
        assert status == 200
        assert changed == {"name": "south", "source": "admin", "models": []}
        assert await ask(gateway, key) == 200


async def test_limits_of_a_key_hold_beside_its_tenants_and_change() -> None:
    async with running(**KEYS) as gateway:
        await make(gateway, "tenants", {"name": "south", "requests_per_minute": 4})
        one = await make(gateway, "keys", {"tenant": "south", "name": "laptop", "requests_per_minute": 2})
        other = await make(gateway, "keys", {"tenant": "south", "name": "ci"})
        assert [await ask(gateway, one["key"]) for _ in range(3)] == [200, 200, 429]
        status, answer, headers = await gateway.post("/v1/chat/completions", ASK, headers=bearer(one["key"]))
        assert f"Rate limit reached for the key {one['id']} of south on requests per min" in answer["error"]["message"]
        assert (headers["x-ratelimit-limit-requests"], headers["Retry-After"]) == ("2", "30")
        path = f"/admin/keys/{one['id']}"
        status, changed = await send(
            gateway, "PATCH", path, {"requests_per_minute": 0, "max_in_flight": 9, "name": "desk"}
        )
        assert (status, changed["requests_per_minute"], changed["name"]) == (200, 0, "desk")
        assert [await ask(gateway, one["key"]) for _ in range(2)] == [200, 200], "nothing was kept of what was refused"
        status, answer, headers = await gateway.post("/v1/chat/completions", ASK, headers=bearer(one["key"]))
        assert (status, headers["x-ratelimit-limit-requests"]) == (429, "4")
        assert "Rate limit reached for south on" in answer["error"]["message"]
        assert await ask(gateway, other["key"]) == 429
        assert await ask(gateway, NORTH) == 200
        _, stats = await send(gateway, "GET", "/admin/stats")
        assert stats["limits"]["tenants"]["south"]["refused"] == {"requests": 4}
        assert set(stats["limits"]["tenants"]) == {"south"}
        status, changed = await send(gateway, "PATCH", path, {"requests_per_minute": None})
        assert (status, "requests_per_minute" in changed, changed["max_in_flight"]) == (200, False, 9)


async def test_requests_in_flight_of_a_key_are_limited_and_end() -> None:
    pipeline = FakePipeline(hold_after=asyncio.Event())
    async with running(pipeline, **KEYS) as gateway:
        made = await make(gateway, "keys", {"tenant": "north", "name": "laptop", "max_in_flight": 1})
        first = asyncio.create_task(ask(gateway, made["key"]))
        await asyncio.wait_for(pipeline.reached.wait(), LIMIT_S)
        assert await ask(gateway, made["key"]) == 429
        pipeline.hold_after.set()
        assert await first == 200
        await gateway.limits.close()
        assert await ask(gateway, made["key"]) == 200


async def test_only_allowed_models_are_listed_and_answered() -> None:
    async with running(**KEYS) as gateway:
        await make(gateway, "tenants", {"name": "south", "models": ["demo", "gpt-*"]})
        key = (await make(gateway, "keys", {"tenant": "south", "name": "laptop"}))["key"]
        narrow = (await make(gateway, "keys", {"tenant": "south", "name": "ci", "models": ["gpt-*"]}))["key"]
        assert await ask(gateway, key) == 200
        assert await ask(gateway, narrow) == 404
        body = {"model": "demo", "max_tokens": 5, "messages": ASK["messages"]}
        anthropic = {"x-api-key": narrow, "anthropic-version": "2023-06-01"}
        status, answer, _ = await gateway.post("/v1/messages", body, headers=anthropic)
        assert (status, answer["error"]["type"]) == (404, "not_found_error")
        gemini = {"contents": [{"parts": [{"text": "hi"}]}]}
        path = "/v1beta/models/demo:generateContent"
        status, answer, _ = await gateway.post(path, gemini, headers={"x-goog-api-key": narrow})
        assert (status, answer["error"]["status"]) == (404, "NOT_FOUND")
        for one, names in ((key, ["demo"]), (narrow, [])):
            _, listed, _ = await gateway.get("/v1/models", one)
            assert [model["id"] for model in orjson.loads(listed)["data"]] == names
        assert (await gateway.get("/v1/models/demo", narrow))[0] == 404
        assert (await gateway.post("/v1/batches", {}, headers=bearer(narrow)))[0] == 403


async def test_what_an_answer_was_to_another_key_is_not_sent_to_one_without_the_model() -> None:
    async with running(**KEYS) as gateway:
        narrow = (await make(gateway, "keys", {"tenant": "north", "name": "ci", "models": ["gpt-*"]}))["key"]
        body = orjson.dumps(ASK)
        for key, status in ((NORTH, 200), (NORTH, 200), (narrow, 404)):
            assert (await gateway.send(body, **bearer(key), **{"Content-Type": "application/json"}))[0] == status


async def test_the_files_tenants_stay_and_bad_requests_say_where() -> None:
    async with running(**KEYS) as gateway:
        answer = await make(gateway, "tenants", {"name": "north"}, 409)
        assert answer["error"]["param"] == "name"
        assert (await send(gateway, "PATCH", "/admin/tenants/north", {"weight": 2}))[0] == 409
        assert (await send(gateway, "DELETE", "/admin/tenants/north"))[0] == 409
        for body, param in (
            ({"name": "a b"}, "name"),
            ({"name": "a", "weight": 0}, "weight"),
            ({"name": "a", "models": ["x", ""]}, "models[1]"),
            ({"name": "a", "keys": ["mine-mine-mine"]}, "keys"),
        ):
            assert (await make(gateway, "tenants", body, 400))["error"]["param"] == param
        made = await make(gateway, "keys", {"tenant": "north", "name": "laptop", "budget": 1})
        path = f"/admin/keys/{made['id']}"
        for change, param in (
            ({"budget": 0}, "budget"),
            ({"budget_period": "week"}, "budget_period"),
            ({"max_in_flight": -1}, "max_in_flight"),
            ({"weight": 2}, "weight"),
            ({"tenant": "south"}, "tenant"),
            ({"name": None}, "name"),
            ({"expires_s": 1}, "expires_s"),
        ):
            status, answer = await send(gateway, "PATCH", path, change)
            assert (status, answer["error"]["param"]) == (400, param)
        assert (await send(gateway, "PATCH", "/admin/keys/key_none", {"budget": 1}))[0] == 404
        _, listed = await send(gateway, "GET", "/admin/keys")
        assert [(one["id"], one["budget"]) for one in listed["keys"]] == [(made["id"], 1)]
        for name in ("nobody", "no body"):
            await make(gateway, "keys", {"tenant": name, "name": "laptop", "max_in_flight": 1}, 404)
    async with running(auth=KEYS["auth"]) as gateway:
        await make(gateway, "tenants", {"name": "south"}, 409)


async def test_admin_is_refused_to_all_others_with_the_same_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 requests: every wrong key, whatever it is, is compared with all admin keys, digest by digest."""
    compared = [0]

    def counted(one: bytes, other: bytes) -> bool:
        assert len(one) == len(other) == 32
        compared[0] += 1
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(api_tenants, "compare_digest", counted)
    directory = Directory(MemoryIssued(), KEYS["tenants"], lambda: 1.0)
    secret, _ = await directory.make_key("north", "laptop", None, ())
    admins = tuple(f"{ADMIN}-{number}" for number in range(3))
    auth = Auth(AuthSettings(admin_keys=admins), KEYS["tenants"], directory)
    wrong = (admins[0][:-1], admins[0] + "x", "x")
    kinds = [({}, UnauthorizedError, 0), *((bearer(one), UnauthorizedError, 3) for one in wrong)]
    kinds += [(bearer(NORTH), ForbiddenError, 3), (bearer(secret), ForbiddenError, 3)]
    sent = [make_mocked_request("GET", "/admin/keys", headers) for headers, _, _ in kinds]
    refused = 0
    for number in range(10_000):
        _, error, comparisons = kinds[number % len(kinds)]
        before = compared[0]
        with pytest.raises(error):
            auth.check_admin(sent[number % len(kinds)])
        refused += compared[0] - before == comparisons
    assert refused == 10_000


@pytest.mark.slow
async def test_ten_thousand_requests_without_a_right_key_are_refused_in_a_time_that_does_not_tell_why() -> None:
    """Over HTTP, in turns, so that what else the machine does is in all of them: medians of 1,250 each. What is
    different by far more than noise would be a comparison that ends at the first wrong character."""
    admin = "admin-key-" + "0123456789abcdef" * 8
    keys = {**KEYS, "auth": AuthSettings(admin_keys=(admin, f"{admin}-2"))}
    async with running(**keys) as gateway:
        issued = (await gateway.post("/admin/keys", {"tenant": "north", "name": "ci"}, headers=bearer(admin)))[1]["key"]
        wrong = {f"{same} characters right": admin[:same] + "?" * (len(admin) - same) for same in (0, 1, 69, 137)}
        sent = {"no key": {}, **{name: bearer(key) for name, key in wrong.items()}}
        sent |= {"longer": bearer(f"{admin}?"), "a tenant's": bearer(NORTH), "issued": bearer(issued)}
        took_s: dict[str, list[float]] = {name: [] for name in sent}
        statuses: dict[str, set[int]] = {name: set() for name in sent}
        for _ in range(10_000 // len(sent)):
            for name, headers in sent.items():
                began_s = time.perf_counter()
                async with gateway.session.get(f"{gateway.url}/admin/keys", headers=headers) as answer:
                    await answer.read()
                took_s[name].append(time.perf_counter() - began_s)
                statuses[name].add(answer.status)
    medians = {name: median(times) for name, times in took_s.items()}
    print({name: f"{one * 1e6:.0f} us" for name, one in medians.items()})
    assert statuses == {name: {403} if name in ("a tenant's", "issued") else {401} for name in sent}
    assert max(medians.values()) <= 1.5 * min(medians.values()), medians

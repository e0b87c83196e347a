"""/admin/cache over HTTP: paging, looking at one, and removing what was shown."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.admin.cache import LIFE_S, chosen_by, token_for, token_time
from gateway.config import AuthSettings, TenantSettings
from gateway.errors import BadRequestError
from gateway.responses.entries import About, Chosen, Content
from tests.fakes.answers import FakeAnswers
from tests.fakes.gateway import Gateway, running

ADMIN, OTHER = "admin-key-1", "admin-key-2"
NOW_S = 10_000.0
TOLD = Content(40, 2, "stop", "Hello world", (("look", '{"a":1}'),))


def kept(number: int, owner: str = "tenant:north", model: str = "demo", age_s: float | None = None) -> About:
    """Each a second older than the one before."""
    return About(owner, f"{number:032x}", model, NOW_S - (number if age_s is None else age_s), NOW_S + 100, 10)


class Asking:
    """Asks as an admin."""

    def __init__(self, gateway: Gateway, clock: list[float]) -> None:
        self.gateway = gateway
        self.clock = clock

    async def get(self, path: str, status: int = 200) -> Any:
        found, text, _ = await self.gateway.get(f"/admin/cache{path}", ADMIN)
        assert found == status, text
        return json.loads(text)

    async def invalidate(self, status: int = 200, key: str = ADMIN, **body: Any) -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        found, told, _ = await self.gateway.post("/admin/cache/invalidate", body, headers=headers)
        assert found == status, told
        return told

    async def ids(self, query: str) -> list[int]:
        return [int(one["id"], 16) for one in (await self.get(query))["data"]]


@asynccontextmanager
async def asking(answers: FakeAnswers, *, content: bool = False) -> AsyncIterator[Asking]:
    clock = [NOW_S]
    auth = AuthSettings(admin_keys=(ADMIN, OTHER), admin_content=content)
    tenants = (TenantSettings(name="north", keys=("north-key-1",)),)
    async with running(auth=auth, tenants=tenants, answers=answers, now=lambda: clock[0]) as gateway:
        yield Asking(gateway, clock)


SOME = {kept(number, owner): TOLD for number in range(1, 6) for owner in ("tenant:north", "namespace:all")}


async def test_pages_are_in_order_and_have_every_answer_once() -> None:
    answers = FakeAnswers({kept(number, age_s=number // 3): TOLD for number in range(1, 24)})
    async with asking(answers) as admin:
        found, query = [], "?limit=5"
        for _ in range(5):
            page = await admin.get(query)
            found += [int(one["id"], 16) for one in page["data"]]
            query = f"?limit=5&after={page['next']}"
        assert page["next"] is None
    assert len(found) == 23
    assert [number // 3 for number in found] == sorted(number // 3 for number in found)
    assert set(found) == set(range(1, 24))


async def test_an_answer_is_listed_without_what_it_says() -> None:
    async with asking(FakeAnswers({kept(7, "namespace:all"): TOLD})) as admin:
        (one,) = (await admin.get(""))["data"]
    assert one == {
        "id": f"{7:032x}",
        "tenant": None,
        "namespace": "all",
        "model": "demo",
        "created_s": NOW_S - 7,
        "age_s": 7.0,
        "expires_s": NOW_S + 100,
        "bytes": 10,
    }


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ("?tenant=north", [1, 2, 3, 4, 5]),
        ("?namespace=all&older_than_s=4", [4, 5]),
        ("?namespace=all&younger_than_s=2", [1, 2]),
        (f"?tenant=north&id={3:032x}", [3]),
        ("?id=f", []),
        ("?model=other", []),
    ],
)
async def test_answers_are_chosen_in_the_url(query: str, ids: list[int]) -> None:
    async with asking(FakeAnswers(dict(SOME))) as admin:
        assert await admin.ids(query) == ids


async def test_stats_count_by_whose_they_are_and_model() -> None:
    answers = FakeAnswers({**SOME, kept(9, model="other"): TOLD, kept(8, age_s=-5): TOLD})
    async with asking(answers) as admin:
        told = await admin.get("/stats")
        assert (await admin.get("/stats?model=other"))["total"] == {"entries": 1, "bytes": 10, "oldest_s": 9.0}
    five = {"entries": 5, "bytes": 50, "oldest_s": 5.0}
    assert told["rows"] == [
        {"tenant": None, "namespace": "all", "model": "demo", **five},
        {"tenant": "north", "namespace": None, "model": "demo", **five},
        {"tenant": "north", "namespace": None, "model": "other", "entries": 1, "bytes": 10, "oldest_s": 9.0},
    ]
    assert told["total"] == {"entries": 11, "bytes": 110, "oldest_s": 9.0}


async def test_what_an_answer_says_is_shown_only_where_the_settings_allow_it() -> None:
    answers = FakeAnswers({kept(7): TOLD})
    path = f"/{7:032x}"
    async with asking(answers) as admin:
        one = await admin.get(path)
        assert (one["prompt_tokens"], one["completion_tokens"], one["finish"], one["tool_calls"]) == (40, 2, "stop", 1)
        assert "Hello" not in json.dumps(one)
        assert "auth.admin_content" in (await admin.get(f"{path}?content=true", 403))["error"]["message"]
        assert "is remembered under the id" in (await admin.get(f"/{8:032x}", 404))["error"]["message"]
    async with asking(answers, content=True) as admin:
        assert "content" not in await admin.get(path)
        content = (await admin.get(f"{path}?content=true"))["content"]
        assert content == {"text": "Hello world", "calls": [{"name": "look", "arguments": '{"a":1}'}]}


async def test_nothing_is_removed_before_it_is_confirmed() -> None:
    answers = FakeAnswers(dict(SOME))
    async with asking(answers) as admin:
        shown = await admin.invalidate(tenant="north", older_than_s=3)
        assert (shown["dry_run"], shown["would_remove"], shown["bytes"]) == (True, 3, 30)
        assert [int(one["id"], 16) for one in shown["latest"]] == [3, 4, 5]
        assert len(answers.kept) == 10
        told = await admin.invalidate(tenant="north", older_than_s=3, confirm=shown["confirm"])
        assert told == {"dry_run": False, "removed": 3}
        assert await admin.ids("?tenant=north") == [1, 2]
        assert len(answers.kept) == 7
        again = await admin.invalidate(tenant="north", older_than_s=3, confirm=shown["confirm"])
        assert again["removed"] == 0


async def test_what_was_remembered_after_the_dry_run_stays() -> None:
    answers = FakeAnswers(dict(SOME))
    async with asking(answers) as admin:
        shown = await admin.invalidate(tenant="north", older_than_s=4)
        admin.clock[0] += 60
        answers.kept[kept(20, age_s=-30)] = TOLD
        told = await admin.invalidate(tenant="north", older_than_s=4, confirm=shown["confirm"])
    assert told["removed"] == 2, "those that were old enough then"
    assert kept(20, age_s=-30) in answers.kept


async def test_a_token_is_for_one_choice_one_admin_and_a_short_time() -> None:
    answers = FakeAnswers(dict(SOME))
    async with asking(answers) as admin:
        token = (await admin.invalidate(tenant="north"))["confirm"]
        for key, body in (
            (ADMIN, {"namespace": "all"}),
            (ADMIN, {"tenant": "north", "id": "0"}),
            (OTHER, {"tenant": "north"}),
        ):
            refused = await admin.invalidate(400, key, confirm=token, **body)
            assert refused["error"]["param"] == "confirm"
        admin.clock[0] += LIFE_S + 1
        await admin.invalidate(400, tenant="north", confirm=token)
    assert len(answers.kept) == 10


async def test_everything_has_to_be_asked_for_by_name() -> None:
    answers = FakeAnswers(dict(SOME))
    async with asking(answers) as admin:
        assert (await admin.invalidate(400))["error"]["param"] == "everything"
        assert (await admin.invalidate(400, everything=True, tenant="north"))["error"]["param"] == "everything"
        shown = await admin.invalidate(everything=True)
        assert shown["would_remove"] == 10
        assert (await admin.invalidate(everything=True, confirm=shown["confirm"]))["removed"] == 10
    assert not answers.kept


@pytest.mark.parametrize(
    ("query", "param"),
    [("?id=xyz", "id"), ("?limit=0", "limit"), ("?after=1", "after"), ("?older_than_s=-1", "older_than_s")],
)
async def test_a_choice_that_makes_no_sense_is_refused(query: str, param: str) -> None:
    async with asking(FakeAnswers()) as admin:
        assert (await admin.get(query, 400))["error"]["param"] == param


async def test_the_pages_are_for_admins() -> None:
    async with asking(FakeAnswers(dict(SOME))) as admin:
        for path in ("", "/stats", f"/{1:032x}"):
            for key, status in ((None, 401), ("north-key-1", 403)):
                assert (await admin.gateway.get(f"/admin/cache{path}", key))[0] == status
        await admin.invalidate(403, "north-key-1", everything=True)


async def test_while_redis_is_away_nothing_is_told_that_may_be_wrong() -> None:
    async with asking(FakeAnswers(down=True)) as admin:
        for path in ("", "/stats", f"/{1:032x}"):
            await admin.get(path, 503)
        await admin.invalidate(503, everything=True)


KEPT = About("tenant:north", "ab" * 16, "demo", created_s=1000.0, expires_s=2000.0, num_bytes=5)


@pytest.mark.parametrize(
    ("values", "taken"),
    [
        ({}, True),
        ({"tenant": "north"}, True),
        ({"tenant": "nort"}, False),
        ({"namespace": "north"}, False),
        ({"model": "demo"}, True),
        ({"model": "dem"}, False),
        ({"id": "ab" * 16}, True),
        ({"id": "aba"}, True),
        ({"id": "b"}, False),
        ({"older_than_s": 100.0}, True),
        ({"older_than_s": 100.1}, False),
        ({"younger_than_s": 100.0}, True),
        ({"younger_than_s": 99.9}, False),
        ({"tenant": "north", "model": "demo", "id": "a", "older_than_s": 1.0, "younger_than_s": 101.0}, True),
    ],
)
def test_all_that_is_asked_for_has_to_be_so(values: dict[str, Any], taken: bool) -> None:
    assert chosen_by(values).takes(KEPT, 1100.0) is taken


def test_what_was_made_later_or_is_over_its_time_is_not_chosen() -> None:
    assert not Chosen().takes(KEPT, 999.0)
    assert not Chosen().takes(KEPT, 2000.0)


def test_an_answer_is_a_tenants_or_a_namespaces() -> None:
    shared = About("namespace:north", "ab" * 16, "demo", 1000.0, 2000.0, 5)
    assert chosen_by({"namespace": "north"}).takes(shared, 1100.0)
    assert not chosen_by({"tenant": "north"}).takes(shared, 1100.0)
    with pytest.raises(BadRequestError, match="not both"):
        chosen_by({"namespace": "north", "tenant": "north"})


def test_only_what_nothing_restricts_is_everything() -> None:
    assert chosen_by({}).everything
    for values in ({"tenant": ""}, {"model": ""}, {"id": "a"}, {"older_than_s": 1.0}, {"younger_than_s": 1e9}):
        assert not chosen_by(values).everything


TOKEN = token_for(b"key", "what", 1000.25)


def test_a_token_says_when_the_same_asker_was_shown_the_same() -> None:
    for now_s in (1000.25, 1000.25 + LIFE_S, 999.0):  # clocks of gateways differ
        assert token_time(TOKEN, b"key", "what", now_s) == 1000.25


@pytest.mark.parametrize(
    ("token", "key", "what", "now_s"),
    [
        (TOKEN, b"other", "what", 1001),
        (TOKEN, b"key", "more", 1001),
        (TOKEN, b"key", "what", 1001 + LIFE_S),
        (TOKEN, b"key", "what", 1000 - LIFE_S),
        ("2" + TOKEN[1:], b"key", "what", 2001),
        (TOKEN[:-1], b"key", "what", 1001),
        (TOKEN + "\n", b"key", "what", 1001),
        ("", b"key", "what", 1001),
        ("9" * 400 + TOKEN, b"key", "what", 1001),
    ],
)
def test_any_other_token_says_nothing(token: str, key: bytes, what: str, now_s: float) -> None:
    assert token_time(token, key, what, now_s) is None

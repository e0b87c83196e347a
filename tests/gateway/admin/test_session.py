"""A browser's session on /admin, and what attackers try: each test is one attack, beside the request done right."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http.cookies import SimpleCookie
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from gateway.admin.session import EVERY_S, MAX_ADDRESSES, TRIES, Tries
from gateway.api import sessions
from gateway.api.sessions import COOKIE, CSRF_HEADER, LIFE_S
from gateway.api.tenants import Auth
from gateway.config import AuthSettings, TenantSettings
from gateway.digests import key_digest
from gateway.errors import RateLimitError, UnauthorizedError
from gateway.issued.directory import Directory
from tests.fakes.gateway import Gateway, running
from tests.fakes.issued import MemoryIssued

KEYS = AuthSettings(admin_keys=("admin-key-1", "admin-key-2"))
TENANTS = (TenantSettings(name="north", keys=("north-key-1",)),)
DRY_RUN = "/admin/cache/invalidate"
START_S = 1_700_000_000.0


class Browser:
    """What one sends by itself: its cookie. The test client's own jar would not send it back for an address."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.cookie = ""
        self.csrf = ""

    async def log_in(self, key: str = "admin-key-1", **headers: str) -> tuple[int, SimpleCookie]:
        url = f"{self.gateway.url}/admin/session"
        async with self.gateway.session.post(url, json={"key": key}, headers=headers) as answer:
            if answer.status == 200:
                self.cookie, self.csrf = answer.cookies[COOKIE].value, (await answer.json())["csrf"]
            return answer.status, answer.cookies

    async def get(self, path: str = "/admin/stats", **headers: str) -> tuple[int, Any]:
        url = self.gateway.url + path
        sent = {"Cookie": f"{COOKIE}={self.cookie}", **headers}
        async with self.gateway.session.get(url, headers=sent) as answer:
            return answer.status, await answer.json()

    async def post(self, headers: Mapping[str, str], body: object = None) -> int:
        sent = {"Cookie": f"{COOKIE}={self.cookie}", **headers}
        body = {"everything": True} if body is None else body
        return (await self.gateway.post(DRY_RUN, body, headers=sent))[0]


@asynccontextmanager
async def logged_in(**options: Any) -> AsyncIterator[Browser]:
    async with running(**{"auth": KEYS, "tenants": TENANTS, **options}) as gateway:
        browser = Browser(gateway)
        assert (await browser.log_in())[0] == 200
        yield browser


async def test_a_session_reads_and_with_its_token_changes_what_the_key_does() -> None:
    async with logged_in() as browser:
        assert (await browser.get())[0] == 200
        assert await browser.post({CSRF_HEADER: browser.csrf}) == 200
        found = (await browser.get("/admin/session"))[1]
        assert (found["state"], found["csrf"]) == ("active", browser.csrf)


async def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites() -> None:
    async with running(auth=KEYS) as gateway:
        for headers, secure in (({}, False), ({"X-Forwarded-Proto": "https"}, True)):
            status, cookies = await Browser(gateway).log_in(**headers)
            cookie = cookies[COOKIE]
            assert status == 200
            assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "Strict", "/admin")
            assert (int(cookie["max-age"]), bool(cookie["secure"])) == (LIFE_S, secure)
            assert "admin-key" not in cookie.value


async def test_without_a_cookie_nothing_is_told() -> None:
    async with running(auth=KEYS) as gateway:
        browser = Browser(gateway)
        assert (await browser.get())[0] == 401
        assert await browser.post({}) == 401
        assert (await browser.get("/admin/session"))[1] == {"state": "none", "csrf": None, "ends_s": None}


async def test_a_forged_cookie_is_none() -> None:
    async with logged_in() as browser:
        ends_s, nonce, signature = browser.cookie.split(".")
        forged = sessions.begin(key_digest("another-key-1"), START_S)[0]
        for cookie in (
            f"{int(ends_s) + 1}.{nonce}.{signature}",
            f"{ends_s}.{nonce[::-1]}.{signature}",
            f"{ends_s}.{nonce}.{'0' * 64}",
            f"{ends_s}.{nonce}.",
            key_digest("admin-key-1").hex(),
            "admin-key-1",
            forged,
            "x" * 4000,
        ):
            browser.cookie = cookie
            assert (await browser.get())[0] == 401, cookie


async def test_a_session_ends_after_twelve_hours() -> None:
    now_s = START_S
    async with logged_in(now=lambda: now_s) as browser:
        now_s = START_S + LIFE_S - 1
        assert (await browser.get())[0] == 200
        now_s = START_S + LIFE_S
        assert (await browser.get())[0] == 401


async def test_another_gateway_with_the_key_takes_the_cookie_and_one_without_it_does_not() -> None:
    async with logged_in() as browser:
        async with running(auth=AuthSettings(admin_keys=("admin-key-3", "admin-key-1"))) as other:
            browser.gateway = other
            assert await browser.post({CSRF_HEADER: browser.csrf}) == 200
        async with running(auth=AuthSettings(admin_keys=("admin-key-2",))) as without:
            browser.gateway = without
            assert (await browser.get())[0] == 401


def test_a_session_ends_when_its_key_is_removed_while_the_gateway_runs() -> None:
    directory = Directory(MemoryIssued(), TENANTS, lambda: START_S)
    auth = Auth(KEYS, TENANTS, directory, lambda: START_S)
    cookie, _ = sessions.begin(key_digest("admin-key-1"), START_S)
    http = make_mocked_request("GET", "/admin/stats", headers={"Cookie": f"{COOKIE}={cookie}"})
    assert auth.check_admin(http) == key_digest("admin-key-1")
    auth.replace(AuthSettings(admin_keys=("admin-key-2",)), TENANTS)
    with pytest.raises(UnauthorizedError):
        auth.check_admin(http)


async def test_a_change_needs_the_token_of_this_very_session() -> None:
    async with logged_in() as browser:
        mine = browser.csrf
        for token in (None, "", "x", mine[:-1], mine.upper(), "\u00ff"):
            assert await browser.post({} if token is None else {CSRF_HEADER: token}) == 403, token
        cookie = browser.cookie
        await browser.log_in()
        browser.cookie, others = cookie, browser.csrf
        assert await browser.post({CSRF_HEADER: others}) == 403
        assert await browser.post({CSRF_HEADER: mine}) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
async def test_pages_of_other_origins_change_nothing_even_with_the_token(headers: dict[str, str]) -> None:
    async with logged_in() as browser:
        assert await browser.post({CSRF_HEADER: browser.csrf, **headers}) == 403
        assert (await browser.get(**headers))[0] == 403
        assert (await browser.log_in(**headers))[0] == 403
    async with running() as open_to_all:  # without any key: a page that somebody visits must not change it either
        assert await Browser(open_to_all).post(headers) == 403
        assert (await open_to_all.get("/admin/stats"))[0] == 200


async def test_this_servers_own_pages_pass_also_behind_a_proxy_that_changes_the_host() -> None:
    async with logged_in() as browser:
        own = browser.gateway.url.removeprefix("http://")
        for headers in (
            {"Origin": f"http://{own}"},
            {"Sec-Fetch-Site": "same-origin", "Origin": "https://kvasir.example"},
            {"Sec-Fetch-Site": "none"},
        ):
            assert await browser.post({CSRF_HEADER: browser.csrf, **headers}) == 200


async def test_an_ordinary_log_in_takes_admin_keys_only() -> None:
    async with running(auth=KEYS, tenants=TENANTS) as gateway:
        for key in ("north-key-1", "admin-key", "admin-key-11", " "):
            assert (await Browser(gateway).log_in(key))[0] == 401
    async with running(tenants=TENANTS) as closed:
        assert (await Browser(closed).log_in("north-key-1"))[0] == 401
        assert (await Browser(closed).get("/admin/session"))[1]["state"] == "closed"
    async with running() as open_to_all:
        assert (await Browser(open_to_all).get("/admin/session"))[1]["state"] == "open"


async def test_a_key_in_a_header_goes_before_a_cookie() -> None:
    async with logged_in() as browser:
        assert (await browser.get(Authorization="Bearer wrong-key-1"))[0] == 401
        assert await browser.post({"Authorization": "Bearer admin-key-2"}) == 200


async def log_out(browser: Browser) -> int:
    url = f"{browser.gateway.url}/admin/session"
    headers = {"Cookie": f"{COOKIE}={browser.cookie}", CSRF_HEADER: browser.csrf}
    async with browser.gateway.session.delete(url, headers=headers) as answer:
        return answer.status


async def test_who_has_the_cookie_of_a_session_that_was_logged_out_can_do_nothing_with_it_on_any_gateway() -> None:
    store = MemoryIssued()
    here, there = (Directory(store, TENANTS, lambda: START_S) for _ in range(2))
    async with (
        logged_in(directory=here, now=lambda: START_S) as browser,
        running(auth=KEYS, tenants=TENANTS, directory=there, now=lambda: START_S) as other,
    ):
        stolen, own = Browser(other), Browser(browser.gateway)
        stolen.cookie, stolen.csrf = browser.cookie, browser.csrf
        await own.log_in()
        assert (await stolen.get())[0] == 200
        assert await log_out(browser) == 200
        assert (await browser.get())[0] == 401
        await there.refresh()  # which a gateway does each second
        assert [(await stolen.get())[0], await stolen.post({CSRF_HEADER: stolen.csrf})] == [401, 401]
        assert (await stolen.get("/admin/session"))[1]["state"] == "none"
        assert (await own.get())[0] == 200, "another session of the same key goes on"


async def test_logging_out_makes_the_browser_forget_the_cookie() -> None:
    async with logged_in() as browser:
        url, headers = f"{browser.gateway.url}/admin/session", {"Cookie": f"{COOKIE}={browser.cookie}"}
        async with browser.gateway.session.delete(url, headers=headers) as answer:
            assert answer.status == 403
        async with browser.gateway.session.delete(url, headers={**headers, CSRF_HEADER: browser.csrf}) as answer:
            assert (answer.status, answer.cookies[COOKIE].value, answer.cookies[COOKIE]["max-age"]) == (200, "", "0")


async def test_a_script_is_not_answered_with_the_browsers_own_question_for_a_password() -> None:
    async with running(auth=KEYS) as gateway:
        for accept, challenge in (("application/json", "Bearer"), ("text/event-stream", "Bearer"), ("*/*", "Basic")):
            async with gateway.session.get(f"{gateway.url}/admin/stats", headers={"Accept": accept}) as answer:
                assert (answer.status, answer.headers["WWW-Authenticate"].split()[0]) == (401, challenge)


async def test_wrong_keys_are_slowed_down_and_a_key_in_a_header_still_opens() -> None:
    async with running(auth=KEYS, now=lambda: START_S) as gateway:
        browser = Browser(gateway)
        tried = [(await browser.log_in("wrong-key-1"))[0] for _ in range(TRIES + 5)]
        assert tried == [401] * TRIES + [429] * 5
        assert (await browser.log_in())[0] == 429
        assert (await gateway.get("/admin/stats", "admin-key-1"))[0] == 200


def test_another_address_is_not_slowed_down_and_the_table_is_bounded() -> None:
    now_s = START_S
    tries = Tries(lambda: now_s)
    for _ in range(TRIES):
        tries.check("a")
        tries.failed("a")
    tries.check("b")
    with pytest.raises(RateLimitError):
        tries.check("a")
    now_s += EVERY_S
    tries.check("a")
    for number in range(2 * MAX_ADDRESSES):
        tries.failed(str(number))
    assert len(tries._empty_s) == MAX_ADDRESSES

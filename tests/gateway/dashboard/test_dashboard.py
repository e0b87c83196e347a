"""The files of the dashboard, as a browser gets them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gateway.dashboard
from gateway.config import AuthSettings, TenantSettings
from tests.fakes.gateway import running

STATIC = Path(gateway.dashboard.__file__).parent / "static"
FILES = sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file())
KEYS = AuthSettings(admin_keys=("admin-key-1",))
TENANTS = (TenantSettings(name="north", keys=("north-key-1",)),)

MAKES_HTML = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(")
LEADS_AWAY = re.compile(r"\b(?:from|import|fetch|url|src|href|EventSource)\W{1,4}https?:")


async def test_every_file_is_served_without_a_key_with_its_type_and_a_strict_policy() -> None:
    async with running(auth=KEYS, tenants=TENANTS) as gateway:
        for name in ("", *(f"/{one}" for one in FILES)):
            status, _, headers = await gateway.get(f"/dashboard{name}")
            assert status == 200, name
            assert headers["Content-Type"].endswith("; charset=utf-8")
            policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
            assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
            assert {source for sources in policy.values() for source in sources.split()} == {"'none'", "'self'"}
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Referrer-Policy"] == "no-referrer"
        assert (await gateway.get("/dashboard/app.js"))[2]["Content-Type"].startswith("text/javascript")


async def test_a_file_that_has_not_changed_is_not_sent_again() -> None:
    async with running() as gateway:
        url = f"{gateway.url}/dashboard/app.js"
        async with gateway.session.get(url) as answer:
            etag = answer.headers["ETag"]
        async with gateway.session.get(url, headers={"If-None-Match": f'"other", {etag}'}) as answer:
            assert (answer.status, await answer.read()) == (304, b"")
        async with gateway.session.get(url, headers={"If-None-Match": '"other"'}) as answer:
            assert answer.status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/dashboard/../__init__.py",
        "/dashboard/..%2f__init__.py",
        "/dashboard/%2e%2e/__init__.py",
        "/dashboard/pages/../../__init__.py",
        "/dashboard//etc/passwd",
        "/dashboard/pages",
        "/dashboard/%00",
        "/dashboard/app.js/",
    ],
)
async def test_nothing_but_these_files_is_served(path: str) -> None:
    async with running() as gateway:
        status, text, _ = await gateway.get(path)
        assert status == 404
        assert "root:" not in text
        assert "def routes" not in text


async def test_browsers_are_led_to_the_dashboard_and_programs_are_not() -> None:
    async with running() as gateway:
        for path in ("/", "/dashboard/"):
            async with gateway.session.get(gateway.url + path, headers={"Accept": "text/html,*/*"}) as answer:
                assert (answer.status, answer.url.path, answer.content_type) == (200, "/dashboard", "text/html")
        async with gateway.session.get(gateway.url, headers={"Accept": "text/html"}, allow_redirects=False) as answer:
            assert answer.status == 303
        for accept in ("*/*", "application/json", ""):
            async with gateway.session.get(gateway.url, headers={"Accept": accept}) as answer:
                assert answer.content_type == "text/plain"


def test_the_files_are_small_and_come_from_nowhere_else() -> None:
    assert sum((STATIC / name).stat().st_size for name in FILES) < 250_000
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=|https?:|//", page.lower())
    for name in FILES:
        if name.endswith((".js", ".css")) and not name.startswith("vendor/"):
            text = (STATIC / name).read_text()
            for bad in (MAKES_HTML, LEADS_AWAY):
                assert not bad.search(text), f"{name}: {bad.pattern}"

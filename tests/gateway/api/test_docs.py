"""The two pages that tell what the server takes and answers."""

from __future__ import annotations

import json
import shlex
from html.parser import HTMLParser
from typing import Any

import aiohttp
import pytest

from gateway.api.docs import curl
from gateway.api.middleware import DIALECTS
from gateway.api.openapi import document, template
from gateway.api.routes import ROUTES
from gateway.config import TenantSettings
from tests.fakes.gateway import make_app, running

LISTED = {name: [one for one in own if not one.refuses] for name, own in make_app()[ROUTES].items()}
EVERY = [route for own in LISTED.values() for route in own]
VOID = {"meta", "link", "br", "img", "input"}


class Page(HTMLParser):
    """Holds a page's ids, links, text and what it loads; raises for tags that are not closed as they were opened."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        values = dict(attrs)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values["href"]] if tag == "a" else []
        if tag in ("script", "link", "img", "iframe") or "src" in values:
            self.loaded.append(tag)
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


async def test_the_document_is_served_to_everybody() -> None:
    async with running(tenants=[TenantSettings(name="a", keys=("secret-key",))]) as gateway:
        status, text, headers = await gateway.get("/openapi.json")
        assert (status, headers["Content-Type"]) == (200, "application/json")
        assert json.loads(text) == json.loads(json.dumps(document(LISTED, DIALECTS, "0.0.test")))
        page = await gateway.get("/docs")
    assert page[0] == 200
    assert "secret-key" not in text + page[1]


async def test_the_page_shows_every_route_and_parameter_and_loads_nothing() -> None:
    async with running() as gateway:
        _, source, headers = await gateway.get("/docs")
        url = gateway.url
    page = Page(source)
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert page.loaded == []
    assert len(page.ids) == len(set(page.ids))
    assert {link for link in page.links if link.startswith("#")} == {f"#{one}" for one in page.ids}
    for route in EVERY:
        assert f"{route.method} {template(route.path)}" in page.text
        for parameter in [*(route.parameters or {}).values(), *route.query.values()]:
            assert parameter.does.replace("`", "") in page.text
    assert f"curl -X POST {url}/v1/chat/completions" in page.text
    assert "kvasir.invalid" not in source


@pytest.mark.parametrize("host", ["a\"><script>alert('x')</script>", "a;rm -rf $HOME", "a'b", "a`b`"])
async def test_a_host_that_is_none_gets_into_no_page(host: str) -> None:
    async with running() as gateway:
        for path in ("/docs", "/"):
            async with gateway.session.get(gateway.url + path, headers={aiohttp.hdrs.HOST: host}) as answer:
                assert answer.status == 200
                text = await answer.text()
                assert host not in text
                assert "http://localhost" in text


async def test_the_front_page_points_to_both() -> None:
    async with running() as gateway:
        page = (await gateway.get("/"))[1]
        assert f"{gateway.url}/docs" in page
        assert f"{gateway.url}/openapi.json" in page


@pytest.mark.parametrize("route", EVERY, ids=lambda one: f"{one.method} {one.path}")
def test_the_commands_are_what_a_shell_takes_for_one(route: Any) -> None:
    words = shlex.split(curl(route, {"Authorization": "Bearer KEY"}, "http://h:1"))
    assert words[0] == "curl"
    (url,) = [word for word in words if word.startswith("http://h:1/")]
    assert "{" not in url
    assert ("Authorization: Bearer KEY" in words) == (route.key != "none")
    if route.example is not None:
        assert json.loads(words[words.index("-d") + 1]) == route.example

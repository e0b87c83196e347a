"""A real Chromium that looks at the dashboard of a server. `.ci/debian.sh` and `.ci/clients.sh` install what it needs;
tests with MARKS are skipped without."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.server import ADMIN_KEY, Server

CHROMIUM = shutil.which("chromium")
AXE = Path(__file__).parents[2] / ".clients/node_modules/axe-core/axe.min.js"
MARKS = (
    pytest.mark.skipif(find_spec("playwright") is None, reason="playwright is not there; .ci/debian.sh installs it"),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not there; .ci/debian.sh installs it"),
    pytest.mark.skipif(not AXE.exists(), reason="axe-core is not there; .ci/clients.sh installs it"),
)
LIMIT_MS = 60_000
MOST_TABS = 80
SHOWN = """before => document.title !== before
    && document.title === `${document.querySelector("#page h1")?.innerText} · Kvasir`
    && !document.querySelector("#page").innerText.includes("Loading")"""
"""Whether there is another page than before, and its heading is that of the document."""


@asynccontextmanager
async def chromium() -> AsyncIterator[Any]:
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, timeout=LIMIT_MS)
        yield browser
        await browser.close()


class Visit:
    """A page in a browser of its own, and what went wrong in it."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url
        self.problems: list[str] = []
        page.on("console", lambda said: self._note(said.type in ("error", "warning"), f"console: {said.text}"))
        page.on("pageerror", lambda error: self._note(True, f"exception: {error}"))
        page.on("request", lambda request: self._note(not request.url.startswith(url), f"outside: {request.url}"))

    def _note(self, wrong: bool, what: str) -> None:
        if wrong:
            self.problems.append(what)

    async def open(self, name: str = "overview") -> None:
        await self.page.goto(f"{self.url}/dashboard#/{name}")
        await self.page.wait_for_selector("#page h1")

    async def pages(self) -> list[tuple[str, str]]:
        """Name and address of each page of the navigation."""
        links = await self.page.locator("#pages a").all()
        return [(await link.inner_text(), str(await link.get_attribute("href"))) for link in links]

    async def turn_to(self, address: str) -> str:
        """The heading of that page, once it is there."""
        before = await self.page.title()
        same = await self.page.locator(f'#pages a[href="{address}"][aria-current]').count()
        await self.page.click(f'#pages a[href="{address}"]')
        await self.page.wait_for_function(SHOWN, arg="" if same else before)
        return str(await self.page.inner_text("#page h1"))

    async def axe(self) -> list[str]:
        """Violations of the rules for accessible pages. Runs outside of the page's policy for scripts."""
        await self.page.evaluate(AXE.read_text(encoding="utf-8"))
        found = await self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [f"{one['id']}: {[node['html'][:200] for node in one['nodes'][:3]]}" for one in found["violations"]]

    async def focus_by_tab(self, selector: str) -> None:
        for _ in range(MOST_TABS):
            await self.page.keyboard.press("Tab")
            if await self.page.evaluate("one => document.activeElement.matches(one)", selector):
                return
        raise AssertionError(f"no key leads to {selector}")


@asynccontextmanager
async def visit(
    browser: Any, server: Server, *, log_in: bool = True, width: int = 1440, **more: Any
) -> AsyncIterator[Visit]:
    """Fails if the page met an error, an address that is not this server's, or its policy (which is an error, too)."""
    context = await browser.new_context(viewport={"width": width, "height": 900}, **more)
    context.set_default_timeout(LIMIT_MS)
    try:
        if log_in:
            await context.request.post(f"{server.url}/admin/session", data={"key": ADMIN_KEY})
        found = Visit(await context.new_page(), server.url)
        yield found
        assert found.problems == []
    finally:
        await context.close()

"""Screenshots of every page of the dashboard into docs/screenshots: `python -m tests.bench.screenshots`.

Starts a `kvasir serve` with the demo model, sends the traffic of tests/fakes/demo_traffic.py, and takes pictures in
Debian's Chromium (`.ci/debian.sh` installs it) as WebP of less than MAX_BYTES each.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from playwright.async_api import Page, async_playwright

from tests.fakes import demo_traffic
from tests.fakes.demo_traffic import CONFIG, HOSTILE, TENANTS
from tests.fakes.server import ADMIN_KEY, Server, inside

FOLDER = Path(__file__).parents[2] / "docs/screenshots"
MAX_BYTES = 100_000
QUALITIES = (85, 70, 55, 40)
SCREEN, PHONE = {"width": 1280, "height": 800}, {"width": 360, "height": 780}
MOST_PX = 1000
"""Of a page's height, that a picture shows."""
ROUNDS = 8


async def chat(page: Page) -> None:
    await page.fill("[name=key]", TENANTS["borealis"])
    await page.fill("[name=model]", "demo")
    await page.click("summary:text-is('Options')")
    await page.fill("[name=max_tokens]", "40")
    await page.click("summary:text-is('Options')")
    for number, text in enumerate(("Who was the first to see the ship?", "And what did he say of it?")):
        await page.fill("[name=text]", text)
        await page.keyboard.press("Control+Enter")
        await page.wait_for_selector(f"article.answer[aria-busy=false] >> nth={number}")
    await page.wait_for_function("() => document.querySelectorAll('article.answer dl')[1].innerText.includes('$')")


async def compare(page: Page) -> None:
    turns = [{"role": "user", "content": "When is the next berth free?"}]
    one = [
        {"role": "system", "content": f"It is {day} November, 09:00. You answer for the harbour office."}
        for day in (24, 25)
    ]
    await page.click("summary:text-is('Compare two requests')")
    for name, system in zip("ab", one, strict=True):
        await page.fill(f"[name={name}]", json.dumps({"model": "demo", "messages": [system, *turns]}, indent=1))
    await page.click("button:text-is('Compare')")
    await page.wait_for_selector("section[aria-label=Verdict]")
    await page.click("summary:text-is('Compare two requests')")


FIRST = {"playground": chat, "explain": compare}
"""What is done on a page before its picture is taken."""


async def picture(page: Page, file: Path) -> int:
    """Writes the best one that is small enough. Its bytes."""
    await page.evaluate("document.activeElement.blur()")
    size: dict[str, Any] = await page.evaluate(
        "({width: innerWidth, height: document.documentElement.scrollHeight})",
    )
    clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], MOST_PX), "scale": 1}
    devtools = await page.context.new_cdp_session(page)
    for quality in QUALITIES:
        options = {"format": "webp", "quality": quality, "clip": clip, "captureBeyondViewport": True}
        shot = base64.b64decode((await devtools.send("Page.captureScreenshot", options))["data"])
        if len(shot) < MAX_BYTES:
            await asyncio.to_thread(file.write_bytes, shot)
            return len(shot)
    raise SystemExit(f"{file.name} has {len(shot)} bytes")


async def pictures(url: str, folder: Path) -> None:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"))
        for suffix, viewport, colours in (("", SCREEN, "light"), ("-phone", PHONE, "dark")):
            context = await browser.new_context(viewport=viewport, color_scheme=colours)
            await context.request.post(f"{url}/admin/session", data={"key": ADMIN_KEY})
            page = await context.new_page()
            await page.goto(f"{url}/dashboard")
            await page.wait_for_selector("#page h1")
            names = [str(await link.get_attribute("data-page")) for link in await page.locator("#pages a").all()]
            for name in names[:1] if suffix else names:
                await page.goto(f"{url}/dashboard#/{name}")
                await page.wait_for_selector(f"#pages a[data-page={name}][aria-current=page]")
                await page.wait_for_timeout(1500)  # charts are drawn a moment after their figures
                if name in FIRST:
                    await FIRST[name](page)
                size = await picture(page, folder / f"{name}{suffix}.webp")
                print(f"{name}{suffix}.webp: {size:,} bytes")
            await context.close()
        await browser.close()


async def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    config = CONFIG.replace(HOSTILE, "harbour")
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), "--dtype", "float32", "--kv-cache-bytes", str(64 << 20), config=config)
        async with inside(server):
            await demo_traffic.send(server.url, ROUNDS, alias="harbour")
            await demo_traffic.batch(server.url, 20)
            await demo_traffic.batch(server.url, 5, tenant="atlas")
            await pictures(server.url, FOLDER)


if __name__ == "__main__":
    asyncio.run(main())

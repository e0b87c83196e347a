"""docs/screenshots has every page of the dashboard, and what docs show of it is there."""

from __future__ import annotations

import re
from pathlib import Path

import gateway.dashboard

ROOT = Path(__file__).parents[3]
PICTURES = {path.name: path.read_bytes() for path in (ROOT / "docs/screenshots").iterdir()}
APP = (Path(gateway.dashboard.__file__).parent / "static/app.js").read_text(encoding="utf-8")
MAX_BYTES = 100_000


def test_every_page_has_a_small_screenshot() -> None:
    """`python -m tests.bench.screenshots` makes them."""
    pages = re.findall(r'^  \["(\w+)", "', APP.split("const PAGES = [", 1)[1].split("];", 1)[0], re.MULTILINE)
    assert pages
    assert {f"{page}.webp" for page in pages} <= PICTURES.keys()
    assert PICTURES.keys() <= {f"{page}{suffix}.webp" for page in pages for suffix in ("", "-phone")}
    for name, picture in PICTURES.items():
        assert (picture[:4], picture[8:12]) == (b"RIFF", b"WEBP"), name
        assert 5_000 < len(picture) < MAX_BYTES, name


def test_the_operators_page_shows_some_that_are_there() -> None:
    shown = re.findall(r"!\[[^\]]+\]\(screenshots/([^)]+)\)", (ROOT / "docs/operators.md").read_text(encoding="utf-8"))
    assert len(shown) >= 2
    assert set(shown) <= PICTURES.keys()

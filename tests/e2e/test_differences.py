"""The list of what does not hold for replicas is true, and the documentation has it."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.differences import DIFFERENT, PAGES, REFUSED

ROOT = Path(__file__).parents[2]


def test_every_test_that_is_skipped_with_replicas_exists() -> None:
    source = "\n".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    assert not [name for name in DIFFERENT if f"def {name}(" not in source]


def test_the_documentation_says_what_differs() -> None:
    page = (ROOT / "docs/fleet.md").read_text()
    assert not [reason for reason in {PAGES, *REFUSED} if reason not in page]

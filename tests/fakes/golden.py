"""Transcripts kept under tests/golden: what is new in every answer (ids, times) is replaced, all else is compared."""

from __future__ import annotations

import re
from pathlib import Path

GOLDEN = Path(__file__).parent.parent / "golden"

_NEW = (
    (r"resp_[0-9a-f]{32}", "resp_ID"),
    (r"\b(msg|fc|fco|rs)_[0-9a-f]{32}", r"\1_ID"),
    (r"\b(call|toolu)_[0-9a-f]{24}", r"\1_ID"),
    (r"\breq_[0-9a-f]{32}", "req_ID"),
    (r'("responseId": ?)"[^"]+"', r'\1"ID"'),
    (r'"(created_at|completed_at)":[0-9]+', r'"\1":0'),
)


def assert_golden(name: str, transcript: str) -> None:
    """Compares with the file of this name, byte for byte. One that is missing is written, and fails the test."""
    for pattern, placeholder in _NEW:
        transcript = re.sub(pattern, placeholder, transcript)
    file = GOLDEN / name
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(transcript, encoding="utf-8")
        raise AssertionError(f"{file} was written; read it, and run again")
    assert transcript == file.read_text(encoding="utf-8")

"""How far a batch is, in words."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final, TextIO

from gateway.client.screen import clean

SHOWN_ERRORS: Final = 10

_FILES: Final = (("input", "input_file_id"), ("output", "output_file_id"), ("errors", "error_file_id"))


class Progress:
    """A line for each change; on a terminal in place of the one before. Used as a context."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._last = ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._out.isatty():
            self._out.write("\n")

    def show(self, batch: dict[str, Any]) -> None:
        """How far it is now."""
        if (text := line(batch)) != self._last:
            self._out.write(f"\r\033[K{text}" if self._out.isatty() else f"{text}\n")
            self._out.flush()
            self._last = text


def line(batch: dict[str, Any]) -> str:
    counts = batch["request_counts"]
    return f"{batch['id']} {batch['status']}: {counts['completed']} of {counts['total']}, {counts['failed']} failed"


def list_row(batch: dict[str, Any]) -> str:
    """When it was created, in UTC, and for which model, if that is known."""
    created = datetime.fromtimestamp(batch["created_at"], UTC).strftime("%Y-%m-%d %H:%M")
    return f"{created}  {clean(batch['model'] or '-')}  {line(batch)}"


def details(batch: dict[str, Any]) -> str:
    """Progress, tokens, files and errors."""
    usage, lines = batch["usage"], [line(batch)]
    if usage["total_tokens"]:
        cached = usage["input_tokens_details"]["cached_tokens"]
        lines.append(f"  tokens   {usage['input_tokens']} in, {cached} of them cached; {usage['output_tokens']} out")
    lines += [f"  {name:<8} {batch[key]}" for name, key in _FILES if batch[key]]
    for one in (batch["errors"] or {"data": []})["data"][:SHOWN_ERRORS]:
        place = "" if one["line"] is None else f"line {one['line']}: "
        lines.append(f"  error    {place}{one['message']}")
    return "\n".join(lines)

"""How far a batch is, in words, and as a bar."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, TextIO

BAR_CHARS: Final = 30
SHOWN_ERRORS: Final = 10

_FILES: Final = (("input", "input_file_id"), ("output", "output_file_id"), ("errors", "error_file_id"))


class Progress:
    """A bar on a terminal; anywhere else a line for each change. Used as a context."""

    def __init__(self, out: TextIO, now: Callable[[], float]) -> None:
        self._out = out
        self._now = now
        self._began_s = now()
        self._bar = out.isatty()
        self._last = ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar and self._last:
            self._out.write("\n")

    def show(self, batch: dict[str, Any]) -> None:
        """How far it is now."""
        text = line(batch)
        if self._bar:
            text = f"{_bar(batch['request_counts'])} {text}, {self._now() - self._began_s:.0f} s"
            self._out.write(f"\r{text}{' ' * (len(self._last) - len(text))}")
        elif text != self._last:
            self._out.write(f"{text}\n")
        self._out.flush()
        self._last = text


def _bar(counts: Mapping[str, int]) -> str:
    done = counts["completed"] + counts["failed"]
    full = BAR_CHARS * done // counts["total"] if counts["total"] else 0
    return f"[{'#' * full}{'.' * (BAR_CHARS - full)}]"


def _printed(text: str) -> str:
    """Without what a terminal would act upon: names of models are written by whoever made the batch."""
    return "".join([one if one.isprintable() else one.encode("unicode_escape").decode() for one in text])


def line(batch: dict[str, Any]) -> str:
    counts = batch["request_counts"]
    return f"{batch['id']} {batch['status']}: {counts['completed']} of {counts['total']}, {counts['failed']} failed"


def listed(batch: dict[str, Any]) -> str:
    """A line of a list: when it was made, in UTC, and for which model, where that is known."""
    made = datetime.fromtimestamp(batch["created_at"], UTC).strftime("%Y-%m-%d %H:%M")
    return f"{made}  {_printed(batch['model'] or '-')}  {line(batch)}"


def told(batch: dict[str, Any]) -> str:
    """All that is worth reading of it."""
    usage, lines = batch["usage"], [line(batch)]
    if usage["total_tokens"]:
        cached = usage["input_tokens_details"]["cached_tokens"]
        lines.append(f"  tokens   {usage['input_tokens']} in, {cached} of them cached; {usage['output_tokens']} out")
    lines += [f"  {name:<8} {batch[key]}" for name, key in _FILES if batch[key]]
    for one in (batch["errors"] or {"data": []})["data"][:SHOWN_ERRORS]:
        place = "" if one["line"] is None else f"line {one['line']}: "
        lines.append(f"  error    {place}{one['message']}")
    return "\n".join(lines)

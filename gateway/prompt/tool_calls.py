"""Parses tool calls out of a stream: chunks of text in, chunks of text and of calls out.

A call starts when it is certain: the name is that of a callable tool, and the arguments begin. Until then everything is
held back, with the blanks in front of it, and is released as text, unchanged, when it is no call. Arguments are
streamed as the model wrote them, from their "{" to its "}". The result does not depend on how the text is chunked.

A name that may not be called makes no call, in any style: an app looks functions up by name, and what it did not
offer, or took back for this answer, is nothing that it could run. Stop strings are looked for in text alone, because
arguments that end in the middle are of no use. Knows no tokens. The neighbours are reader.py, which gives the text, and
tool_styles.py, which says how a model writes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from gateway.prompt.decode import StopStrings
from gateway.prompt.json_scan import (
    BLANKS,
    MAX_BLANKS,
    Braces,
    NoMatchError,
    Scan,
    expect,
    read_string,
    skip_blanks,
    unquote,
)
from gateway.prompt.tool_styles import ToolStyle
from gateway.types import CallDelta, TextDelta, ToolUse

MAX_HELD: Final = 65_536
"""Characters of what may be a call that are held back. Only arguments in front of their name need so many."""

_ARGUMENTS: Final = ("arguments", "parameters")  # models take one for the other
_OTHERS: Final = ("id", "type")  # strings that some models write beside the name

Chunk = tuple[str, TextDelta | CallDelta | None]
"""Characters of the answer, and their event; None for the syntax around calls."""


class CallParser:
    """One answer.

    met    the stop string that was met in its text; what follows is not part of the answer
    made   calls so far
    done   the only call that is wanted is there
    """

    def __init__(self, style: ToolStyle, use: ToolUse, stop: Sequence[str]) -> None:
        self.met: str | None = None
        self.made = 0
        self.done = False
        self._style = style
        self._names = {tool.name for tool in use.callable}
        self._only_one = style.single or not use.parallel
        self._forced = use.mode == "required"  # the prompt ends with the opener, and nothing is text
        self._stop = [string for string in stop if string]
        self._stops = StopStrings(self._stop)
        firsts = style.opener[:1] + ("{" if style.bare else "")
        self._starts = re.compile(f"[{BLANKS}{re.escape(firsts)}]")
        self._chunks: list[Chunk] = []
        self._text: list[str] = []  # is certain to be text
        self._arguments: list[str] = []  # is certain to be arguments
        self._held: list[str] = []  # blanks, or what may be part of a call, with the blanks in front of it
        self._line_begins = True
        self._behind_call = False  # nothing but syntax and blanks came since the last call
        self._scan: Scan | None = None
        self._scan_called = False  # this scan has found a call; what it holds back came behind that
        if self._forced:
            self._start(self._read_calls())

    def feed(self, text: str) -> Sequence[Chunk]:
        """What became certain with this text, in order. Nothing more comes after `met` or `done`."""
        self._read(text)
        return self._take()

    def flush(self) -> Sequence[Chunk]:
        """What was held back, at the end of the answer. A call that is cut short stays one."""
        if not self.ended:
            if self._behind_call:
                self._add("".join(self._held), None)
            else:
                self._add_text("".join(self._held))
            self._release_stops()
            self._held.clear()
        return self._take()

    @property
    def ended(self) -> bool:
        """Whether a stop string, or the one call that there may be, has ended the answer."""
        return self.met is not None or self.done

    # -- text ---------------------------------------------------------------------------------------------------------

    def _read(self, text: str) -> None:
        at = 0
        while at < len(text) and not self.ended:
            at = self._read_text(text, at) if self._scan is None else self._continue_scan(text, at)

    def _read_text(self, text: str, at: int) -> int:
        """Reads on outside of calls, up to some character behind `at`, or to one that may begin a call."""
        found = self._starts.search(text, at)
        end = found.start() if found else len(text)
        if end > at:
            self._add_text("".join(self._held) + text[at:end])
            self._held.clear()
            return end
        char = text[at]
        if char in BLANKS:
            self._held.append(char)
            self._line_begins |= char == "\n"
            if len(self._held) > MAX_BLANKS:
                self._add_text("".join(self._held))
                self._held.clear()
        elif char == "{" and not self._line_begins:
            self._add_text("".join(self._held) + char)
            self._held.clear()
        else:
            self._start(self._read_opener())
            return at
        return at + 1

    def _add_text(self, text: str) -> None:
        if self._forced:
            self._add(text, None)
        elif text:
            self._text.append(text)
            self._behind_call = False
            self._line_begins = text.rstrip(" \t\r").endswith("\n")

    def _add(self, source: str, event: CallDelta | None) -> None:
        """A chunk that is no text, behind the text before it."""
        self._settle_text()
        if source and not self.met:
            self._chunks.append((source, event))

    def _settle_text(self) -> None:
        if self._text:
            text = self._stops.feed("".join(self._text)) if self._stop else "".join(self._text)
            self._text.clear()
            self.met = self._stops.met
            if text:
                self._chunks.append((text, TextDelta(text)))

    def _release_stops(self) -> None:
        """No stop string goes on behind this place."""
        self._settle_text()
        if self._stop and not self.met:
            if text := self._stops.release():
                self._chunks.append((text, TextDelta(text)))
            self._stops = StopStrings(self._stop)

    def _take(self) -> Sequence[Chunk]:
        self._settle_text()
        self._settle_arguments()
        chunks, self._chunks = self._chunks, []
        return chunks

    # -- what may be a call -------------------------------------------------------------------------------------------

    def _start(self, scan: Scan) -> None:
        self._scan, self._scan_called, self._behind_call = scan, False, False
        next(scan)

    def _continue_scan(self, text: str, at: int) -> int:
        """Reads on inside of what may be a call, up to its end or the end of the text."""
        assert self._scan is not None
        while at < len(text) and not self.ended:
            self._held.append(text[at])
            try:
                self._scan.send(text[at])
            except StopIteration:
                self._scan = None
                return at + 1
            except NoMatchError:
                self._held.pop()
                self._reject()
                return at
            at += 1
            if len(self._held) > MAX_HELD:
                self._reject()
                return at
        return at

    def _reject(self) -> None:
        """What is held back is no call. Behind one it may begin another, so it is read again."""
        held, self._scan = "".join(self._held), None
        self._held.clear()
        if self._scan_called:
            self._scan_called = False
            self._read(held)
        else:
            text = held.rstrip(BLANKS)
            blanks = held[len(text) :]  # may stand in front of the next one
            self._add_text(text if len(blanks) <= MAX_BLANKS else held)
            self._held = list(blanks) if len(blanks) <= MAX_BLANKS else []
            self._line_begins |= "\n" in self._held

    def _call(self, name: str, arguments: str = "") -> None:
        """A call is certain. What is held back is its beginning, up to the arguments or including them."""
        self._release_stops()
        if self.met:
            return
        self._add("".join(self._held), CallDelta(self.made, name, arguments))
        self._held.clear()
        self.made += 1
        self._scan_called = True

    def _end_call(self) -> None:
        self._settle_arguments()
        self._behind_call, self._line_begins = True, False
        self.done = self._only_one

    def _settle_arguments(self) -> None:
        if self._arguments:
            arguments = "".join(self._arguments)
            self._arguments.clear()
            self._add(arguments, CallDelta(self.made - 1, "", arguments))

    def _drop(self) -> None:
        """What is held back is syntax."""
        self._add("".join(self._held), None)
        self._held.clear()

    # -- scans --------------------------------------------------------------------------------------------------------

    def _read_opener(self) -> Scan:
        char = yield
        if self._style.bare and char == "{":
            return (yield from self._read_calls(char))
        for expected in self._style.opener:
            expect(char, expected)
            char = yield
        return (yield from self._read_calls(char))

    def _read_calls(self, char: str = "") -> Scan:
        """From the character behind the opener on, which is still to be read where none is given."""
        char = char or (yield)
        char = yield from skip_blanks(char)
        if self._style.listed:
            expect(char, "[")
            char = yield from skip_blanks((yield))
        while True:
            yield from self._read_call(char)
            char = yield from skip_blanks((yield))
            if self._style.closer:
                return (yield from self._read_closer(char))
            if self._style.listed and char == "]":
                self._drop()
                return char
            if char == ("," if self._style.listed else ";"):
                char = yield from skip_blanks((yield))
            elif self._style.listed:
                raise NoMatchError
            self._behind_call = char != "{"

    def _read_closer(self, char: str) -> Scan:
        for expected in self._style.closer[:-1]:
            expect(char, expected)
            char = yield
        expect(char, self._style.closer[-1])
        self._drop()
        return char

    def _read_call(self, char: str) -> Scan:
        """One object, from its "{" to its "}"."""
        expect(char, "{")
        name, arguments = "", ""
        while not (name and arguments):
            char = yield from skip_blanks((yield))
            quoted = yield from read_string(char)
            key = unquote(quoted)
            char = yield from skip_blanks((yield))
            expect(char, ":")
            char = yield from skip_blanks((yield))
            if key == "name" and not name:
                quoted = yield from read_string(char)
                name = unquote(quoted)
                if name not in self._names:
                    raise NoMatchError
                if arguments:
                    self._call(name, arguments)
                    break
            elif key in _ARGUMENTS and not arguments:
                expect(char, "{")
                arguments = yield from self._read_arguments(name)
                if name:
                    break
            elif key in _OTHERS:
                yield from read_string(char)
            else:
                raise NoMatchError
            char = yield from skip_blanks((yield))
            if char == "}" and name and not self._style.bare:  # some leave empty arguments out
                self._call(name, "{}")
                self._end_call()
                return char
            expect(char, ",")
        self._end_call()
        return (yield from self._read_rest())

    def _read_arguments(self, name: str) -> Scan:
        """From behind the "{" to its "}". Streamed when the name is known, else returned."""
        if name:
            brace = self._held.pop()
            self._call(name)
            self._arguments.append(brace)
        kept, braces, closed = ["{"], Braces(), False
        while not closed:
            char = yield
            (self._arguments if name else kept).append(self._held.pop() if name else char)
            closed = braces.closed_by(char)
        return "".join(kept)

    def _read_rest(self) -> Scan:
        """What a model writes behind the arguments, up to the "}" of the call."""
        char = yield from skip_blanks((yield))
        if char == ",":
            braces = Braces()
            while not braces.closed_by(char):
                char = yield
        expect(char, "}")
        self._drop()
        return char

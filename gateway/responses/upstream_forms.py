"""What an answer of an upstream says, and how it is told in the form that a client wants. Pure, over the converter of
its route.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

import orjson

from gateway.responses.upstream_recording import Form, Kept

Ending = Literal["stop", "tool_calls", "length"]

MEDIA: Final = {False: "application/json", True: "text/event-stream; charset=utf-8"}
"""Content-Type of what was converted, by whether it streams."""


class Replay(Protocol):
    """How one route writes an answer in its two forms. Pure; None for what cannot be told."""

    @property
    def usage_on_request(self) -> bool:
        """Whether a stream tells its usage to those alone who ask for it."""
        ...

    def fold(self, stream: bytes, *, usage: bool = True) -> dict[str, Any] | None:
        """The whole answer that a complete stream tells. `usage`: only one that tells its usage, where whole answers of
        this route do."""
        ...

    def unfold(self, whole: Mapping[str, Any], *, usage: bool) -> Sequence[bytes] | None:
        """A stream that tells a whole answer, in pieces."""
        ...

    def restream(self, stream: bytes, *, usage: bool) -> Sequence[bytes] | None:
        """A stream in its own pieces, with or without the usage that was asked for."""
        ...

    def ending(self, whole: Mapping[str, Any]) -> Ending | None:
        """How it ended; None for an answer that is not complete, or not one."""
        ...

    def text(self, whole: Mapping[str, Any]) -> str | None:
        """Of an answer to a chat that is one text and nothing else."""
        ...


class Read(NamedTuple):
    """What a complete answer says.

    text  of one that ended by itself and is nothing else
    """

    ending: Ending
    text: str | None


def read(joined: bytes, form: Form, replay: Replay) -> Read | None:
    """None for what is not complete, or cannot be read."""
    try:
        whole = replay.fold(joined, usage=False) if form.stream else _object(joined)
        ending = None if whole is None else replay.ending(whole)
        if whole is None or ending is None:
            return None
        return Read(ending, replay.text(whole) if ending == "stop" else None)
    except _ODD:
        return None


def told(pieces: Sequence[bytes], form: Form, wanted: Form, replay: Replay) -> Sequence[bytes] | None:
    """A complete answer of one form in another; None where it cannot be told."""
    if form == wanted:
        return pieces
    try:
        return _converted(b"".join(pieces), form, wanted, replay)
    except _ODD:
        return None


def streams_for(wanted: Form, replay: Replay) -> Sequence[Form]:
    """Streams of which an answer in this form can be made at their end, for who has to wait for that in any case."""
    if wanted.stream:
        return ()
    return (Form(True, True),) if replay.usage_on_request else (Form(True, True), Form(True, False))


def media_type(kept: Kept, form: Form) -> str:
    """Content-Type of what was kept, when it is told in this form."""
    return kept.type if form.stream == kept.form.stream else MEDIA[form.stream]


_ODD = (ValueError, KeyError, TypeError, IndexError, AttributeError)
"""What a converter may raise for an answer that is none of its API's."""


def _converted(joined: bytes, form: Form, wanted: Form, replay: Replay) -> Sequence[bytes] | None:
    if form.stream and wanted.stream:
        return replay.restream(joined, usage=wanted.usage)
    if wanted.stream:
        whole = _object(joined)
        return None if whole is None else replay.unfold(whole, usage=wanted.usage)
    folded = replay.fold(joined)
    return None if folded is None else [orjson.dumps(folded)]


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return value if type(value) is dict else None

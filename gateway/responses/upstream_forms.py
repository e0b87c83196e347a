"""What an answer of an upstream says, and how it is told in the form that a client wants. Pure, over the converter of
its route.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson

from gateway.responses.upstream_recording import Form, Kept
from gateway.types import Ending, Replay

MEDIA: Final = {False: "application/json", True: "text/event-stream; charset=utf-8"}
"""Content-Type of what was converted, by whether it streams."""


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
    except _ODD:
        return None
    return Read(ending, _text(whole, replay) if ending == "stop" else None)


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


def _text(whole: Mapping[str, Any], replay: Replay) -> str | None:
    """None for several answers, too, and for what is told in another way than as a text."""
    try:
        return replay.text(whole)
    except _ODD:
        return None


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return value if type(value) is dict else None

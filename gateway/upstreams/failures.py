"""Why an attempt at one upstream brought no answer. Nobody outside of the room is told: stage.py tries again, asks
others, or makes an error for the client of it.
"""

from __future__ import annotations

from typing import Literal

Kind = Literal["connect", "timeout", "lost", "open", "busy", "key", "redirect"]


class AttemptFailed(Exception):  # noqa: N818 - an attempt that failed, and no error of the gateway
    """No answer. `again` says whether this upstream may be tried once more."""

    def __init__(self, kind: Kind, why: str, *, again: bool) -> None:
        super().__init__(why)
        self.kind = kind
        self.why = why
        self.again = again

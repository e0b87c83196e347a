"""How lines of the log get out."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine.config import Section


class LogSettings(Section):
    """[logs]: how lines are written. What is logged is said by `log_level` of [server] and [engine]."""

    format: Literal["text", "json"] = Field(
        "text", description="How lines are written. `json`: an object per line, with the empty fields of requests, too."
    )

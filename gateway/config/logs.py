"""How lines of the log get out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from engine.config import Section


class LogSettings(Section):
    """[logs]: what waits until it is written, in each process. What is logged is said by `log_level` of [server] and
    [engine]."""

    format: Literal["text", "json"] = Field(
        "text", description="How lines are written. `json`: an object per line, with the empty fields of requests, too."
    )
    delay_s: Annotated[float, Field(ge=0, le=10)] = Field(
        0.1, description="Seconds that a line may wait for others; warnings and errors wait for nobody."
    )
    max_lines: Annotated[int, Field(ge=100)] = Field(
        20_000, description="Lines that wait for a slow reader of the log; further ones are dropped and counted."
    )
    max_bytes: Annotated[int, Field(ge=1 << 16)] = Field(
        16 << 20, description="Bytes of these lines; one of a request counts 2048 until it is written."
    )
    max_alike: Annotated[int, Field(ge=1)] = Field(
        60, description="Warnings and errors of one kind that are written in a minute; further ones are counted."
    )
    close_s: Annotated[float, Field(ge=0)] = Field(
        1.0, description="Seconds that a process waits in its end for somebody to read its last lines."
    )

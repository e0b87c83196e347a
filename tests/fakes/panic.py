"""What pyo3 makes of a panic in Rust: a BaseException, whose message may quote the text that was worked on."""

from __future__ import annotations

from typing import Any


class Panic(BaseException):
    """As pyo3_runtime.PanicException."""


def panics(*_: Any, **__: Any) -> Any:
    """In place of any native call."""
    raise Panic("at byte 7 of `a secret prompt`")


class Panicking:
    """In place of any native object: every method panics."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return panics

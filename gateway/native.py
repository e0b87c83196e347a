"""Keeps a panic of a native library from ending more than one request.

pyo3 (tokenizers, tiktoken, safetensors) raises a Rust panic as a BaseException, which passes every `except Exception`:
a request ends without an answer, a task without giving back what it holds. `no_panic` makes it an Exception. It is used
around each call of such a library, and once more where requests and background work begin, for what is not known yet.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from contextlib import ContextDecorator
from types import TracebackType

from gateway.errors import NativeError

log = logging.getLogger(__name__)

_PYTHONS_OWN = (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)


class no_panic(ContextDecorator):  # noqa: N801 - reads as a statement, like contextlib.suppress
    """Context manager, or decorator. Raises NativeError for what is neither an Exception nor one of Python's own
    signals, and logs one line: the kind of panic and where it was raised, never its message: it may quote the text."""

    __slots__ = ("_library",)

    def __init__(self, library: str = "a native library") -> None:
        self._library = library

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, _PYTHONS_OWN):
            return
        last = traceback.extract_tb(trace)[-1]
        log.error("%s panicked (%s) at %s:%s", self._library, type(error).__name__, last.filename, last.lineno)
        raise NativeError("The server had an error while processing your request.") from None

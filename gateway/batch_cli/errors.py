"""What a user of `kvasir batch` is told when something does not work."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, Final

FAILED: Final = 1
BAD_INPUT: Final = 2


class BatchCommandError(Exception):
    """What a user is told; `status` is that of the process."""

    def __init__(self, message: str, status: int = FAILED) -> None:
        super().__init__(message)
        self.status = status


class PassingError(BatchCommandError):
    """Worth another try."""


def opened(path: Path, mode: str) -> BinaryIO:
    """Raises BatchCommandError."""
    try:
        return path.open(mode)  # type: ignore[return-value]
    except OSError as error:
        raise BatchCommandError(f"{path}: {error.strerror}", BAD_INPUT) from error

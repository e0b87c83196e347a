"""The secret of a fleet, which salts of replicas are derived with (digests.py). All gateways of one Redis have the same
one, so that they find each other's blocks; without Redis it is this gateway's own, in a file.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import secrets
from pathlib import Path
from typing import Any, Final

from gateway.storage.redis_calls import RedisCalls

KEY: Final = "kvasir:fleet:secret"
FILE: Final = "fleet-secret"
_SECRET = re.compile("[0-9a-f]{64}")


class FleetSecret:
    """Asked for whenever a server joins. A Redis that lost the secret gets back the one that this gateway has, so that
    a gateway that starts later derives the same salts."""

    def __init__(self, folder: Path, calls: RedisCalls | None) -> None:
        self._file = folder / FILE
        self._calls = calls
        self._known = ""

    async def of_model(self, model: str) -> str:
        """Another one for each served model. Raises RedisDownError, and OSError for a folder that cannot be written."""
        known = self._known or await asyncio.to_thread(_read_or_make, self._file)
        if self._calls is not None:
            calls: Any = self._calls
            await calls.ask(calls.redis.set(KEY, known, nx=True))
            found = await calls.ask(calls.redis.get(KEY))
            shared = found.decode(errors="replace") if isinstance(found, bytes) else str(found)
            known = shared if _SECRET.fullmatch(shared) else known
        self._known = known
        return hmac.digest(known.encode(), model.encode(), "sha256").hex()


def _read_or_make(file: Path) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    made = secrets.token_hex(32)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        found = file.read_text("ascii", "replace").strip()
        if _SECRET.fullmatch(found):
            return found
        raise OSError(f"{file} holds no secret; remove it, and caches of replicas begin anew") from None
    with open(descriptor, "w", encoding="ascii") as new:
        new.write(made)
    return made

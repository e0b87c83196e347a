"""A store of bytes that is away, for tests of what such a failure costs."""

from __future__ import annotations

from typing import Any

from gateway.errors import RedisDownError


class DownStore:
    """A ByteStore that never answers."""

    async def _fail(self, *args: Any, **how: Any) -> Any:
        raise RedisDownError("away")

    put = find = look = all_of = extend = remove = _fail

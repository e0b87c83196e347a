"""A client of the Redis that the stores under contract are in."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from gateway.storage.redis_calls import connect

LIMIT_S = 10.0


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """Of an empty Redis."""
    client = connect(redis_url, LIMIT_S)
    yield client
    await client.aclose()

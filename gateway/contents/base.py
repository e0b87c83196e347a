"""The promises of every store of cached contents, and its limits. tests/contract holds all implementations to them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from gateway.config import GeminiSettings
from gateway.errors import QuotaError
from gateway.types import CachedContent


class ContentStore(Protocol):
    """What one tenant keeps, no other one finds. What is past its end is gone at once. Bodies never change."""

    async def put(self, tenant: str, content: CachedContent) -> None:
        """Keeps it, in place of what has the same name. Raises QuotaError past the limits of the tenant."""
        ...

    async def find(self, tenant: str, name: str) -> CachedContent | None: ...

    async def all_of(self, tenant: str) -> list[CachedContent]:
        """All that the tenant keeps, in any order, without bodies."""
        ...

    async def extend(self, tenant: str, name: str, expires_s: float) -> CachedContent | None:
        """Sets its end, earlier or later; returns it without its body. None when it is not there. Atomic."""
        ...

    async def delete(self, tenant: str, name: str) -> bool:
        """Whether it was there."""
        ...


def check_room(kept: Iterable[CachedContent], new: CachedContent, limits: GeminiSettings) -> None:
    """Raises QuotaError when `new` does not fit beside what the tenant keeps."""
    others = [content for content in kept if content.name != new.name]
    if len(others) >= limits.max_contents:
        raise too_many(limits)
    if sum(content.num_bytes for content in others) + new.num_bytes > limits.max_bytes:
        raise too_large(limits)


def too_many(limits: GeminiSettings) -> QuotaError:
    return QuotaError(f"You keep {limits.max_contents} cached contents, which is the limit (gemini.max_contents).")


def too_large(limits: GeminiSettings) -> QuotaError:
    return QuotaError(
        f"Your cached contents would be larger than {limits.max_bytes} bytes, which is the limit (gemini.max_bytes)."
    )

"""Tenants and keys that admins made, in memory: what the stores promise, and no more."""

from __future__ import annotations

from gateway.issued.base import Issued
from gateway.issued.stores import Changes, issued_of


class MemoryIssued:
    """See IssuedStore."""

    def __init__(self) -> None:
        self.fields: dict[str, bytes] = {}

    async def read(self, known: str) -> Issued | None:
        there = issued_of(self.fields)
        return None if there.version == known else there

    async def change(self, known: str, version: str, changes: Changes) -> bool:
        if issued_of(self.fields).version != known:
            return False
        kept = {name: value for name, value in {**self.fields, **changes}.items() if value}
        self.fields = {**kept, "version": version.encode()}
        return True

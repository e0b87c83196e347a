"""An engine as the admin pages know it when they purge it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.errors import EngineLostError

COMPLETE: Mapping[str, Any] = {
    "complete": True,
    "tiers": {"device": {"blocks": 3, "bytes": 300}},
    "files": {"blocks": 0, "bytes": 0},
    "leases": 1,
    "sequences": 0,
    "left": 0,
    "owner": None,
    "in_use": [],
}


class FakePurged:
    """`report` is what it answers, None while it is away; `asked` the salts' beginnings that it was sent."""

    def __init__(self, name: str, report: Mapping[str, Any] | None = COMPLETE) -> None:
        self.name = name
        self.report = report
        self.asked: list[str] = []

    async def purge(self, salt_prefix: str) -> Mapping[str, Any]:
        self.asked.append(salt_prefix)
        if self.report is None:
            raise EngineLostError("It is away.")
        return self.report

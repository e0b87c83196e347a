"""What upstreams keep for tenants: which of them made which response, container or other thing for whom.
passthrough.py asks here; the ids themselves are read in gateway/upstreams.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol

RESPONSES: Final = "/v1/responses"
"""Whose answers an upstream keeps unless it is asked not to."""

_IN_CONTAINERS: Final = ("code_interpreter", "code_execution", "shell")
"""What types of tools begin with that may run at an upstream, in a container."""

Told = Callable[[str, str], Awaitable[None]]
"""With the upstream and an id (UpstreamRequest)."""


class Memory(Protocol):
    """Of one tenant nothing is there for another."""

    async def remember_upstream(self, tenant: str, upstream: str, object_id: str) -> None:
        """Never raises."""
        ...

    async def find_upstream(self, tenant: str, object_id: str) -> str | None:
        """Raises OverloadedError when it cannot be known."""
        ...


class UpstreamObjects:
    """Makes what an UpstreamRequest brings to be checked, and to have its answer's ids remembered."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def recorder_for(self, path: str, values: Mapping[str, Any], tenant: str) -> Told | None:
        """For a request of whose answer the upstream may keep something, who is told the ids."""
        stored = path == RESPONSES and values.get("store") is not False
        return self.recorder(tenant) if stored or _keeps(values) else None

    def recorder(self, tenant: str) -> Told:
        """Who is told the ids of what is kept for the tenant."""
        return partial(self._memory.remember_upstream, tenant)

    def maker(self, tenant: str) -> Callable[[str], Awaitable[str | None]]:
        """Who knows which upstream keeps a thing for the tenant."""
        return partial(self._memory.find_upstream, tenant)


def _keeps(values: Mapping[str, Any]) -> bool:
    """Whether tools may run in a container that the upstream keeps, or the answer is spoken, which it keeps as well."""
    tools, modalities = values.get("tools"), values.get("modalities")
    types = [tool.get("type") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    in_container = any(isinstance(kind, str) and kind.startswith(_IN_CONTAINERS) for kind in types)
    return bool(in_container or values.get("container") or (isinstance(modalities, list) and "audio" in modalities))

"""Which models upstreams say they have, asked from time to time, for GET /v1/models alone: who may be asked for what is
the settings' to say (routes.py), whatever an upstream lists.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from gateway.tasks import cancel, spawn, was_cancelled
from gateway.upstreams.failures import AttemptFailed
from gateway.upstreams.upstream import Upstream

log = logging.getLogger(__name__)

PATHS: Final = {
    "openai": "/v1/models",
    "anthropic": "/v1/models?limit=1000",
    "gemini": "/v1beta/models?pageSize=1000",
}
MAX_NAME_CHARS: Final = 256


class Listing:
    """The lists of upstreams that have `list_models`. `told` is empty until they have answered for the first time."""

    def __init__(self, upstreams: Sequence[Upstream]) -> None:
        self.told: dict[str, list[str]] = {}
        self._upstreams = [upstream for upstream in upstreams if upstream.settings.list_models]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [spawn(self._keep(one), f"models of upstream {one.name}") for one in self._upstreams]

    async def close(self) -> None:
        for task in self._tasks:
            await cancel(task)

    async def _keep(self, upstream: Upstream) -> None:
        failed = False
        while not was_cancelled():
            try:
                body = await upstream.connections.fetch(PATHS[upstream.settings.dialect])
                self.told[upstream.name] = names(body)[: upstream.settings.max_listed]
                failed = False
            except (AttemptFailed, ValueError) as error:  # the last list stays
                if not failed:
                    log.warning("upstream %s does not list its models: %s", upstream.name, error)
                failed = True
            await asyncio.sleep(upstream.settings.list_every_s)


def names(body: bytes) -> list[str]:
    """Of the models in a list as one of the three APIs writes it. Raises ValueError for anything else."""
    listed: Any = orjson.loads(body)
    models = (listed.get("data") or listed.get("models")) if isinstance(listed, Mapping) else None
    if not isinstance(models, list):
        raise ValueError("its answer is no list of models")
    found = [one.get("id") or one.get("name") for one in models if isinstance(one, Mapping)]
    return [name.removeprefix("models/") for name in found if isinstance(name, str) and len(name) <= MAX_NAME_CHARS]

"""Ports of this machine for servers that tests start."""

from __future__ import annotations

import random
import socket
from contextlib import closing, suppress
from typing import Final

PORTS: Final = range(10240, 22768)
"""The system gives neither these to clients nor those 10,000 above, which are a Redis Cluster's: a server may take a
minute until it binds its own."""

_CHANCE: Final = random.SystemRandom()  # two test processes do not take the same ones


def free_ports(count: int) -> list[int]:
    """Distinct ports that no process has bound."""
    found: dict[int, None] = {}
    while len(found) < count:
        port = _CHANCE.choice(PORTS)
        with suppress(OSError), closing(socket.socket()) as one:
            one.bind(("127.0.0.1", port))
            found[port] = None
    return list(found)


def free_port() -> int:
    return free_ports(1)[0]

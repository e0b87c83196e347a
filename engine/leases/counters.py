"""What happened to leases since the engine started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LeaseCounters:
    """In leases; the last one in tokens."""

    granted: int = 0  # new ones; those that degraded at once are among them
    renewed: int = 0  # uses by later requests
    degraded: int = 0
    kept_again: int = 0  # of those that had degraded
    expired: int = 0
    dropped: int = 0  # ended early: there were too many, another prefix took their digest, or they were purged
    lost: int = 0  # their blocks turned out to hold numbers that are not finite, or could not be read
    restored: int = 0  # of an earlier run, and kept again at the start
    read_tokens: int = 0  # of the longest lease that each prompt began with

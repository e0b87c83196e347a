"""Which version of Kvasir this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """The version of the installed distribution, or "unknown" in a tree that is not installed."""
    try:
        return version("kvasir")
    except PackageNotFoundError:
        return "unknown"

"""Lua scripts for Redis, which lie beside the code that calls them."""

from __future__ import annotations

from importlib.resources import files


def script(package: str | None, *names: str) -> str:
    """The source of these files of a package (`__package__` of who asks), one behind the other."""
    assert package is not None
    return "".join(files(package).joinpath(name).read_text(encoding="utf-8") for name in names)

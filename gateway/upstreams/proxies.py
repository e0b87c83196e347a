"""The HTTP proxy in front of an upstream, as the environment names it for other programs. Pure.

`HTTPS_PROXY` is for upstreams with https, `HTTP_PROXY` for those with http, `ALL_PROXY` for both; names in small
letters win. `NO_PROXY` lists hosts and domains that are asked without one. aiohttp's own `trust_env` would read
passwords from a .netrc as well, and send them to upstreams.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]  # typeshed lacks it

SCHEMES = ("http", "https")
"""Of proxies that aiohttp knows."""


def find_proxy(url: str, environ: Mapping[str, str]) -> str | None:
    """The URL of the proxy, which may have a password in it; None without one. Raises ValueError, without its text, for
    what is no URL of an HTTP proxy."""
    parts = urlsplit(url)
    written = _variable(f"{parts.scheme}_proxy", environ) or _variable("all_proxy", environ)
    if not written or proxy_bypass_environment(parts.netloc, {"no": _variable("no_proxy", environ)}):
        return None
    proxy = written if "://" in written else f"http://{written}"
    told = urlsplit(proxy)
    if told.scheme not in SCHEMES or not told.hostname:
        raise ValueError("a proxy's URL begins with http:// or https:// and a host")
    return proxy


def _variable(name: str, environ: Mapping[str, str]) -> str:
    return (environ.get(name) or environ.get(name.upper()) or "").strip()

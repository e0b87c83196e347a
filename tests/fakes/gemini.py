"""Clients of the Gemini API for tests: the real SDK, pointed at a server of ours."""

from __future__ import annotations

from typing import Any

from google import genai
from google.genai import types

LIMIT_MS = 60_000


def gemini(url: str, key: str = "none-none", **options: Any) -> genai.Client:
    """The caller closes it: `close`, and `aio.aclose` where `aio` was used. `options` are those of HttpOptions."""
    return genai.Client(api_key=key, http_options=types.HttpOptions(base_url=url, timeout=LIMIT_MS, **options))

"""What the index holds in Redis: its keys, and how a block's tier is written there.

The tag in braces keeps all keys of one model in one cluster slot. engine/publish.py writes them,
gateway/index/redis_index.py and gateway/engines/registry.py read them.
"""

from __future__ import annotations

from typing import Final, Literal

import xxhash

Tier = Literal["device", "host", "disk"]  # "device" is where the model runs, which may be a CPU
TIER_CODES: Final[dict[Tier, bytes]] = {"device": b"g", "host": b"h", "disk": b"d"}

ENGINES_KEY: Final = "kvasir:engines"  # sorted set: incarnation -> Unix second at which its announcement expires


def announcement_key(incarnation: str) -> str:
    """String with a TTL: the JSON announcement (see Hello.to_json, plus "url") of one engine incarnation."""
    return f"kvasir:engine:{incarnation}"


def blocks_key(model: str, incarnation: str) -> str:
    """Hash with a TTL: digest -> TIER_CODES byte + decimal block id. It lives as long as the heartbeat renews it."""
    tag = xxhash.xxh3_64_hexdigest(model.encode())
    return f"kvasir:{{{tag}}}:blocks:{incarnation}"

"""What clients store here: cached contents and files."""

from __future__ import annotations

import re
from typing import Final

from engine.protocol.frozen import dataclass

OWN_CONTENT = re.compile(r"cachedContents/[0-9a-f]{32}")
"""A cached content of this gateway, as requests name it; upstreams have other names for theirs."""


@dataclass(frozen=True, slots=True)
class CachedContent:
    """The beginning of prompts, which a client stored under a name until a time.

    name      made by the gateway, unguessable
    body      what was sent, as its dialect wrote it; empty where it is only listed
    tokens    up to the breakpoint at its end
    *_s       seconds since 1970
    estimated whether `tokens` are: an upstream counts them when it is used
    """

    name: str
    model: str
    body: bytes
    num_bytes: int
    tokens: int
    created_s: float
    updated_s: float
    expires_s: float
    display_name: str = ""
    estimated: bool = False


BATCH_OUTPUT: Final = "batch_output"
"""The purpose of files with results of a batch."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a tenant, without its bytes. It never changes.

    id         32 characters, `0-9a-f`; in their order files were made
    filename   as the client named it; nothing on disk is called so
    purpose    what it is for, as in the OpenAI API
    mime_type  as the client said
    expires_s  seconds since 1970, as created_s; None: kept until it is deleted
    """

    id: str
    filename: str
    purpose: str
    mime_type: str
    num_bytes: int
    created_s: float
    expires_s: float | None

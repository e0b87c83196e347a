"""Tenants, the scopes in which they share blocks, and their limits."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Literal, NamedTuple

from engine.protocol.frozen import dataclass

ANONYMOUS = "anonymous"
"""The tenant of a server without configured keys."""

NANO = 1_000_000_000
"""Money is counted in billionths of what its currency counts in."""


@dataclass(frozen=True)
class Scope:
    """A sharing domain of blocks: requests of equal scopes share, those of different ones never find, compare or time
    each other's. The owner is a tenant, or a namespace that the operator lets several tenants use; key and cache_salt
    are what clients separate their requests with."""

    tenant: str = ""
    namespace: str = ""
    key: str = ""
    cache_salt: str = ""

    @cached_property
    def salt(self) -> str:
        """The scope's part of the block namespace. Every field is tagged and length-prefixed, so that none can pass for
        another. What clients made up is hashed: it may be a secret, and salts are kept with the blocks."""
        fields = (
            ("tenant", self.tenant),
            ("namespace", self.namespace),
            ("key", _hashed(self.key)),
            ("cache_salt", _hashed(self.cache_salt)),
        )
        return "".join(f"{tag}:{len(value)}:{value};" for tag, value in fields if value)


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest() if text else ""


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of requests, bills and caches."""

    name: str
    weight: float = 1.0  # of its share of engines that others want, too
    priority: bool = False  # whether its requests may go before others'

    @property
    def salt(self) -> str:
        """The salt of requests without a scope of their own."""
        return Scope(tenant=self.name).salt


def owners_of(tenant: str, key: str = "") -> tuple[str, ...]:
    """Whose limits and budgets a request has to fit, all of them: its tenant's, and those of its key, by the key's id.
    No name of a tenant has a slash."""
    return (tenant, f"{tenant}/{key}") if key else (tenant,)


def tenant_of(owner: str) -> str:
    """The owner itself, or the tenant whose key it is."""
    return owner.partition("/")[0]


def owner_in_words(owner: str) -> str:
    """For messages."""
    tenant, _, key = owner.partition("/")
    return f"the key {key} of {tenant}" if key else tenant


LimitKind = Literal["requests", "tokens", "input_tokens", "output_tokens"]
"""What is limited per minute; tokens are those of prompts and completions together."""


class Room(NamedTuple):
    """How much of something a tenant may still send.

    limit      at a time, or per minute
    remaining  of those, before the next request is refused
    reset_s    seconds until all of it is free again, if nothing more comes
    """

    limit: int
    remaining: int
    reset_s: float


class Allowance(NamedTuple):
    """What a tenant may still send per minute, of what has a limit."""

    requests: Room | None = None
    tokens: Room | None = None
    input_tokens: Room | None = None
    output_tokens: Room | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """What a request will take of its tenant's limits, as far as that is known before it is answered.

    input_tokens   of its prompts, estimated
    answer_tokens  that one answer may have; None: as many as the context
    answers        that are generated
    generates      False: it is counted as a request, and nothing else of it
    """

    input_tokens: int = 0
    answer_tokens: int | None = 0
    answers: int = 0
    generates: bool = True

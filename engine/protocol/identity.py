"""Identity of blocks: a digest for each, chained over all that comes before it.

    chain_0 = H(namespace, every field tagged and length-prefixed)
    chain_i = H(chain_{i-1} || token ids of block i, little-endian uint32)

A digest is a hint and never a proof: the engine compares the stored token ids before it reuses a block. The gateway
chains the blocks of prompts, the engine goes on with those of answers.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Final, Literal

import xxhash

DIGEST_BYTES: Final = 16
TOKEN_BYTES: Final = 4  # little-endian uint32, as array("I") holds them on every platform we run on

HashName = Literal["xxh3_128", "sha256"]


def _xxh3_128(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


def _sha256_128(data: bytes) -> bytes:
    """SHA-256 cut to 128 bits, so that digests have one width everywhere (NIST SP 800-107, section 5.1)."""
    return hashlib.sha256(data).digest()[:DIGEST_BYTES]


HASHES: Final[dict[HashName, Callable[[bytes], bytes]]] = {"xxh3_128": _xxh3_128, "sha256": _sha256_128}


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything besides the tokens that makes KV vectors differ. Two equal namespaces may share blocks."""

    weights: str  # fingerprint of the weights and their revision
    dtype: str  # dtype the model computes in, e.g. "bfloat16"
    kv_dtype: str  # dtype of the stored keys and values
    block_size: int  # tokens per block
    adapter: str = ""  # fingerprint of an adapter, empty without one
    quantization: str = ""  # scheme of quantised weights, empty without one
    hash_name: HashName = "xxh3_128"
    salt: str = ""  # the tenant's share of the identity; an engine announces its namespace with an empty one

    def root(self) -> bytes:
        """chain_0: the digest that every chain in this namespace starts from. DIGEST_BYTES long."""
        parts = [b"kvasir-block-chain-v1"]
        for spec in fields(self):
            value = str(getattr(self, spec.name)).encode("utf-8", "surrogatepass")
            tag = spec.name.encode()
            parts.append(struct.pack("<II", len(tag), len(value)) + tag + value)
        return HASHES[self.hash_name](b"".join(parts))


def chain_digests(
    parent: bytes, tokens: bytes | memoryview, block_size: int, hash_name: HashName = "xxh3_128"
) -> bytes:
    """Digests of every full block in `tokens`, one after the other.

    parent      digest of the block before, or Namespace.root()
    tokens      token ids, TOKEN_BYTES each; a tail shorter than a block is left out
    Returns (num_full_blocks * DIGEST_BYTES) bytes; empty when no block is full.
    """
    digest, width, out = HASHES[hash_name], block_size * TOKEN_BYTES, []
    view = memoryview(tokens)
    for start in range(0, len(view) - width + 1, width):
        parent = digest(parent + view[start : start + width])
        out.append(parent)
    return b"".join(out)


def split_digests(packed: bytes) -> list[bytes]:
    """The digests of a packed run, in order."""
    return [packed[i : i + DIGEST_BYTES] for i in range(0, len(packed), DIGEST_BYTES)]

"""The file of one block, which proves by itself what it holds.

    file  header | payload | XXH3-128 of both
    header  magic and version, sizes, index of the block in its prefix | identity | salt | parent digest | token ids
    identity  JSON of the namespace and of the payload's layout

A block is read by asking for exactly the header that it must have, so whatever is cut, flipped, of another namespace,
prefix or version is a miss. Knows one file at a time; engine/tiers/disk_store.py says where it is.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import xxhash

from engine.protocol import DIGEST_BYTES, HASHES, TOKEN_BYTES, Namespace
from engine.tiers.copying import BlockKey, Payload

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC: Final = b"KVASIRB\x01"  # the last byte is the version of the format
CHECKSUM_BYTES: Final = 16
_SIZES: Final = struct.Struct("<8sIIIIQ")  # magic, bytes of identity, salt and token ids, index, bytes of payload
_HEAD_BYTES: Final = 8192
"""Read at once to see a header; longer ones take a second read."""

PAGE_BYTES: Final = 4096  # what a file system gives a file at least


class BlockFormat:
    """The files of one namespace's blocks."""

    def __init__(self, namespace: Namespace, layout: str, block_bytes: int) -> None:
        """
        namespace  of the engine, with an empty salt
        layout     of the payload, in words that change when it does
        """
        self.block_bytes = block_bytes  # of the payload
        self.identity = json.dumps({**asdict(namespace), "layout": layout}, sort_keys=True).encode()
        self._namespace = namespace
        self._block_tokens = namespace.block_size * TOKEN_BYTES

    @property
    def file_bytes(self) -> int:
        """What a block takes on disk, for a budget: whole pages, with a salt of usual length."""
        size = _SIZES.size + len(self.identity) + 64 + DIGEST_BYTES + self._block_tokens
        return in_pages(size + self.block_bytes + CHECKSUM_BYTES)

    def read(self, path: str, key: BlockKey, row: Payload) -> bool:
        """The payload into `row`. Whether the file is there and holds exactly this block. Raises OSError."""
        expected = self._header(key)
        header, checksum = bytearray(len(expected)), bytearray(CHECKSUM_BYTES)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            size = len(expected) + self.block_bytes + CHECKSUM_BYTES
            if os.fstat(file).st_size != size or os.readv(file, [header, row.data, checksum]) != size:
                return False
        finally:
            os.close(file)
        return header == expected and checksum == _checksum(expected, row)

    def write(self, path: str, temporary: str, key: BlockKey, row: Payload) -> None:
        """Raises OSError, and the file is what it was."""
        header = self._header(key)
        write_file(path, temporary, [header, row.data, _checksum(header, row)])

    def read_key(self, path: str, digest: bytes) -> BlockKey | None:
        """The identity that a file's header states, if it is of this namespace and leads to the file's own digest.
        The checksum is left to the first reader."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            head, size = os.pread(file, _HEAD_BYTES, 0), os.fstat(file).st_size
            if len(head) < _SIZES.size:
                return None
            magic, identity_bytes, salt_bytes, token_bytes, index, payload_bytes = _SIZES.unpack_from(head)
            header_bytes = _SIZES.size + identity_bytes + salt_bytes + DIGEST_BYTES + token_bytes
            if size != header_bytes + payload_bytes + CHECKSUM_BYTES:
                return None
            if header_bytes > len(head):
                head = os.pread(file, header_bytes, 0)
        except OSError:
            return None
        finally:
            os.close(file)
        start = _SIZES.size + identity_bytes
        salt, parent = head[start : start + salt_bytes], head[start + salt_bytes :][:DIGEST_BYTES]
        tokens = head[start + salt_bytes + DIGEST_BYTES : header_bytes]
        try:
            text = salt.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return None
        if index == 0 and parent != self._root(text):
            return None
        key = BlockKey(digest, parent if index else None, index, text, tokens)
        is_block = len(tokens) == self._block_tokens and magic == MAGIC and head[:header_bytes] == self._header(key)
        return key if is_block and HASHES[self._namespace.hash_name](parent + tokens) == digest else None

    def _header(self, key: BlockKey) -> bytes:
        salt = key.salt.encode("utf-8", "surrogatepass")
        parent = self._root(key.salt) if key.parent is None else key.parent
        sizes = _SIZES.pack(MAGIC, len(self.identity), len(salt), len(key.tokens), key.index, self.block_bytes)
        return sizes + self.identity + salt + parent + key.tokens

    def _root(self, salt: str) -> bytes:
        return replace(self._namespace, salt=salt).root()


def block_path(folder: Path, digest: bytes) -> str:
    """Where a block's file is, in the folder of its namespace."""
    name = digest.hex()
    return f"{folder}/{name[:2]}/{name}.kv"


def in_pages(num_bytes: int) -> int:
    """What a file of that size takes on disk."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _checksum(header: bytes, row: Payload) -> bytes:
    hasher = xxhash.xxh3_128(header)
    hasher.update(row.data)
    return hasher.digest()


def write_file(path: str, temporary: str, parts: Sequence[Buffer]) -> None:
    """Writes a file of mode 0600 beside its place and renames it into it; makes its folder. Raises OSError, and the
    file is what it was."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        file = os.open(temporary, flags, 0o600)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        file = os.open(temporary, flags, 0o600)
    try:
        try:
            if os.writev(file, parts) != sum(memoryview(part).nbytes for part in parts):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), temporary)
        finally:
            os.close(file)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise

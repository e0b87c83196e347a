"""Blocks on disk: one file each, which proves by itself what it holds. Survives a restart.

    <folder>/<root of the namespace, hex>/<first two digits>/<digest, hex>.kv        folders 0700, files 0600
                                         /<writer, hex>.leases                       see engine/leases/file.py

    file  header | payload | XXH3-128 of both
    header  magic and version, sizes, index of the block in its prefix | identity | salt | parent digest | token ids
    identity  JSON of the namespace and of the payload's layout

A file is written beside its place and renamed into it, and never synced: one that a power cut tore fails its checksum.
A block is read by asking for exactly the header that it must have, so whatever is cut, flipped, of another namespace,
prefix or version is a miss, and is deleted. Engines of one model may share a folder: each keeps its own account of it,
and what another one deleted is a miss.

No torch. A store of engine/tiers/stores.py; engine/tiers/tiers.py decides what is kept, and tells it what was found at
the start.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import struct
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from engine.leases.file import LEASE_FILE, LeaseFile
from engine.protocol import DIGEST_BYTES, HASHES, TOKEN_BYTES, Namespace
from engine.tiers.stores import BlockKey, Payload

MAGIC: Final = b"KVASIRB\x01"  # the last byte is the version of the format
CHECKSUM_BYTES: Final = 16
_SIZES: Final = struct.Struct("<8sIIIIQ")  # magic, bytes of identity, salt and token ids, index, bytes of payload
_HEAD_BYTES: Final = 8192
"""Read at once to see a header; longer ones take a second read."""

PAGE_BYTES: Final = 4096  # what a file system gives a file at least
TEMPORARY_AGE_S: Final = 60.0
"""A file that was not renamed after so long was left behind by an engine that is gone."""

_HEX_FOLDER: Final = re.compile(r"[0-9a-f]{32}")
_SUBFOLDER: Final = re.compile(r"[0-9a-f]{2}")
_BLOCK_FILE: Final = re.compile(r"([0-9a-f]{32})\.kv")
_TEMPORARY: Final = re.compile(r"[0-9a-f]{32}\.\d+\.\d+\.tmp")


@dataclass(frozen=True, slots=True)
class Scan:
    """What was there at the start: blocks whose prefix is there too, by index; those used longest ago first within an
    index. `collected` files were deleted because of their age or the budget, `torn` because they prove nothing."""

    found: list[BlockKey]
    used_s: list[float]  # Unix second of the last use of each
    collected: int
    torn: int


@dataclass(slots=True)
class _File:
    path: str
    used_s: float
    num_bytes: int


class DiskStore:
    """The files of one namespace. `read`, `write`, `drop` and `scan` are called by one thread."""

    def __init__(self, folder: Path, namespace: Namespace, layout: str, block_bytes: int) -> None:
        """
        namespace  of the engine, with an empty salt
        layout     of the payload, in words that change when it does
        """
        self._folder = folder
        self._namespace = namespace
        self._own = folder / namespace.root().hex()
        self._identity = json.dumps({**asdict(namespace), "layout": layout}, sort_keys=True).encode()
        self._block_bytes = block_bytes
        self._block_tokens = namespace.block_size * TOKEN_BYTES
        self._nonce = secrets.randbits(64)  # engines in several containers may share a folder, and process ids
        self._written = 0

    @property
    def file_bytes(self) -> int:
        """What a block takes on disk, for a budget: whole pages, with a salt of usual length."""
        size = _SIZES.size + len(self._identity) + 64 + DIGEST_BYTES + self._block_tokens
        return -(-(size + self._block_bytes + CHECKSUM_BYTES) // PAGE_BYTES) * PAGE_BYTES

    def lease_file(
        self, *, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> LeaseFile:
        """A new engine's file beside these blocks. See engine.leases.file.LeaseFile for the clocks."""
        return LeaseFile(self._own, self._identity, clock=clock, wall=wall)

    # -- a store ------------------------------------------------------------------------------------------------------

    def read(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> Payload:
        """See engine.tiers.stores.Store. Deletes the file of the first block that is not sound."""
        rows = np.empty((len(keys), self._block_bytes), np.uint8)
        for number, key in enumerate(keys):
            if not self._read_into(key, rows[number]):
                self.drop([key.digest])
                rows = rows[:number]
                break
        if len(rows):
            with contextlib.suppress(OSError):  # what is used goes last when there is too much at the next start, and
                os.utime(self._path(keys[len(rows) - 1].digest))  # the blocks before count as used with it
        return rows

    def write(self, slots: Sequence[int], keys: Sequence[BlockKey], payload: Payload) -> None:
        for key, row in zip(keys, payload, strict=True):
            self._write(key, row)

    def drop(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            _delete(self._path(digest))

    def _read_into(self, key: BlockKey, row: Payload) -> bool:
        expected = self._header(key)
        header, checksum = bytearray(len(expected)), bytearray(CHECKSUM_BYTES)
        path = self._path(key.digest)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            size = len(expected) + self._block_bytes + CHECKSUM_BYTES
            if os.fstat(file).st_size != size or os.readv(file, [header, row.data, checksum]) != size:
                return False
        finally:
            os.close(file)
        return header == expected and checksum == _checksum(expected, row)

    def _write(self, key: BlockKey, row: Payload) -> None:
        header, path = self._header(key), self._path(key.digest)
        self._written += 1
        temporary = f"{path.removesuffix('.kv')}.{self._nonce}.{self._written}.tmp"
        file = self._create(temporary)
        try:
            try:
                size = os.writev(file, [header, row.data, _checksum(header, row)])
            finally:
                os.close(file)
            if size != len(header) + self._block_bytes + CHECKSUM_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), temporary)
            os.replace(temporary, path)
        except OSError:
            _delete(temporary)
            raise

    def _create(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            for folder in (self._folder, self._own, Path(path).parent):
                folder.mkdir(mode=0o700, parents=folder is self._folder, exist_ok=True)
            return os.open(path, flags, 0o600)

    def _path(self, digest: bytes) -> str:
        name = digest.hex()
        return f"{self._own}/{name[:2]}/{name}.kv"

    def _header(self, key: BlockKey) -> bytes:
        salt = _encode(key.salt)
        parent = self._root(key.salt) if key.parent is None else key.parent
        sizes = _SIZES.pack(MAGIC, len(self._identity), len(salt), len(key.tokens), key.index, self._block_bytes)
        return sizes + self._identity + salt + parent + key.tokens

    def _root(self, salt: str) -> bytes:
        return replace(self._namespace, salt=salt).root()

    # -- the start ----------------------------------------------------------------------------------------------------

    def scan(self, most: int, budget_bytes: int, max_age_s: float, leased: Collection[bytes] = ()) -> Scan:
        """Reads the headers of all files, and deletes what is of no use: what proves nothing, what hangs from nothing,
        what is beyond `most` blocks, and files of other namespaces that were not used for `max_age_s` seconds or do
        not fit into the budget beside these. Never fails; an unreadable folder is an empty one.

        leased  digests of blocks that go last, with all that they hang from
        """
        torn = 0
        found: dict[bytes, tuple[BlockKey, float]] = {}
        for path, digest, used_s in self._own_files():
            key = self._read_key(path, digest)
            if key is None:
                torn += 1
                _delete(path)
            else:
                found[digest] = key, used_s
        whole = _with_parents(found)
        kept = _newest(whole, most, leased)
        for digest in found.keys() - kept.keys():
            _delete(self._path(digest))
        room = max(0, budget_bytes - len(kept) * self.file_bytes)
        collected = len(found) - len(kept) + self._collect_others(room, max_age_s)
        in_order = sorted(kept.values(), key=lambda entry: (entry[0].index, entry[1]))
        return Scan([key for key, _ in in_order], [used_s for _, used_s in in_order], collected, torn)

    def _own_files(self) -> Iterator[tuple[str, bytes, float]]:
        """Path, digest and last use of each file that has a block's name. Deletes what a dead engine left half."""
        for entry in _block_folders(self._own):
            for file in _entries(entry.path):
                name = _BLOCK_FILE.fullmatch(file.name)
                with contextlib.suppress(OSError):
                    used_s = file.stat(follow_symlinks=False).st_mtime
                    if name is not None:
                        yield file.path, bytes.fromhex(name[1]), used_s
                    elif _TEMPORARY.fullmatch(file.name) and used_s < time.time() - TEMPORARY_AGE_S:
                        _delete(file.path)

    def _read_key(self, path: str, digest: bytes) -> BlockKey | None:
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

    def _collect_others(self, room_bytes: int, max_age_s: float) -> int:
        """Deletes what other namespaces left: first what is too old, then the oldest until the rest fits."""
        files: list[_File] = []
        for namespace in _entries(str(self._folder)):
            if namespace.path != str(self._own) and _HEX_FOLDER.fullmatch(namespace.name) and _is_folder(namespace):
                files += _files(namespace.path, LEASE_FILE)
                for entry in _block_folders(Path(namespace.path)):
                    files += _files(entry.path, _BLOCK_FILE, _TEMPORARY)
        files.sort(key=lambda file: file.used_s)
        total, oldest_s, deleted = sum(file.num_bytes for file in files), time.time() - max_age_s, 0
        for file in files:
            if file.used_s >= oldest_s and total <= room_bytes:
                break
            _delete(file.path)
            total -= file.num_bytes
            deleted += 1
            for folder in Path(file.path).relative_to(self._folder).parents[:-1]:
                with contextlib.suppress(OSError):  # not empty yet
                    (self._folder / folder).rmdir()
        return deleted


def _with_parents(found: dict[bytes, tuple[BlockKey, float]]) -> dict[bytes, tuple[BlockKey, float]]:
    """Those whose whole prefix is there, parents before children, each as young as its youngest descendant."""
    whole: dict[bytes, tuple[BlockKey, float]] = {}
    for digest, (key, used_s) in sorted(found.items(), key=lambda entry: entry[1][0].index):
        if key.parent is None:
            whole[digest] = key, used_s
        elif key.parent in whole:
            above = whole[key.parent][0]
            if above.index == key.index - 1 and above.salt == key.salt:
                whole[digest] = key, used_s
    for key, used_s in reversed(list(whole.values())):
        used_s = whole[key.digest][1]  # a child may have made it younger
        if key.parent is not None and whole[key.parent][1] < used_s:
            whole[key.parent] = whole[key.parent][0], used_s
    return whole


def _newest(
    whole: dict[bytes, tuple[BlockKey, float]], most: int, leased: Collection[bytes]
) -> dict[bytes, tuple[BlockKey, float]]:
    """`most` blocks: what is leased, then the youngest. Parents are as young as their children and come first, so none
    is left alone."""
    kept: set[bytes] = set()
    for digest in leased:
        here: bytes | None = digest
        while here in whole and here not in kept:
            kept.add(here)
            here = whole[here][0].parent
    in_order = sorted(whole.items(), key=lambda entry: (entry[0] not in kept, -entry[1][1], entry[1][0].index))
    return dict(in_order[:most])


def _checksum(header: bytes, row: Payload) -> bytes:
    hasher = xxhash.xxh3_128(header)
    hasher.update(row.data)
    return hasher.digest()


def _encode(salt: str) -> bytes:
    return salt.encode("utf-8", "surrogatepass")


def _delete(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


def _block_folders(namespace: Path) -> list[os.DirEntry[str]]:
    return [entry for entry in _entries(str(namespace)) if _SUBFOLDER.fullmatch(entry.name) and _is_folder(entry)]


def _files(folder: str, *names: re.Pattern[str]) -> list[_File]:
    files = []
    for entry in _entries(folder):
        if any(name.fullmatch(entry.name) for name in names):
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                pages = -(-status.st_size // PAGE_BYTES) * PAGE_BYTES
                files.append(_File(entry.path, status.st_mtime, pages))
    return files

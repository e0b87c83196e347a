"""Blocks on disk: one file each, which proves by itself what it holds. Survives a restart.

    <folder>/<namespace and numerics, hex>/<first two digits>/<digest, hex>.kv        folders 0700, files 0600
                                          /engine.leases                              see engine/leases/file.py
                                          /lock                                       see engine/tiers/disk_folders.py

A file is written beside its place and renamed into it, and never synced: one that a power cut tore fails its checksum.
What is not sound is a miss, and is deleted. Engines of one model that share a folder have a folder of blocks each.

No torch. engine/tiers/block_file.py is what is in a file, engine/tiers/disk_folders.py which files there are;
engine/tiers/tiers.py decides what is kept.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from engine.leases.file import LeaseFile
from engine.protocol import HASHES, Namespace
from engine.tiers import disk_folders
from engine.tiers.block_file import BlockFormat, block_path
from engine.tiers.copying import BlockKey, Payload
from engine.tiers.disk_folders import BLOCK_FILE, OwnFolder, Part, Swept, delete, files_of, find_parts

TEMPORARY_AGE_S: Final = 60.0
"""A file that was not renamed after so long was left behind by an engine that is gone."""

Found = dict[bytes, tuple[BlockKey, float]]
"""By digest: whose file it is, and the Unix second of its last use."""


@dataclass(frozen=True, slots=True)
class Scan:
    """What was there at the start: blocks whose prefix is there too, by index; those used longest ago first within an
    index. `collected` files were deleted because of their age or the budget, `torn` because they prove nothing."""

    found: list[BlockKey]
    ages_s: list[float]  # seconds since the last use of each
    collected: int
    torn: int


class DiskStore:
    """The files of one engine. Everything but `file_bytes` and `lease_file` is called by one thread."""

    def __init__(self, folder: Path, namespace: Namespace, layout: str, block_bytes: int, numerics: str = "") -> None:
        """
        namespace  of the engine, with an empty salt
        layout     of the payload, in words that change when it does
        numerics   of what computes it (engine/compute/numerics.py): blocks of another arithmetic are another folder's
        """
        self._folder = folder
        root = namespace.root()
        self._root = (HASHES[namespace.hash_name](root + numerics.encode()) if numerics else root).hex()
        self._claimed: OwnFolder | None = None
        self._format = BlockFormat(namespace, f"{layout} {numerics}", block_bytes)
        self._nonce = secrets.randbits(64)  # engines in several containers may share a folder, and process ids
        self._written = 0

    @property
    def file_bytes(self) -> int:
        """What a block takes on disk, for a budget."""
        return self._format.file_bytes

    def lease_file(
        self, *, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> LeaseFile:
        """A new engine's file beside these blocks. See engine.leases.file.LeaseFile for the clocks."""
        return LeaseFile(lambda: self._own, self._format.identity, clock=clock, wall=wall)

    def read(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> Payload:
        """See engine.tiers.copying.Store. Deletes the file of the first block that is not sound."""
        rows = np.empty((len(keys), self._format.block_bytes), np.uint8)
        for number, key in enumerate(keys):
            if not self._format.read(self._path(key.digest), key, rows[number]):
                self.drop([key.digest])
                rows = rows[:number]
                break
        if len(rows):
            self.note_use(keys[len(rows) - 1].digest)
        return rows

    def write(self, slots: Sequence[int], keys: Sequence[BlockKey], payload: Payload) -> None:
        for key, row in zip(keys, payload, strict=True):
            path = self._path(key.digest)
            self._written += 1
            temporary = f"{path.removesuffix('.kv')}.{self._nonce}.{self._written}.tmp"
            self._format.write(path, temporary, key, row)

    def drop(self, digests: Sequence[bytes]) -> None:
        with contextlib.suppress(OSError):  # without a folder there is nothing
            for digest in digests:
                delete(self._path(digest))

    def note_use(self, digest: bytes) -> None:
        """In the file's time: what was used last goes last at the next start, and blocks before it count as used with
        it."""
        with contextlib.suppress(OSError):
            os.utime(self._path(digest))

    def close(self) -> None:
        """Another engine may have the folder from now on."""
        if self._claimed is not None:
            self._claimed.release()
            self._claimed = None

    # -- the start ----------------------------------------------------------------------------------------------------

    def scan(self, most: int, budget_bytes: int, max_age_s: float, leased: Collection[bytes] = ()) -> Scan:
        """Reads the headers of all files, and deletes what is of no use: what proves nothing, what hangs from nothing,
        what is beyond `most` blocks, what was not used for `max_age_s` seconds, and files of other namespaces that do
        not fit into the budget beside these. Never fails; an unreadable folder is an empty one.

        leased  digests of blocks that go last, whatever their age, with all that they hang from
        """
        found: Found = {}
        torn = 0
        try:
            own = self._own
        except OSError:
            return Scan([], [], 0, 0)
        now_s = time.time()
        for path, digest, used_s in _block_files(own, temporary_s=now_s - TEMPORARY_AGE_S):
            key = self._format.read_key(path, digest)
            if key is None:
                torn += 1
                delete(path)
            else:
                found[digest] = key, used_s
        kept = _newest(_with_parents(found), most, leased, now_s - max_age_s)
        self.drop([*(found.keys() - kept.keys())])
        room_bytes = max(0, budget_bytes - len(kept) * self.file_bytes)
        collected = len(found) - len(kept) + self._collect_others(own, room_bytes, now_s - max_age_s)
        in_order = sorted(kept.values(), key=lambda entry: (entry[0].index, entry[1]))
        ages_s = [max(0.0, now_s - used_s) for _, used_s in in_order]  # a file may be of a clock that was ahead
        return Scan([key for key, _ in in_order], ages_s, collected, torn)

    def _collect_others(self, own: Path, room_bytes: int, oldest_s: float) -> int:
        """Deletes what engines left that are gone: first what is too old, then the oldest of other namespaces until
        the rest of these fits. What other engines of this namespace left is their successors', who may start now."""
        root, deleted = own.name.partition("-")[0], 0
        with contextlib.suppress(OSError), disk_folders.choosing(self._folder):
            left = [path for path in disk_folders.find_others(self._folder, own) if disk_folders.is_abandoned(path)]
            parts = [part for path in left for part in find_parts(path)]
            kin = {part for part in parts if os.path.basename(part.folder).partition("-")[0] == root}
            files = [(file, part in kin) for part in parts for file in files_of(part)]
            files.sort(key=lambda entry: entry[0].used_s)
            total = sum(file.num_bytes for file, is_kin in files if not is_kin)
            for file, is_kin in files:
                if file.used_s >= oldest_s and (is_kin or total <= room_bytes):
                    continue
                delete(file.path)
                total -= 0 if is_kin else file.num_bytes
                deleted += 1
            for part in parts:
                disk_folders.remove_if_empty(part)
        return deleted

    # -- upkeep: calls never fail -------------------------------------------------------------------------------------

    @property
    def owner(self) -> str:
        """A name that no other engine's folder has."""
        return f"{self._nonce:016x}"

    def find_parts(self) -> list[Part]:
        """All files but this engine's, of this model and of others, also those of engines that live."""
        with contextlib.suppress(OSError):
            return [part for path in disk_folders.find_others(self._folder, self._own) for part in find_parts(path)]
        return []

    def expire(self, part: Part, max_age_s: float) -> Swept:
        """Deletes files of other engines that were not used for so long; none of an engine that lives."""
        return disk_folders.sweep(self._folder, part, time.time() - max_age_s)

    def find_own(self) -> list[bytes]:
        """Digests of all blocks that this engine has on disk. Deletes what was not renamed: this thread alone writes
        here."""
        with contextlib.suppress(OSError):
            return [digest for _, digest, _ in _block_files(self._own, temporary_s=float("inf"))]
        return []

    def remove(self, digests: Sequence[bytes]) -> Swept:
        """Deletes these blocks of this engine, as `drop` does, and counts them."""
        with contextlib.suppress(OSError):
            return disk_folders.remove([self._path(digest) for digest in digests])
        return Swept(left=len(digests))

    # -- files --------------------------------------------------------------------------------------------------------

    @property
    def _own(self) -> Path:
        """This engine's folder; another one when it was deleted. Raises OSError when there is none to be
        had."""
        if self._claimed is not None and not self._claimed.is_held:
            self.close()
        if self._claimed is None:
            self._claimed = disk_folders.claim(self._folder, self._root, self.owner)
        return self._claimed.path

    def _path(self, digest: bytes) -> str:
        return block_path(self._own, digest)


def _block_files(own: Path, *, temporary_s: float) -> Iterator[tuple[str, bytes, float]]:
    """Path, digest and last use of each file that has a block's name. Deletes what was not renamed since then."""
    for part in find_parts(own)[:-1]:
        for file in files_of(part):
            name = BLOCK_FILE.fullmatch(os.path.basename(file.path))
            if name is not None:
                yield file.path, bytes.fromhex(name[1]), file.used_s
            elif file.used_s < temporary_s:
                delete(file.path)


def _with_parents(found: Found) -> Found:
    """Those whose whole prefix is there, parents before children, each as young as its youngest descendant."""
    whole: Found = {}
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


def _newest(whole: Found, most: int, leased: Collection[bytes], oldest_s: float) -> Found:
    """`most` blocks: what is leased, then the youngest of those that are young enough. Parents are as young as their
    children and come first, so none is left alone."""
    kept: set[bytes] = set()
    for digest in leased:
        here: bytes | None = digest
        while here in whole and here not in kept:
            kept.add(here)
            here = whole[here][0].parent
    wanted = [entry for entry in whole.items() if entry[0] in kept or entry[1][1] >= oldest_s]
    in_order = sorted(wanted, key=lambda entry: (entry[0] not in kept, -entry[1][1], entry[1][0].index))
    return dict(in_order[:most])

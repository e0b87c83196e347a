"""Blocks on disk: one file each, which proves by itself what it holds. Survives a restart.

    <folder>/<namespace and numerics, hex>/<first two digits>/<digest, hex>.kv        folders 0700, files 0600
                                          /<writer, hex>.leases                       see engine/leases/file.py
                                          /lock                                       see engine/tiers/disk_folders.py

A file is written beside its place and renamed into it, and never synced: one that a power cut tore fails its checksum.
What is not sound is a miss, and is deleted. Engines of one model that share a folder have a folder of blocks each.

No torch. A store of engine/tiers/stores.py; engine/tiers/block_file.py is what is in a file, engine/tiers/disk_scan.py
what is found at the start; engine/tiers/tiers.py decides what is kept.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np

from engine.leases.file import LeaseFile
from engine.protocol import HASHES, Namespace
from engine.tiers import disk_sweep
from engine.tiers.block_file import BlockFormat, block_path
from engine.tiers.disk_files import delete, subfolders
from engine.tiers.disk_folders import OwnFolder, claim
from engine.tiers.disk_scan import Scan, scan
from engine.tiers.stores import BlockKey, Part, Payload, Swept


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
        """See engine.tiers.stores.Store. Deletes the file of the first block that is not sound."""
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
            self._write(key, row)

    def drop(self, digests: Sequence[bytes]) -> None:
        with contextlib.suppress(OSError):  # without a folder there is nothing
            for digest in digests:
                delete(self._path(digest))

    def scan(self, most: int, budget_bytes: int, max_age_s: float, leased: Collection[bytes] = ()) -> Scan:
        """Reads the headers of all files, and deletes what is of no use: what proves nothing, what hangs from nothing,
        what is beyond `most` blocks, what was not used for `max_age_s` seconds, and files of other namespaces that do
        not fit into the budget beside these. Never fails; an unreadable folder is an empty one.

        leased  digests of blocks that go last, whatever their age, with all that they hang from
        """
        try:
            own = self._own
        except OSError:
            return Scan([], [], 0, 0)
        return scan(
            self._folder,
            own,
            self._format,
            most=most,
            budget_bytes=budget_bytes,
            max_age_s=max_age_s,
            leased=leased,
        )

    # -- see engine.tiers.stores.FolderStore --------------------------------------------------------------------------

    def note_use(self, digest: bytes) -> None:
        """In the file's time: what was used last goes last at the next start, and blocks before it count as used with
        it."""
        with contextlib.suppress(OSError):
            os.utime(self._path(digest))

    def find_parts(self) -> list[Part]:
        with contextlib.suppress(OSError):
            return disk_sweep.find_parts(self._folder, self._own)
        return []

    def expire(self, part: Part, max_age_s: float) -> int:
        return disk_sweep.expire(self._folder, part, max_age_s)

    @property
    def owner(self) -> str:
        return f"{self._nonce:016x}"

    def find_own_parts(self) -> list[Part]:
        with contextlib.suppress(OSError):
            return [Part(str(self._own), entry.name) for entry in subfolders(self._own)]
        return []

    def find_salted(self, part: Part, prefix: str) -> list[bytes]:
        return disk_sweep.find_salted(part, prefix)

    def remove(self, digests: Sequence[bytes]) -> Swept:
        with contextlib.suppress(OSError):
            return disk_sweep.remove([self._path(digest) for digest in digests])
        return Swept(left=len(digests))

    def purge(self, part: Part, prefix: str) -> Swept:
        return disk_sweep.purge(self._folder, part, prefix)

    def close(self) -> None:
        """Another engine may have the folder from now on."""
        if self._claimed is not None:
            self._claimed.release()
            self._claimed = None

    @property
    def _own(self) -> Path:
        """This engine's folder. Raises OSError when there is none to be had."""
        if self._claimed is None:
            self._claimed = claim(self._folder, self._root, self.owner)
        return self._claimed.path

    def _write(self, key: BlockKey, row: Payload) -> None:
        path = self._path(key.digest)
        self._written += 1
        temporary = f"{path.removesuffix('.kv')}.{self._nonce}.{self._written}.tmp"
        file = self._create(temporary)
        try:
            try:
                self._format.write(file, key, row)
            finally:
                os.close(file)
            os.replace(temporary, path)
        except OSError:
            delete(temporary)
            raise

    def _create(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            for folder in (self._own, Path(path).parent):
                folder.mkdir(mode=0o700, exist_ok=True)
            return os.open(path, flags, 0o600)

    def _path(self, digest: bytes) -> str:
        return block_path(self._own, digest)

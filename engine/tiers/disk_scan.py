"""What a folder of block files holds when an engine starts: what can be used again, and what is to go.

What proves nothing, what hangs from nothing, what is too much and what engines left too long ago that are gone is
deleted; nothing of an engine that lives. Never fails; an unreadable folder is an empty one. engine/tiers/disk_store.py
asks once, on the tier's thread.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.leases.file import LEASE_FILE
from engine.tiers.block_file import BlockFormat, block_path, in_pages
from engine.tiers.disk_folders import BLOCK_FOLDER, choosing, is_abandoned, remove_if_empty
from engine.tiers.stores import BlockKey

TEMPORARY_AGE_S: Final = 60.0
"""A file that was not renamed after so long was left behind by an engine that is gone."""

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


def scan(
    folder: Path,
    own: Path,
    files: BlockFormat,
    *,
    most: int,
    budget_bytes: int,
    max_age_s: float,
    leased: Collection[bytes],
) -> Scan:
    """See DiskStore.scan. `own` is the engine's folder in `folder`."""
    torn = 0
    found: dict[bytes, tuple[BlockKey, float]] = {}
    for path, digest, used_s in _own_files(own):
        key = files.read_key(path, digest)
        if key is None:
            torn += 1
            delete(path)
        else:
            found[digest] = key, used_s
    whole = _with_parents(found)
    kept = _newest(whole, most, leased)
    for digest in found.keys() - kept.keys():
        delete(block_path(own, digest))
    room = max(0, budget_bytes - len(kept) * files.file_bytes)
    collected = len(found) - len(kept) + _collect_others(folder, own, room, max_age_s)
    in_order = sorted(kept.values(), key=lambda entry: (entry[0].index, entry[1]))
    return Scan([key for key, _ in in_order], [used_s for _, used_s in in_order], collected, torn)


def delete(path: str) -> None:
    """If it is there and may be."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def _own_files(own: Path) -> Iterator[tuple[str, bytes, float]]:
    """Path, digest and last use of each file that has a block's name. Deletes what a dead engine left half."""
    for entry in _block_folders(own):
        for file in _entries(entry.path):
            name = _BLOCK_FILE.fullmatch(file.name)
            with contextlib.suppress(OSError):
                used_s = file.stat(follow_symlinks=False).st_mtime
                if name is not None:
                    yield file.path, bytes.fromhex(name[1]), used_s
                elif _TEMPORARY.fullmatch(file.name) and used_s < time.time() - TEMPORARY_AGE_S:
                    delete(file.path)


def _collect_others(folder: Path, own: Path, room_bytes: int, max_age_s: float) -> int:
    """Deletes what engines left that are gone: first what is too old, then the oldest of other namespaces until the
    rest of these fits. What other engines of this namespace left is their successors', who may start right now."""
    root, oldest_s, deleted = own.name.partition("-")[0], time.time() - max_age_s, 0
    with contextlib.suppress(OSError), choosing(folder):
        left = [Path(entry.path) for entry in _entries(str(folder)) if entry.path != str(own) and _is_folder(entry)]
        left = [path for path in left if BLOCK_FOLDER.fullmatch(path.name) and is_abandoned(path)]
        files = [(file, path.name.partition("-")[0] == root) for path in left for file in _all_files(path)]
        files.sort(key=lambda entry: entry[0].used_s)
        total = sum(file.num_bytes for file, is_kin in files if not is_kin)
        for file, is_kin in files:
            if file.used_s >= oldest_s and (is_kin or total <= room_bytes):
                continue
            delete(file.path)
            total -= 0 if is_kin else file.num_bytes
            deleted += 1
        for path in left:
            for entry in _block_folders(path):
                with contextlib.suppress(OSError):  # not empty
                    os.rmdir(entry.path)
            remove_if_empty(path)
    return deleted


def _all_files(own: Path) -> list[_File]:
    """Blocks, leases, and what was left half, of one engine's folder."""
    files = _files(str(own), LEASE_FILE)
    for entry in _block_folders(own):
        files += _files(entry.path, _BLOCK_FILE, _TEMPORARY)
    return files


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
                files.append(_File(entry.path, status.st_mtime, in_pages(status.st_size)))
    return files

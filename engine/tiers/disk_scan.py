"""What a folder of block files holds when an engine starts: what can be used again, and what is to go.

Deleted is what proves nothing, what hangs from nothing, what is too much, what nobody used for too long and no lease
promises, and what engines that are gone left beyond the budget; nothing of an engine that lives. Never fails; an
unreadable folder is an empty one. engine/tiers/disk_store.py asks once, on the tier's thread.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.tiers.block_file import BlockFormat, block_path
from engine.tiers.disk_files import BLOCK_FILE, TEMPORARY, all_files, delete, entries, is_folder, subfolders
from engine.tiers.disk_folders import BLOCK_FOLDER, choosing, is_abandoned, remove_if_empty
from engine.tiers.stores import BlockKey

TEMPORARY_AGE_S: Final = 60.0
"""A file that was not renamed after so long was left behind by an engine that is gone."""


@dataclass(frozen=True, slots=True)
class Scan:
    """What was there at the start: blocks whose prefix is there too, by index; those used longest ago first within an
    index. `collected` files were deleted because of their age or the budget, `torn` because they prove nothing."""

    found: list[BlockKey]
    ages_s: list[float]  # seconds since the last use of each
    collected: int
    torn: int


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
    now_s = time.time()
    kept = _newest(whole, most, leased, now_s - max_age_s)
    for digest in found.keys() - kept.keys():
        delete(block_path(own, digest))
    room = max(0, budget_bytes - len(kept) * files.file_bytes)
    collected = len(found) - len(kept) + _collect_others(folder, own, room, max_age_s)
    in_order = sorted(kept.values(), key=lambda entry: (entry[0].index, entry[1]))
    ages_s = [max(0.0, now_s - used_s) for _, used_s in in_order]  # a file may be of a clock that was ahead
    return Scan([key for key, _ in in_order], ages_s, collected, torn)


def _own_files(own: Path) -> Iterator[tuple[str, bytes, float]]:
    """Path, digest and last use of each file that has a block's name. Deletes what a dead engine left half."""
    for entry in subfolders(own):
        for file in entries(entry.path):
            name = BLOCK_FILE.fullmatch(file.name)
            with contextlib.suppress(OSError):
                used_s = file.stat(follow_symlinks=False).st_mtime
                if name is not None:
                    yield file.path, bytes.fromhex(name[1]), used_s
                elif TEMPORARY.fullmatch(file.name) and used_s < time.time() - TEMPORARY_AGE_S:
                    delete(file.path)


def _collect_others(folder: Path, own: Path, room_bytes: int, max_age_s: float) -> int:
    """Deletes what engines left that are gone: first what is too old, then the oldest of other namespaces until the
    rest of these fits. What other engines of this namespace left is their successors', who may start right now."""
    root, oldest_s, deleted = own.name.partition("-")[0], time.time() - max_age_s, 0
    with contextlib.suppress(OSError), choosing(folder):
        left = [Path(entry.path) for entry in entries(folder) if entry.path != str(own) and is_folder(entry)]
        left = [path for path in left if BLOCK_FOLDER.fullmatch(path.name) and is_abandoned(path)]
        files = [(file, path.name.partition("-")[0] == root) for path in left for file in all_files(path)]
        files.sort(key=lambda entry: entry[0].used_s)
        total = sum(file.num_bytes for file, is_kin in files if not is_kin)
        for file, is_kin in files:
            if file.used_s >= oldest_s and (is_kin or total <= room_bytes):
                continue
            delete(file.path)
            total -= 0 if is_kin else file.num_bytes
            deleted += 1
        for path in left:
            for entry in subfolders(path):
                with contextlib.suppress(OSError):  # not empty
                    os.rmdir(entry.path)
            remove_if_empty(path)
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
    whole: dict[bytes, tuple[BlockKey, float]], most: int, leased: Collection[bytes], oldest_s: float
) -> dict[bytes, tuple[BlockKey, float]]:
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

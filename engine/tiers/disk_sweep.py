"""Deletes files of engines that are gone, while this one runs: a part at a time, so that no copy waits for long.

While a part is looked at no engine can take its folder over; what an engine has that lives is not touched. Runs on the
tier's thread. engine/tiers/aging.py asks for what is too old, engine/tiers/purging.py for what is of one scope.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from engine.leases.file import purge_leases
from engine.tiers.block_file import encode_salt, in_pages, read_salt
from engine.tiers.disk_files import (
    BLOCK_FILE,
    block_files,
    delete,
    entries,
    is_folder,
    lease_files,
    lease_paths,
    subfolders,
)
from engine.tiers.disk_folders import BLOCK_FOLDER, choosing, is_abandoned, read_owner, remove_if_empty
from engine.tiers.stores import Part, Swept


def find_parts(folder: Path, own: Path) -> list[Part]:
    """The parts of all folders of blocks but the engine's own, whoever has them; of each its leases last."""
    others = [entry for entry in entries(folder) if entry.path != str(own) and is_folder(entry)]
    parts: list[Part] = []
    for other in sorted((entry for entry in others if BLOCK_FOLDER.fullmatch(entry.name)), key=lambda one: one.name):
        parts += [Part(other.path, entry.name) for entry in subfolders(other.path)]
        parts.append(Part(other.path, ""))
    return parts


def expire(folder: Path, part: Part, max_age_s: float) -> int:
    """Deletes the files of a part that were not used for so long, unless an engine has them that lives; folders that
    are empty go too. How many files there were."""
    oldest_s, deleted = time.time() - max_age_s, 0
    with contextlib.suppress(OSError), choosing(folder):
        if not is_abandoned(Path(part.folder)):
            return 0
        files = block_files(f"{part.folder}/{part.name}") if part.name else lease_files(part.folder)
        for file in files:
            if file.used_s < oldest_s:
                delete(file.path)
                deleted += 1
        tidy(part)
    return deleted


def tidy(part: Part) -> None:
    """Removes what is empty. Inside of `choosing`."""
    if part.name:
        with contextlib.suppress(OSError):  # not empty
            os.rmdir(f"{part.folder}/{part.name}")
    else:
        remove_if_empty(Path(part.folder))


def find_salted(part: Part, prefix: str) -> list[bytes]:
    """See FolderStore.find_salted. Deletes what was left half: this thread alone writes here."""
    salt, digests = encode_salt(prefix), []
    for file in block_files(f"{part.folder}/{part.name}"):
        name = BLOCK_FILE.fullmatch(Path(file.path).name)
        if name is None:
            delete(file.path)
        elif _belongs(file.path, salt):
            digests.append(bytes.fromhex(name[1]))
    return digests


def remove(paths: Sequence[str]) -> Swept:
    """Deletes these files, and counts those that were there."""
    files = num_bytes = left = 0
    for path in paths:
        try:
            size = os.stat(path, follow_symlinks=False).st_size
            os.unlink(path)
        except FileNotFoundError:
            continue
        except OSError:
            left += 1
        else:
            files, num_bytes = files + 1, num_bytes + in_pages(size)
    return Swept(files, num_bytes, left)


def purge(folder: Path, part: Part, prefix: str) -> Swept:
    """See FolderStore.purge."""
    try:
        with choosing(folder):
            if not Path(part.folder).exists():
                return Swept()
            if not is_abandoned(Path(part.folder)):
                return Swept(owner=read_owner(Path(part.folder)))
            swept = _purge_blocks(part, encode_salt(prefix)) if part.name else _purge_leases(part, prefix)
            tidy(part)
            return swept
    except OSError:
        return Swept(left=1)


def _purge_blocks(part: Part, salt: bytes) -> Swept:
    """Raises OSError for a folder that cannot be read."""
    subfolder = f"{part.folder}/{part.name}"
    if os.path.exists(subfolder):
        os.listdir(subfolder)
    return remove([file.path for file in block_files(subfolder) if _belongs(file.path, salt)])


def _purge_leases(part: Part, prefix: str) -> Swept:
    files = left = 0
    for path in lease_paths(part.folder):
        try:
            files += purge_leases(path, prefix)
        except OSError:
            left += 1
    return Swept(files, 0, left)


def _belongs(path: str, salt: bytes) -> bool:
    """Whether a block's salt begins so, or cannot be read."""
    try:
        found = read_salt(path)
    except OSError:
        return True
    return found is None or found.startswith(salt)

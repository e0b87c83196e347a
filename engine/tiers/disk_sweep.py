"""Deletes files of engines that are gone, while this one runs: a part at a time, so that no copy waits for long.

While a part is looked at no engine can take its folder over; what an engine has that lives is not touched. Runs on the
tier's thread. engine/tiers/aging.py asks for what is too old.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from engine.tiers.disk_files import block_files, delete, entries, is_folder, lease_files, subfolders
from engine.tiers.disk_folders import BLOCK_FOLDER, choosing, is_abandoned, remove_if_empty
from engine.tiers.stores import Part


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

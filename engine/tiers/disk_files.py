"""Lists and deletes the files of the folders that engines keep blocks in. Never fails: what cannot be read is missing.

engine/tiers/disk_scan.py looks at all of an engine's own files when it starts, engine/tiers/disk_sweep.py at those that
engines left; engine/tiers/disk_folders.py says whose a folder is.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.leases.file import LEASE_FILE
from engine.leases.file import TEMPORARY as LEASE_TEMPORARY
from engine.tiers.block_file import in_pages

BLOCK_FILE: Final = re.compile(r"([0-9a-f]{32})\.kv")
TEMPORARY: Final = re.compile(r"[0-9a-f]{32}\.\d+\.\d+\.tmp")
_SUBFOLDER: Final = re.compile(r"[0-9a-f]{2}")


@dataclass(slots=True)
class File:
    path: str
    used_s: float  # Unix second
    num_bytes: int


def delete(path: str) -> None:
    """If it is there and may be."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def entries(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []


def is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


def subfolders(own: str | Path) -> list[os.DirEntry[str]]:
    """The folders in which an engine's folder has its blocks."""
    return [entry for entry in entries(own) if _SUBFOLDER.fullmatch(entry.name) and is_folder(entry)]


def block_files(subfolder: str) -> list[File]:
    """Blocks, and what was left half."""
    return _files(subfolder, BLOCK_FILE, TEMPORARY)


def lease_files(own: str | Path) -> list[File]:
    return _files(str(own), LEASE_FILE)


def lease_paths(own: str | Path) -> list[str]:
    """Also of those that were left half."""
    return [file.path for file in _files(str(own), LEASE_FILE, LEASE_TEMPORARY)]


def all_files(own: Path) -> list[File]:
    """Blocks, leases, and what was left half, of one engine's folder."""
    return lease_files(own) + [file for entry in subfolders(own) for file in block_files(entry.path)]


def _files(folder: str, *names: re.Pattern[str]) -> list[File]:
    files = []
    for entry in entries(folder):
        if any(name.fullmatch(entry.name) for name in names):
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                files.append(File(entry.path, status.st_mtime, in_pages(status.st_size)))
    return files

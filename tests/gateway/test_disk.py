"""Parts of files: somebody's while they are written, and nobody's afterwards."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from gateway import disk
from gateway.disk import Part
from gateway.errors import StorageFullError

LIMIT_S = 10.0


def free(num_bytes: int, more_bytes: int) -> None:
    """There is room for anything."""


def test_a_part_is_somebodys_until_it_is_closed_and_what_was_renamed_stays(tmp_path: Path) -> None:
    part, whole = Part(tmp_path, free, "Files"), tmp_path / "whole"
    part.write(b"one ")
    part.write(b"two")
    assert part.num_bytes == 7
    assert disk.is_written(part.path)
    part.keep_as(whole)
    assert disk.is_written(whole)
    part.discard()
    assert not disk.is_written(whole)
    assert whole.read_bytes() == b"one two"
    assert whole.stat().st_mode & 0o777 == 0o600


def test_what_was_discarded_is_gone_and_takes_no_more_bytes(tmp_path: Path) -> None:
    part = Part(tmp_path, free, "Files")
    part.write(b"x")
    part.discard()
    part.write(b"a write that was already on its way")
    part.sync()
    part.discard()
    assert (list(tmp_path.iterdir()), part.num_bytes) == ([], 1)


def test_who_discards_waits_for_the_write_that_runs(tmp_path: Path) -> None:
    writes, goes_on = Event(), Event()

    def held(num_bytes: int, more_bytes: int) -> None:
        writes.set()
        assert goes_on.wait(LIMIT_S)

    part = Part(tmp_path, held, "Files")
    with ThreadPoolExecutor(2) as threads:
        write = threads.submit(part.write, b"x")
        assert writes.wait(LIMIT_S)
        discard = threads.submit(part.discard)
        goes_on.set()
        write.result(LIMIT_S)
        discard.result(LIMIT_S)
    assert list(tmp_path.iterdir()) == []


def test_its_owner_says_how_much_there_may_be_and_errors_are_translated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def three(num_bytes: int, more_bytes: int) -> None:
        if num_bytes + more_bytes > 3:
            raise ValueError("too many")

    part = Part(tmp_path, three, "Files")
    part.write(b"xy")
    with pytest.raises(ValueError, match="too many"):
        part.write(b"zz")
    part.write(b"z")
    part.sync()
    assert part.path.read_bytes() == b"xyz"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StorageFullError):
            part.sync()
        patched.setattr(disk, "lock", full)
        with pytest.raises(StorageFullError):
            Part(tmp_path, three, "Files")
    part.discard()
    assert list(tmp_path.iterdir()) == []

"""Leases on disk: what is read is what was promised, and whatever else lies there is nothing."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import xxhash

from engine.leases.file import MAGIC, LeaseFile
from engine.leases.leases import last_digest
from engine.leases.pins import Lease, take_fingerprint

IDENTITY = b'{"weights": "w"}'
DAY_S = 86400.0


@dataclass
class Clocks:
    """Of one machine: the first begins anew with every engine's life, the second goes on."""

    now: float = 1000.0
    wall: float = 1.7e9

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.wall += seconds


class Desk:
    def __init__(self, path: Path) -> None:
        self.folder = path / "blocks" / "namespace"
        self.clocks = Clocks()

    def start(self, identity: bytes = IDENTITY) -> LeaseFile:
        return LeaseFile(lambda: self.folder, identity, clock=lambda: self.clocks.now, wall=lambda: self.clocks.wall)

    def paths(self) -> list[Path]:
        return sorted(self.folder.glob("*"))

    def leave(self, *leases: Lease) -> Path:
        """An engine writes these and is gone. Returns its file."""
        self.start().write(leases)
        (path,) = self.paths()
        return path


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def lease(number: int = 1, *, ttl_s: float = 100.0, expires_s: float = 1050.0, salt: str = "s") -> Lease:
    return Lease(
        "tenant",
        salt,
        digest=bytes([number]) * 16,
        tail=b"tail",
        fingerprint=take_fingerprint(bytes([number])),
        tokens=9,
        depth=2,
        ttl_s=ttl_s,
        expires_s=expires_s,
        number=number,
        state="kept",
        tier=1,
        block=7,
    )


def said(leases: list[Lease]) -> list[tuple[object, ...]]:
    return [
        (one.tenant, one.salt, one.digest, one.tail, one.fingerprint, one.tokens, one.depth, one.ttl_s, one.expires_s)
        for one in leases
    ]


def test_what_is_read_is_what_was_written(desk: Desk) -> None:
    odd = replace(lease(2), tenant="north\nsüd", salt="\ud800 \u2028", tail=b"", digest=last_digest("\ud800", ()))
    desk.leave(lease(), odd)
    read = desk.start().read()
    assert sorted(said(read)) == sorted(said([lease(), odd]))
    assert {(one.number, one.state, one.tier, one.block) for one in read} == {(0, "degraded", 0, None)}


def test_only_its_owner_may_read_it(desk: Desk) -> None:
    path = desk.leave(lease())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_times_go_on_while_no_engine_runs_and_their_clock_begins_anew(desk: Desk) -> None:
    desk.leave(lease(1, expires_s=1050.0), lease(2, expires_s=1020.0))
    desk.clocks.pass_time(30.0)
    desk.clocks.now = 3.0
    read = desk.start().read()
    assert [(one.digest[0], one.expires_s) for one in read] == [(1, 23.0)]


def test_no_lease_lasts_longer_than_it_was_asked_for_when_the_wall_clock_is_put_back(desk: Desk) -> None:
    desk.leave(lease(ttl_s=100.0, expires_s=1050.0))
    desk.clocks.wall -= DAY_S
    (read,) = desk.start().read()
    assert read.expires_s == desk.clocks.now + 100.0


def test_the_most_valuable_come_first(desk: Desk) -> None:
    desk.leave(*(lease(number, ttl_s=100.0, expires_s=1000.0 + number) for number in (3, 9, 1)))
    assert [one.digest[0] for one in desk.start().read()] == [9, 3, 1]


def test_nothing_is_read_where_nothing_was_written(desk: Desk) -> None:
    assert desk.start().read() == []
    desk.folder.parent.mkdir(parents=True)
    desk.folder.write_text("a file, not a folder")
    assert desk.start().read() == []
    with pytest.raises(OSError, match=r"."):
        desk.start().write([lease()])


def test_a_file_that_is_cut_anywhere_has_no_leases_and_is_deleted(desk: Desk) -> None:
    path = desk.leave(lease(), lease(2))
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert desk.start().read() == []
        assert not path.exists()
    path.write_bytes(whole)
    assert len(desk.start().read()) == 2


def test_a_flipped_bit_in_any_byte_is_no_lease(desk: Desk) -> None:
    path = desk.leave(lease())
    whole = path.read_bytes()
    for place in range(len(whole)):
        torn = bytearray(whole)
        torn[place] ^= 1 << (place % 8)
        path.write_bytes(torn)
        assert desk.start().read() == [], f"byte {place} of {len(whole)}"


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b'["t", "s", "00", "", "00", 1, 0, 5.0]',
        b'["t", "s", "0", "", "00", 1, 0, 5.0, 1.7e9]',
        b'["t", null, "00", "", "00", 1, 0, 5.0, 1.7e9]',
        b'["t", "s", "00", "", "00", 1, 0, 0, 1.7e9]',
        b'["t", "s", "00", "", "00", 1, 0, 5.0, NaN]',
        b'["t", "s", 7, "", "00", 1, 0, 5.0, 1.7e9]',
        b'["t", "s", "00", "", "00", "1", 0, 5.0, 1.7e9]',
        b"\xff",
    ],
)
def test_a_file_that_is_whole_and_makes_no_sense_has_no_leases(desk: Desk, line: bytes) -> None:
    path = desk.leave(lease())
    body = path.read_bytes()[:-16] + line + b"\n"
    path.write_bytes(body + xxhash.xxh3_128_digest(body))
    assert desk.start().read() == []
    assert not path.exists()


def test_leases_of_another_version_namespace_or_layout_are_not_read(desk: Desk) -> None:
    path = desk.leave(lease())
    assert desk.start(b'{"weights": "v"}').read() == []
    assert not path.exists(), "its blocks are of no use either"
    path = desk.leave(lease())
    body = path.read_bytes()[:-16].replace(MAGIC, MAGIC[:-1] + b"\x00")
    path.write_bytes(body + xxhash.xxh3_128_digest(body))
    assert desk.start().read() == []


def test_what_an_engine_that_is_gone_left_stays_until_the_next_one_has_written_it_again(desk: Desk) -> None:
    path = desk.leave(lease())
    assert len(desk.start().read()) == 1
    assert path.exists()
    heir = desk.start()
    heir.write(heir.read())
    assert desk.paths() == [path]
    assert said(desk.start().read()) == said([lease()])


def test_an_engine_without_leases_has_no_file(desk: Desk) -> None:
    file = desk.start()
    file.write([])
    file.write([lease()])
    assert len(desk.paths()) == 1
    file.write([])
    assert desk.paths() == []


def test_what_a_dead_engine_left_half_is_deleted_and_strange_files_are_not(desk: Desk) -> None:
    path = desk.leave(lease())
    half, strange = path.with_name(f"{path.name}.tmp"), desk.folder / "notes.txt"
    for left in (half, strange):
        left.write_bytes(b"half")
    assert len(desk.start().read()) == 1
    assert (half.exists(), strange.exists()) == (False, True)


def test_a_write_that_fails_leaves_what_was_there(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    file = desk.start()
    file.write([lease(1)])
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", lambda file, parts: sum(map(len, parts)) - 1)
        with pytest.raises(OSError, match="No space"):
            file.write([lease(2)])
    assert len(desk.paths()) == 1
    assert [one.digest[0] for one in desk.start().read()] == [1]

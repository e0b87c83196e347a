"""The promises of files in a folder: whole or not at all, each tenant's own, and nothing left of what was given up."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.config import FileSettings
from gateway.disk import Part
from gateway.errors import QuotaError, StorageError, StorageFullError
from gateway.files import folder as module
from gateway.files.folder import GONE_S, Folder
from gateway.types import BATCH_OUTPUT, StoredFile
from tests.fakes.tuned import tuned

LIMITS = tuned(FileSettings, max_files=3, max_bytes=1000, min_free_bytes=0)


class Bench:
    """A folder, its clock, and a second gateway on the same one."""

    def __init__(self, root: Path, settings: FileSettings = LIMITS) -> None:
        self.root = root
        self.now_s = 1_790_000_000.0
        self.one = Folder(root, settings, lambda: self.now_s)
        self.other = Folder(root, settings, lambda: self.now_s)

    def put(self, data: bytes, tenant: str = "a", name: str = "x", ttl_s: float | None = None) -> StoredFile:
        part, _ = self.one.begin(tenant)
        try:
            part.write(data)
            return self.one.keep(part, tenant, name, "batch", "text/plain", ttl_s)
        finally:
            part.discard()

    def bytes_of(self, stored: StoredFile, tenant: str = "a") -> bytes | None:
        opened = self.other.open(tenant, stored.id)
        if opened is None:
            return None
        with opened[1] as file:
            return file.read()

    def names(self, tenant: str = "a") -> list[str]:
        return sorted(path.name for path in (self.root / tenant).iterdir() if path.name != "lock")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "files")


def test_what_was_kept_is_the_same_for_every_gateway_on_the_folder(bench: Bench) -> None:
    assert bench.other.all_of("a") == []
    stored = bench.put(b"\x00some\r\nbytes", name="Prüfung \u2028.jsonl", ttl_s=60)
    assert stored == StoredFile(
        stored.id, "Prüfung \u2028.jsonl", "batch", "text/plain", 12, bench.now_s, bench.now_s + 60
    )
    assert bench.other.all_of("a") == [stored]
    assert bench.other.find("a", stored.id) == stored
    assert bench.bytes_of(stored) == b"\x00some\r\nbytes"
    assert {(bench.root / "a" / name).stat().st_mode & 0o777 for name in bench.names()} == {0o600}


def test_a_tenant_sees_and_deletes_its_own_files_alone(bench: Bench) -> None:
    stored = bench.put(b"x")
    assert bench.one.all_of("b") == []
    assert bench.one.find("b", stored.id) is None
    assert bench.one.open("b", stored.id) is None
    assert not bench.one.delete("b", stored.id)
    assert bench.bytes_of(stored) == b"x"


@pytest.mark.parametrize("file_id", ["", "x", "../a/lock", "0" * 31, "0" * 32, "lock", "\x00", "é" * 32])
def test_any_string_may_be_asked_for(bench: Bench, file_id: str) -> None:
    bench.put(b"x")
    assert bench.one.find("a", file_id) is None
    assert bench.one.open("a", file_id) is None
    assert not bench.one.delete("a", file_id)


def test_ids_are_in_the_order_in_which_files_were_made_even_if_the_clock_goes_back(bench: Bench) -> None:
    made = []
    for step_s in (0.0, 0.0, -5.0):
        bench.now_s += step_s
        made.append(bench.put(b"x"))
    assert bench.other.all_of("a") == made
    assert sorted(stored.id for stored in made) == [stored.id for stored in made]


def test_what_was_deleted_is_gone_and_makes_room_and_whoever_reads_it_reads_on(bench: Bench) -> None:
    first = bench.put(b"x" * 600)
    opened = bench.other.open("a", first.id)
    assert opened is not None
    assert bench.other.delete("a", first.id)
    assert not bench.one.delete("a", first.id)
    assert bench.names() == []
    assert bench.one.all_of("a") == []
    bench.put(b"x" * 1000)
    with opened[1] as file:
        assert file.read() == b"x" * 600


def test_a_file_past_the_quota_leaves_nothing_behind(bench: Bench) -> None:
    bench.put(b"x" * 900)
    with pytest.raises(QuotaError, match=r"files\.max_bytes"):
        bench.put(b"x" * 101)
    assert len(bench.names()) == 2
    assert bench.one.begin("b")[1] == 1000
    bench.put(b"x" * 100)
    bench.put(b"")
    with pytest.raises(QuotaError, match=r"files\.max_files"):
        bench.one.begin("a")
    assert len(bench.names()) == 6


def test_the_quota_holds_for_uploads_that_began_together_on_two_gateways(bench: Bench) -> None:
    parts = [(gateway, gateway.begin("a")[0]) for gateway in (bench.one, bench.other)]
    for _, part in parts:
        part.write(b"x" * 600)
    bench.one.keep(parts[0][1], "a", "x", "batch", "", None)
    with pytest.raises(QuotaError):
        bench.other.keep(parts[1][1], "a", "x", "batch", "", None)
    parts[1][1].discard()
    assert [stored.num_bytes for stored in bench.one.all_of("a")] == [600]
    assert len(bench.names()) == 2


def test_a_file_is_there_until_its_time_is_over_and_its_bytes_until_the_next_sweep(bench: Bench) -> None:
    stored, kept = bench.put(b"x" * 990, ttl_s=60), bench.put(b"y")
    bench.now_s += 59.9
    assert bench.one.sweep() == 0
    assert bench.bytes_of(stored) is not None
    bench.now_s += 0.1
    assert bench.one.find("a", stored.id) is None
    assert bench.bytes_of(stored) is None
    assert not bench.one.delete("a", stored.id)
    assert bench.one.all_of("a") == [kept]
    assert bench.one.begin("a")[1] == 999, "it takes no room any more"
    assert bench.other.sweep() == 1
    assert bench.names()[:2] == [f"{kept.id}.data", f"{kept.id}.json"]


def test_a_sweep_leaves_what_somebody_writes_and_takes_what_nobody_does(bench: Bench) -> None:
    kept = bench.put(b"kept")
    written, _ = bench.one.begin("a")
    dead, _ = bench.one.begin("a")
    dead.write(b"half of")
    os.close(dead._descriptor or -1)  # as the system does it for a process that was killed
    tenant = bench.root / "a"
    (tenant / f"{'0' * 32}.data").write_bytes(b"renamed, and killed before it was described")
    (tenant / f"{'1' * 32}.json").write_bytes(b"{}")
    assert bench.other.sweep() == 3
    assert bench.names() == sorted([f"{kept.id}.data", f"{kept.id}.json", written.path.name])
    written.write(b"and on")
    assert bench.one.keep(written, "a", "x", "batch", "", None).num_bytes == 6


def test_sweeping_where_there_is_nothing_makes_nothing(bench: Bench) -> None:
    assert bench.one.sweep() == 0
    assert not bench.root.exists()


def test_an_upload_that_was_discarded_is_gone_and_takes_no_more_bytes(bench: Bench) -> None:
    part, _ = bench.one.begin("a")
    part.write(b"x")
    part.discard()
    part.write(b"a write that was already on its way")
    part.discard()
    assert bench.names() == []
    with pytest.raises(StorageError):
        bench.one.keep(part, "a", "x", "batch", "", None)
    assert bench.names() == []


def test_files_leave_room_for_others_on_their_disk(tmp_path: Path) -> None:
    bench = Bench(tmp_path, tuned(FileSettings, min_free_bytes=1 << 60))
    with pytest.raises(StorageFullError):
        bench.put(b"x")
    assert bench.names() == []


def failing(name: str, number: int) -> Callable[..., Any]:
    """A function of `os` whose call fails."""

    def fail(*args: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("name", ["write", "fsync", "rename"])
@pytest.mark.parametrize(
    ("number", "error"),
    [(errno.ENOSPC, StorageFullError), (errno.EDQUOT, StorageFullError), (errno.EIO, StorageError)],
)
def test_a_disk_that_fails_costs_this_file_and_leaves_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str, number: int, error: type[StorageError]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(module.os, name, failing(name, number))
        with pytest.raises(error) as raised:
            bench.put(b"x")
    assert type(raised.value) is error
    assert bench.names() == []
    assert bench.bytes_of(bench.put(b"y")) == b"y"


@pytest.mark.parametrize("calls", range(1, 8))
def test_what_fails_on_the_way_to_being_durable_is_not_there(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """The n-th of all syncs and renames fails: data twice, rename, folder, description, rename, folder."""
    done = [0]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            done[0] += 1
            if done[0] == calls:
                raise OSError(errno.ENOSPC, "full")
            return real(*args)

        return call

    part, _ = bench.one.begin("a")
    part.write(b"x")
    with monkeypatch.context() as patched:
        for name in ("fsync", "rename"):
            patched.setattr(module.os, name, counted(getattr(os, name)))
        with pytest.raises(StorageFullError):
            bench.one.keep(part, "a", "x", "batch", "", None)
    part.discard()
    assert bench.names() == []


def test_who_holds_the_lock_too_long_makes_others_fail_and_not_wait(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.0)
    with bench.one._locked("a"), pytest.raises(StorageError):
        bench.other.begin("a")
    part, _ = bench.other.begin("a")
    assert isinstance(part, Part)
    part.discard()


def test_a_file_whose_id_was_chosen_before_is_made_once(bench: Bench) -> None:
    chosen, parts = f"{1:032x}", [bench.one.begin("a")[0] for _ in range(2)]
    for part, data in zip(parts, (b"first", b"second"), strict=True):
        part.write(data)
    made = [
        gateway.keep(part, "a", "x", "batch_output", "", 60, file_id=chosen)
        for gateway, part in zip((bench.one, bench.other), parts, strict=True)
    ]
    parts[1].discard()
    assert made[0] == made[1]
    assert made[0].id == chosen
    assert bench.bytes_of(made[0]) == b"first"
    assert bench.names() == [f"{chosen}.data", f"{chosen}.json"]
    assert bench.put(b"later").id > chosen


def test_results_that_were_deleted_are_not_made_again_when_their_batch_ends_again(bench: Bench) -> None:
    chosen, other = (f"{round(bench.now_s * 1e6):016x}{number:016x}" for number in range(2))

    def end(gateway: Folder, file_id: str) -> StoredFile:
        part, _ = gateway.begin("a")
        part.write(b"results")
        try:
            return gateway.keep(part, "a", "x", BATCH_OUTPUT, "", None, file_id=file_id)
        finally:
            part.discard()

    made = end(bench.one, chosen)
    assert bench.other.delete("a", chosen)
    bench.now_s += GONE_S - 1
    assert bench.one.sweep() == 0
    assert end(bench.one, chosen).id == chosen
    assert bench.names() == [f"{chosen}.gone"]
    assert bench.one.all_of("a") == []
    assert bench.one.find("a", chosen) is None
    bench.now_s += 1
    assert bench.one.sweep() == 1, "what no batch will make again"
    end(bench.one, other)
    assert bench.one.delete("a", other)
    assert bench.names() == []
    assert made.purpose == BATCH_OUTPUT


@pytest.mark.parametrize("error", [None, errno.EXDEV, errno.EPERM])
def test_bytes_of_a_file_can_be_had_elsewhere_and_stay_when_it_is_deleted(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int | None
) -> None:
    if error is not None:

        def link(*paths: Path) -> None:
            raise OSError(error, "no links here")

        monkeypatch.setattr(os, "link", link)
    stored = bench.put(b"x")
    assert bench.one.link("a", stored.id, tmp_path / "there")
    assert bench.one.delete("a", stored.id)
    assert (tmp_path / "there").read_bytes() == b"x"
    assert not bench.one.link("a", stored.id, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    kept = bench.put(b"y")
    assert not bench.one.link("b", kept.id, tmp_path / "none")
    with pytest.raises(StorageError):
        bench.one.link("a", kept.id, tmp_path / "no" / "folder")

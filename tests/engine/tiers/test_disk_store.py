"""Blocks on disk: what comes back is byte for byte what was written, and whatever is not is a miss."""

from __future__ import annotations

import os
import shutil
import stat
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.leases.pins import Lease
from engine.protocol import Namespace, chain_digests, split_digests
from engine.tiers.block_file import PAGE_BYTES
from engine.tiers.copying import BlockKey, Payload
from engine.tiers.disk_store import DiskStore, Scan

SIZE = 4
BLOCK_BYTES = 200
NAMESPACE = Namespace(weights="w", dtype="bfloat16", kv_dtype="bfloat16", block_size=SIZE)
LAYOUT = "1x4x2x1x12"
DAY_S = 86400.0


LIVING: list[DiskStore] = []


@pytest.fixture(autouse=True)
def all_end() -> Iterator[None]:
    yield
    end_all()


def end_all() -> None:
    while LIVING:
        LIVING.pop().close()


def make(folder: Path, namespace: Namespace = NAMESPACE, layout: str = LAYOUT, *, alone: bool = True) -> DiskStore:
    """Of a new engine; those before it are gone."""
    if alone:
        end_all()
    LIVING.append(DiskStore(folder, namespace, layout, BLOCK_BYTES))
    return LIVING[-1]


def keys_of(tokens: list[int], salt: str = "", namespace: Namespace = NAMESPACE) -> list[BlockKey]:
    packed = array("I", tokens).tobytes()
    digests = split_digests(chain_digests(replace(namespace, salt=salt).root(), packed, SIZE))
    width = SIZE * 4
    return [
        BlockKey(digest, digests[i - 1] if i else None, i, salt, packed[i * width : (i + 1) * width])
        for i, digest in enumerate(digests)
    ]


def payload(seed: int, count: int) -> Payload:
    return np.random.default_rng(seed).integers(0, 256, (count, BLOCK_BYTES), np.uint8)


def slots(keys: list[BlockKey]) -> list[int]:
    return [0] * len(keys)


def read(store: DiskStore, keys: list[BlockKey]) -> Payload:
    return store.read(slots(keys), keys)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")


def scan(store: DiskStore, most: int = 100, budget_bytes: int = 1 << 30, max_age_s: float = DAY_S) -> Scan:
    return store.scan(most, budget_bytes, max_age_s)


def age(path: Path, seconds: float) -> None:
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


@pytest.fixture
def written(tmp_path: Path) -> tuple[DiskStore, list[BlockKey], Payload]:
    """A store with one prefix of three blocks."""
    store, keys, rows = make(tmp_path), keys_of([*range(12)], "tenant"), payload(1, 3)
    store.write(slots(keys), keys, rows)
    return store, keys, rows


def test_what_is_read_is_byte_for_byte_what_was_written(written: tuple[DiskStore, list[BlockKey], Payload]) -> None:
    store, keys, rows = written
    assert (read(store, keys) == rows).all()
    assert (read(store, keys[2:]) == rows[2:]).all()
    store.write(slots(keys), keys, rows[::-1])
    assert (read(store, keys) == rows[::-1]).all()


def test_only_its_owner_may_read_it(written: tuple[DiskStore, list[BlockKey], Payload], tmp_path: Path) -> None:
    for path in (tmp_path / NAMESPACE.root().hex()).rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_a_block_that_was_dropped_or_never_written_is_a_miss(
    written: tuple[DiskStore, list[BlockKey], Payload],
) -> None:
    store, keys, _ = written
    store.drop([keys[1].digest])
    store.drop([keys[1].digest])
    assert len(read(store, keys)) == 1
    assert len(read(store, keys_of([9] * 4))) == 0


def test_a_file_that_is_cut_anywhere_is_a_miss_and_is_deleted(tmp_path: Path) -> None:
    store, (key,), rows = make(tmp_path), keys_of([*range(4)]), payload(2, 1)
    store.write([0], [key], rows)
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert len(read(store, [key])) == 0
        assert not path.exists()
    path.write_bytes(whole + b"\0")
    assert len(read(store, [key])) == 0
    path.write_bytes(whole)
    assert (read(store, [key]) == rows).all()


def test_a_flipped_bit_in_any_byte_is_a_miss(tmp_path: Path) -> None:
    store, (key,), rows = make(tmp_path), keys_of([*range(4)], "salt"), payload(3, 1)
    store.write([0], [key], rows)
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    for place in range(len(whole)):
        torn = bytearray(whole)
        torn[place] ^= 1 << (place % 8)
        path.write_bytes(torn)
        assert len(read(store, [key])) == 0, f"byte {place} of {len(whole)}"
    path.write_bytes(whole)
    assert (read(store, [key]) == rows).all()


def test_the_tail_of_a_crash_full_of_zeros_is_a_miss(written: tuple[DiskStore, list[BlockKey], Payload]) -> None:
    store, keys, rows = written
    path = Path(store._path(keys[1].digest))
    path.write_bytes(bytes(path.stat().st_size))
    got = read(store, keys)
    assert (got == rows[:1]).all()
    assert len(got) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"salt": "other"},
        {"tokens": b"\1" * 16},
        {"index": 1},
        {"parent": b"p" * 16},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_same_digest_with_another_meaning_is_a_miss(
    change: dict[str, object], written: tuple[DiskStore, list[BlockKey], Payload]
) -> None:
    """As when two prefixes collide, by chance or on purpose."""
    store, keys, _ = written
    assert len(read(store, [replace(keys[0], **change)])) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other",
    [
        replace(NAMESPACE, weights="v"),
        replace(NAMESPACE, dtype="float16"),
        replace(NAMESPACE, kv_dtype="float16"),
        replace(NAMESPACE, adapter="a"),
        replace(NAMESPACE, quantization="q"),
        replace(NAMESPACE, hash_name="sha256"),
    ],
    ids=lambda other: str(other)[10:60],
)
def test_another_namespace_finds_nothing_even_in_a_folder_of_the_same_name(
    other: Namespace, written: tuple[DiskStore, list[BlockKey], Payload], tmp_path: Path
) -> None:
    store, keys, rows = written
    stranger = make(tmp_path, other)
    assert scan(stranger).found == []
    assert len(read(stranger, keys)) == 0
    assert (read(store, keys) == rows).all()
    end_all()
    store.close()
    shutil.rmtree(tmp_path / other.root().hex())
    (tmp_path / NAMESPACE.root().hex()).rename(tmp_path / other.root().hex())
    assert scan(make(tmp_path, other)).found == []
    assert files(tmp_path) == [], "what cannot be read is deleted"


def test_another_layout_of_the_same_bytes_is_a_miss(
    written: tuple[DiskStore, list[BlockKey], Payload], tmp_path: Path
) -> None:
    assert len(read(make(tmp_path, layout="1x4x1x2x12"), written[1])) == 0


def test_a_restart_finds_everything_parents_first(tmp_path: Path) -> None:
    store = make(tmp_path)
    chains = [keys_of([chain, *range(19)], salt) for chain in range(3) for salt in ("", "a")]
    chains.append(chains[0][:2] + keys_of([0, *range(7), *range(50, 62)])[2:])  # shares two blocks
    rows = {}
    for number, keys in enumerate(chains):
        fresh = [key for key in keys if key.digest not in rows]
        data = payload(number, len(fresh))
        store.write(slots(fresh), fresh, data)
        rows |= {key.digest: row for key, row in zip(fresh, data, strict=True)}
    again = make(tmp_path)
    found = scan(again)
    assert (found.torn, found.collected) == (0, 0)
    assert {key.digest for key in found.found} == set(rows)
    seen: set[bytes] = set()
    for key in found.found:
        assert key.parent is None or key.parent in seen
        seen.add(key.digest)
        assert (read(again, [key])[0] == rows[key.digest]).all()


def test_an_empty_or_unreadable_folder_is_an_empty_store(tmp_path: Path) -> None:
    assert scan(make(tmp_path / "nothing")) == Scan([], [], 0, 0)
    (tmp_path / "file").write_text("x")
    assert scan(make(tmp_path / "file")) == Scan([], [], 0, 0)


def test_a_block_without_its_parent_is_deleted_at_the_start(
    written: tuple[DiskStore, list[BlockKey], Payload], tmp_path: Path
) -> None:
    store, keys, _ = written
    store.drop([keys[1].digest])
    found = scan(make(tmp_path))
    assert [key.digest for key in found.found] == [keys[0].digest]
    assert found.collected == 1
    assert len(files(tmp_path)) == 1


def test_a_file_whose_header_is_not_what_its_name_says_is_deleted_at_the_start(
    written: tuple[DiskStore, list[BlockKey], Payload], tmp_path: Path
) -> None:
    store, keys, _ = written
    first, second = (Path(store._path(key.digest)) for key in keys[:2])
    second.write_bytes(first.read_bytes())  # a sound file in a strange place
    third = Path(store._path(keys[2].digest))
    third.write_bytes(third.read_bytes()[:50])
    found = scan(make(tmp_path))
    assert [key.digest for key in found.found] == [keys[0].digest]
    assert found.torn == 2
    assert files(tmp_path) == [first]


def test_what_a_crash_left_half_written_goes_after_a_while_and_strangers_files_stay(
    written: tuple[DiskStore, list[BlockKey], Payload], tmp_path: Path
) -> None:
    store, keys, _ = written
    folder = Path(store._path(keys[0].digest)).parent
    old, new, notes = (folder / name for name in (f"{'a' * 32}.7.1.tmp", f"{'b' * 32}.7.2.tmp", "notes.txt"))
    for path in (old, new, notes):
        path.write_text("x")
    for path in (old, notes):
        age(path, 3600)
    (tmp_path / "my folder").mkdir()
    (tmp_path / "my folder" / "precious.kv").write_text("x")
    age(tmp_path / "my folder" / "precious.kv", 100 * DAY_S)
    scan(make(tmp_path))
    assert not old.exists()
    assert new.exists()
    assert notes.exists()
    assert (tmp_path / "my folder" / "precious.kv").exists()


def test_beyond_the_budget_the_oldest_go_and_nobody_loses_its_parent(tmp_path: Path) -> None:
    store = make(tmp_path)
    chains = [keys_of([chain] * 20) for chain in range(3)]
    for chain, keys in enumerate(chains):
        store.write(slots(keys), keys, payload(chain, 5))
        for number, key in enumerate(keys):
            age(Path(store._path(key.digest)), 1000 * (2 - chain) - (0 if chain == 1 else number))
    age(Path(store._path(chains[2][0].digest)), 5000)  # the oldest file of all, with young descendants
    found = scan(make(tmp_path), most=7)
    assert [key.digest for key in chains[2]] == [key.digest for key in found.found if key in chains[2]]
    assert [key.digest for key in chains[1][:2]] == [key.digest for key in found.found if key in chains[1]]
    assert found.collected == 8
    assert len(files(tmp_path)) == 7


def test_beyond_the_budget_what_is_leased_goes_last_with_all_that_it_hangs_from(tmp_path: Path) -> None:
    store = make(tmp_path)
    chains = [keys_of([chain] * 20) for chain in range(3)]
    for chain, keys in enumerate(chains):
        store.write(slots(keys), keys, payload(chain, 5))
        for key in keys:
            age(Path(store._path(key.digest)), 1000 * (2 - chain))
    leased = {chains[0][2].digest, chains[1][0].digest, b"of no block here"}
    found = make(tmp_path).scan(7, 1 << 30, DAY_S, leased)
    assert [sum(key in found.found for key in chain) for chain in chains] == [3, 1, 3]
    found = make(tmp_path).scan(3, 1 << 30, DAY_S, leased)
    assert [sum(key in found.found for key in chain) for chain in chains] == [2, 1, 0], "the budget is the budget"


def test_leases_of_another_namespace_go_with_its_blocks(tmp_path: Path) -> None:
    other = replace(NAMESPACE, weights="old")
    store, keys = make(tmp_path, other), keys_of([*range(8)], namespace=other)
    store.write(slots(keys), keys, payload(1, 2))
    lease = Lease("t", "", keys[1].digest, b"", bytes(32), tokens=8, depth=2, ttl_s=9e9, expires_s=9e9, number=1)
    leases = store.lease_file()
    leases.write([lease])
    assert len(files(tmp_path)) == 3
    scan(make(tmp_path))
    assert len(files(tmp_path)) == 3, "it is not too old yet"
    for path in files(tmp_path):
        age(path, 2 * DAY_S)
    scan(make(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"lock", NAMESPACE.root().hex()}


def test_reading_a_block_makes_it_young(written: tuple[DiskStore, list[BlockKey], Payload], tmp_path: Path) -> None:
    store, keys, _ = written
    other = keys_of([7] * 4)
    store.write([0], other, payload(4, 1))
    for path in files(tmp_path):
        age(path, 1000)
    age(Path(store._path(other[0].digest)), -100)
    read(store, keys)
    assert [key.digest for key in scan(make(tmp_path), most=3).found] == [key.digest for key in keys]


def test_other_namespaces_go_when_they_are_too_old_or_do_not_fit(tmp_path: Path) -> None:
    own, keys = make(tmp_path), keys_of([*range(8)])
    own.write(slots(keys), keys, payload(1, 2))
    others = [replace(NAMESPACE, weights=name) for name in ("old", "older", "new")]
    for namespace, days in zip(others, (2.0, 3.0, 0.5), strict=True):
        chain = keys_of([*range(8)], namespace=namespace)
        make(tmp_path, namespace).write(slots(chain), chain, payload(2, 2))
        for path in files(tmp_path / namespace.root().hex()):
            age(path, days * DAY_S)
    end_all()
    assert scan(own, max_age_s=2.5 * DAY_S).collected == 2
    assert not (tmp_path / others[1].root().hex()).exists(), "empty folders go too"
    assert own.file_bytes == PAGE_BYTES
    assert scan(own, budget_bytes=5 * PAGE_BYTES, max_age_s=100 * DAY_S).collected == 1
    assert len(files(tmp_path / others[0].root().hex())) == 1
    assert len(files(tmp_path / others[2].root().hex())) == 2
    assert len(scan(own, budget_bytes=0).found) == 2, "the budget of the own blocks is their number"
    assert len(files(tmp_path)) == 2


def test_two_engines_that_share_a_folder_delete_nothing_of_each_other_and_leave_it_to_their_successors(
    tmp_path: Path,
) -> None:
    first, second = make(tmp_path), make(tmp_path, alone=False)
    keys, rows = keys_of([*range(8)]), payload(1, 2)
    first.write(slots(keys), keys, rows)
    for path in files(tmp_path):
        age(path, 2 * DAY_S)  # an engine that lives looks after its own files
    assert scan(second, most=1).found == []
    second.write(slots(keys), keys, rows)
    second.drop([keys[1].digest])
    assert (read(first, keys) == rows).all()
    assert len(read(second, keys)) == 1
    first.close()
    third = make(tmp_path, alone=False)
    assert len(scan(third).found) == 2
    second.close()
    fourth = make(tmp_path, alone=False)
    assert len(scan(fourth).found) == 1


def test_what_an_engine_left_whose_place_nobody_takes_goes_when_it_is_too_old(tmp_path: Path) -> None:
    first, second = make(tmp_path), make(tmp_path, alone=False)
    keys, rows = keys_of([*range(8)]), payload(1, 2)
    for store in (first, second):
        scan(store)
        store.write(slots(keys), keys, rows)
    assert scan(make(tmp_path), budget_bytes=0).collected == 0
    for path in files(tmp_path):
        age(path, 2 * DAY_S)
    assert scan(make(tmp_path), max_age_s=1.5 * DAY_S).collected == 4, "its own two as well"
    assert {path.name for path in tmp_path.iterdir()} == {"lock", NAMESPACE.root().hex()}


def test_where_there_are_no_locks_the_folder_is_used_and_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(file: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", flock)
    store, keys, rows = make(tmp_path), keys_of([*range(8)]), payload(1, 2)
    store.write(slots(keys), keys, rows)
    assert (read(store, keys) == rows).all()
    assert "engine.disk_dir" in caplog.text


def test_a_failed_write_raises_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, keys = make(tmp_path), keys_of([*range(8)])
    exact = os.writev
    monkeypatch.setattr(os, "writev", lambda file, parts: exact(file, parts[:1]))  # as when the disk is full
    with pytest.raises(OSError, match="No space left"):
        store.write(slots(keys), keys, payload(1, 2))
    assert files(tmp_path) == []
    monkeypatch.undo()
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match="file"):
        make(tmp_path / "file").write(slots(keys), keys, payload(1, 2))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=400), cut=st.integers(0, 400))
def test_no_file_whatever_is_in_it_stops_the_start_or_is_found(tmp_path: Path, data: bytes, cut: int) -> None:
    store, (key,) = make(tmp_path), keys_of([*range(4)])
    store.write([0], [key], payload(1, 1))
    path = Path(store._path(key.digest))
    whole = path.read_bytes()
    path.write_bytes(whole[:cut] + data)
    found = scan(make(tmp_path)).found
    assert found in ([], [key])
    assert len(read(store, [key])) == (whole[:cut] + data == whole)

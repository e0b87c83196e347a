"""How many threads an engine takes, from numbers and from cgroup files."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from engine.compute import machine
from engine.compute.machine import choose_threads, quota_cores, usable_cores


@pytest.mark.parametrize(
    ("wanted", "cores", "engines", "threads"),
    [(0, 1, 1, 1), (0, 2, 1, 1), (0, 8, 1, 7), (0, 8, 2, 3), (0, 4, 8, 1), (3, 2, 1, 3), (0, 8, 0, 7)],
)
def test_one_core_is_left_to_the_gateway_and_the_rest_is_shared(
    wanted: int, cores: int, engines: int, threads: int
) -> None:
    assert choose_threads(wanted, cores, engines) == threads


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="ascii")


def test_a_cgroup_v2_quota_is_read(tmp_path: Path) -> None:
    write(tmp_path / "cpu.max", "150000 100000\n")
    assert quota_cores(tmp_path, tmp_path / "none") == 1.5


def test_the_tightest_quota_of_the_own_group_and_its_parents_counts(tmp_path: Path) -> None:
    write(tmp_path / "own", "0::/a/b\n")
    write(tmp_path / "a" / "cpu.max", "200000 100000\n")
    write(tmp_path / "a" / "b" / "cpu.max", "max 100000\n")
    assert quota_cores(tmp_path, tmp_path / "own") == 2.0


def test_a_cgroup_v1_quota_is_read(tmp_path: Path) -> None:
    write(tmp_path / "cpu" / "cpu.cfs_quota_us", "300000\n")
    write(tmp_path / "cpu" / "cpu.cfs_period_us", "100000\n")
    assert quota_cores(tmp_path, tmp_path / "none") == 3.0


@pytest.mark.parametrize("text", ["max 100000\n", "-1 100000\n", "", "nonsense\n", "5\n", "100 0\n"])
def test_no_limit_and_unreadable_files_are_no_quota(tmp_path: Path, text: str) -> None:
    write(tmp_path / "cpu.max", text)
    assert quota_cores(tmp_path, tmp_path / "none") is None


def test_a_quota_below_one_core_still_gives_one(tmp_path: Path) -> None:
    write(tmp_path / "cpu.max", "20000 100000\n")
    assert usable_cores(tmp_path, tmp_path / "none") == 1


SMAPS = """\
7f0000000000-7f0001000000 rw-p 00000000 00:00 0
Size:              16384 kB
Rss:               16384 kB
7f0002000000-7f0004000000 rw-p 00000000 00:00 0                          [stack:12]
Rss:               32768 kB
7f0005000000-7f0007000000 r--p 00000000 fe:00 1234                       /usr/lib/libc.so.6
Rss:               32768 kB
55d000000000-55d001000000 rw-p 00000000 00:00 0                          [heap]
Rss:                 100 kB
"""


def test_private_writable_memory_of_no_file_is_found() -> None:
    assert list(machine._anonymous(SMAPS)) == [
        (0x7F0000000000, 0x7F0001000000, 16384 << 10),
        (0x55D000000000, 0x55D001000000, 100 << 10),
    ]


def test_without_proc_nothing_happens(tmp_path: Path) -> None:
    assert machine.collapse(tmp_path / "smaps") == 0


def test_when_the_time_is_up_the_rest_stays(tmp_path: Path) -> None:
    (tmp_path / "smaps").write_text(SMAPS)
    assert machine.collapse(tmp_path / "smaps", time_s=0) == 0


def _smaps_of(address: int, tmp_path: Path) -> Path:
    """The entry of the mapping that holds an address, alone: the test process's other memory stays as it is."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    heads = [i for i, line in enumerate(lines) if machine._MAPPING.match(line)]
    for head, following in zip(heads, [*heads[1:], len(lines)], strict=True):
        first, last = (int(part, 16) for part in lines[head].split()[0].split("-"))
        if first <= address < last:
            (tmp_path / "smaps").write_text("\n".join(lines[head:following]))
            return tmp_path / "smaps"
    raise AssertionError("the address is not mapped")


def _huge_bytes(smaps: Path) -> int:
    return sum(int(line.split()[1]) << 10 for line in smaps.read_text().splitlines() if line.startswith("AnonHuge"))


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux only")
@pytest.mark.parametrize("is_filled", [True, False])
def test_filled_memory_is_moved_and_keeps_its_bytes(tmp_path: Path, is_filled: bool) -> None:
    size = 32 << 20
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    numbers = np.frombuffer(memory, np.uint8)
    numbers[: size if is_filled else size // 2] = 7
    address = numbers.ctypes.data
    moved = machine.collapse(_smaps_of(address, tmp_path))
    lies = _huge_bytes(_smaps_of(address, tmp_path))
    assert (numbers[: size // 2] == 7).all()
    if not is_filled:
        assert moved == 0
        assert (numbers[size // 2 :] == 0).all()
    elif moved == 0:
        pytest.skip(f"the kernel ({os.uname().release}) makes no large pages on request")
    else:
        assert lies >= moved - machine.HUGE_BYTES > size // 2

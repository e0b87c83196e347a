"""How many threads and how much memory an engine takes, from numbers and from cgroup files."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from engine.compute import machine
from engine.compute.machine import available_bytes, choose_threads, has_cuda, own_bytes, quota_cores, usable_cores


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


MEMINFO = "MemTotal:  9000 kB\nMemFree:  10 kB\nMemAvailable:  5000 kB\nActive(file):  7 kB\n"
NO_LIMIT = "9223372036854771712\n"


def test_memory_is_what_the_kernel_can_give_where_nothing_limits_it(tmp_path: Path) -> None:
    write(tmp_path / "meminfo", MEMINFO)
    write(tmp_path / "memory.max", "max\n")
    write(tmp_path / "memory.current", "123\n")
    write(tmp_path / "memory" / "memory.limit_in_bytes", NO_LIMIT)
    write(tmp_path / "memory" / "memory.usage_in_bytes", "456\n")
    assert available_bytes(tmp_path, tmp_path / "none", tmp_path / "meminfo") == 5000 << 10


@pytest.mark.parametrize(
    ("base", "own", "limit", "usage", "prefix"),
    [
        ("", "1:memory:/x\n0::/a/b\n", "memory.max", "memory.current", ""),
        ("memory", "4:memory:/a/b\n0::/x\n", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ],
)
def test_memory_is_cut_to_the_tightest_limit_and_files_in_memory_count_as_free(
    tmp_path: Path, base: str, own: str, limit: str, usage: str, prefix: str
) -> None:
    write(tmp_path / "meminfo", MEMINFO)
    write(tmp_path / "own", own)
    outer, inner = tmp_path / base / "a", tmp_path / base / "a" / "b"
    for folder, most in ((outer, "1000000"), (inner, "2000000")):
        write(folder / limit, f"{most}\n")
        write(folder / usage, "900000\n")
        write(folder / "memory.stat", f"anon 1\n{prefix}inactive_file 200000\n{prefix}active_file 50000\n")
    assert available_bytes(tmp_path, tmp_path / "own", tmp_path / "meminfo") == 350_000
    write(outer / usage, "1500000\n")  # a limit that was lowered
    assert available_bytes(tmp_path, tmp_path / "own", tmp_path / "meminfo") == 0


def test_where_the_kernel_does_not_say_half_of_the_memory_counts(tmp_path: Path) -> None:
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert available_bytes(tmp_path, tmp_path / "none", tmp_path / "none") == whole // 2
    assert own_bytes(tmp_path / "none") == 0


def test_own_memory_is_what_is_no_file(tmp_path: Path) -> None:
    write(tmp_path / "status", "Name:\tx\nVmRSS:\t  99 kB\nRssAnon:\t  77 kB\nRssFile:\t 5 kB\n")
    assert own_bytes(tmp_path / "status") == 77 << 10


def test_a_driver_that_hangs_or_is_none_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_CUDA", "raise SystemExit(0)")
    assert has_cuda()
    monkeypatch.setattr(machine, "_CUDA", "import ctypes; ctypes.CDLL('libnone.so.1')")
    assert not has_cuda()
    monkeypatch.setattr(machine, "_CUDA", "import signal; signal.pause()")
    monkeypatch.setattr(machine, "CUDA_LIMIT_S", 0.2)
    assert not has_cuda()


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

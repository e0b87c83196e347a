"""The machine that an engine computes on: its threads, its memory, and large pages for what it reads over and over.

A shared machine collapses when every engine takes every core: a step waits for its slowest thread, and the slowest one
is the thread that the gateway or another engine pushed off its core. `usable_cores` reads the affinity mask and the
cgroup files, `available_bytes` also /proc/meminfo. No torch: the runner sets what this decides.

A decode reads every weight once for each token, and looks up the page of each on the way: with 4 KiB pages that look-up
costs a fifth of the time, more on virtual machines. `collapse` moves memory into pages of 2 MiB when the weights lie
where they will stay. Linux only, and only where the kernel can do it on request (6.1 and later); does nothing elsewhere
and never raises.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def choose_threads(wanted: int, cores: int, engines: int = 1) -> int:
    """Threads of one engine: what was asked for, or a fair share of the cores with one left to the gateway.

    wanted   EngineSettings.threads; 0 chooses
    cores    usable_cores() of the machine
    engines  engines that share the machine
    Returns at least 1.
    """
    if wanted:
        return wanted
    return max(1, (cores - 1) // max(1, engines))


def usable_cores(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUP) -> int:
    """Whole cores this process may use: the affinity mask, cut to the CPU quota of its cgroup. At least 1."""
    if sys.platform == "linux":
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = quota_cores(root, own)
    return cores if quota is None else max(1, min(cores, math.floor(quota)))


def quota_cores(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUP) -> float | None:
    """Cores' worth of CPU time that the cgroup and its parents grant; None without a limit or without cgroups.

    v2: cpu.max holds "QUOTA PERIOD" in microseconds, or "max PERIOD", at every level from `own`'s path up to the root.
    v1: cpu/cpu.cfs_quota_us (-1 is no limit) and cpu/cpu.cfs_period_us.
    """
    quotas = [q for folder in _own_folders(root, own) if (q := _quota(_numbers(folder / "cpu.max"))) is not None]
    v1 = _numbers(root / "cpu" / "cpu.cfs_quota_us") + _numbers(root / "cpu" / "cpu.cfs_period_us")
    if (quota := _quota(v1)) is not None:
        quotas.append(quota)
    return min(quotas, default=None)


def _quota(numbers: list[int]) -> float | None:
    if len(numbers) == 2 and numbers[0] > 0 and numbers[1] > 0:
        return numbers[0] / numbers[1]
    return None


def _own_folders(root: Path, own: Path, controller: str = "") -> list[Path]:
    """The cgroup folder of this process and its parents, up to the root (in a container, that is its own): the v2 one,
    or that of a v1 controller."""
    lines = [line.split(":", 2) for line in _text(own).splitlines()]
    path = next((line[2] for line in lines if len(line) == 3 and line[1] == controller), "/")
    folder = root / path.strip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]


def _numbers(file: Path) -> list[int]:
    """The integers of a one-line file; empty when it is missing, or holds a word."""
    try:
        return [int(word) for word in _text(file).split()]
    except ValueError:
        return []


def _text(file: Path) -> str:
    """Empty when it cannot be read."""
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


MEMINFO: Final = Path("/proc/meminfo")
_FIELD: Final = re.compile(r"^(\w+):?[ \t]+(\d+)", re.M)


def available_bytes(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUP, meminfo: Path = MEMINFO) -> int:
    """Bytes of memory that can be taken without swapping: what the kernel has (MemAvailable), cut to what the memory
    limits of the cgroup and its parents leave. What is there only to spare a read of a file counts as free.

    v2: memory.max and memory.current of every level; v1: memory/.../memory.limit_in_bytes and memory.usage_in_bytes.
    Half of the memory where the kernel does not say (macOS).
    """
    said = _fields(meminfo).get("MemAvailable")
    left = [said << 10 if said is not None else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2]
    levels = [(folder, "memory.max", "memory.current", "") for folder in _own_folders(root, own)]
    v1 = _own_folders(root / "memory", own, "memory")
    levels += [(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_") for folder in v1]
    for folder, limit, usage, prefix in levels:
        if (most := _numbers(folder / limit)) and (used := _numbers(folder / usage)):
            stat = _fields(folder / "memory.stat")
            files = stat.get(f"{prefix}active_file", 0) + stat.get(f"{prefix}inactive_file", 0)
            left.append(most[0] - max(0, used[0] - files))
    return max(0, min(left))


def own_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Bytes of memory that this process has taken and that are no file's; 0 where the kernel does not say."""
    return _fields(status).get("RssAnon", 0) << 10


def _fields(file: Path) -> dict[str, int]:
    """Name -> number of a file with a name and a number in each line."""
    return {name: int(number) for name, number in _FIELD.findall(_text(file))}


CUDA_LIMIT_S: Final = 20.0
"""For a driver to say whether there is a device; then there is none."""

_CUDA: Final = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
raise SystemExit(bool(cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value))
"""


def has_cuda() -> bool:
    """Whether there is a CUDA device that this process may use (CUDA_VISIBLE_DEVICES).

    Asks libcuda, the driver's own library, which torch and vLLM ask as well; nvidia-smi is missing in many containers,
    and shows devices that are hidden from us. In a process of its own: once asked, the driver stays in a process, and a
    broken one may hang."""
    command = [sys.executable, "-S", "-E", "-c", _CUDA]
    try:
        return subprocess.run(command, capture_output=True, timeout=CUDA_LIMIT_S, check=False).returncode == 0  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return False


log = logging.getLogger(__name__)

HUGE_BYTES: Final = 2 << 20
CHUNK_BYTES: Final = 64 << 20  # moved by one call of the kernel
LEAST_BYTES: Final = 8 << 20  # of a mapping that is worth it
TIME_S: Final = 10.0  # after which the rest is left where it is: a start must not take long
FILLED: Final = 0.95  # of a mapping that must be in memory already: what nobody touched yet must not be taken now
_MADV_HUGEPAGE: Final = 14
_MADV_COLLAPSE: Final = 25
_MAPPING: Final = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+)\s*(.*)$")


def collapse(smaps: Path = Path("/proc/self/smaps"), *, time_s: float = TIME_S) -> int:
    """Moves this process's large, filled, anonymous mappings into large pages, the largest first, until the time is up.

    Takes about two seconds for each GB. Returns the bytes that were moved or lay there already, 0 where none can be.
    """
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        mappings = list(_anonymous(smaps.read_text(encoding="ascii", errors="replace")))
    except (OSError, AttributeError):
        return 0
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    moved, deadline_s = 0, time.monotonic() + time_s
    for start, end, resident in sorted(mappings, key=lambda mapping: mapping[0] - mapping[1]):
        first, last = -(-start // HUGE_BYTES) * HUGE_BYTES, end // HUGE_BYTES * HUGE_BYTES
        if end - start < LEAST_BYTES or resident < FILLED * (end - start):
            continue
        for piece in range(first, last, CHUNK_BYTES):
            size = min(CHUNK_BYTES, last - piece)
            if time.monotonic() >= deadline_s:
                return moved
            madvise(piece, size, _MADV_HUGEPAGE)
            if madvise(piece, size, _MADV_COLLAPSE) != 0:
                log.debug("no large pages for %d bytes: %s", size, os.strerror(ctypes.get_errno()))
                break
            moved += size
    return moved


def _anonymous(smaps: str) -> Iterator[tuple[int, int, int]]:
    """First address, end, and bytes in memory of each private writable mapping that is no file's."""
    current: tuple[int, int] | None = None
    for line in smaps.splitlines():
        if found := _MAPPING.match(line):
            start, end, rights, inode, name = found.groups()
            plain = rights == "rw-p" and inode == "0" and name in ("", "[heap]")
            current = (int(start, 16), int(end, 16)) if plain else None
        elif current is not None and line.startswith("Rss:"):
            yield *current, int(line.split()[1]) << 10
            current = None

"""How many threads an engine takes, from numbers and from cgroup files."""

from __future__ import annotations

from pathlib import Path

import pytest

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

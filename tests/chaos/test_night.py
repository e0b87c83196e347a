"""Short nights of chaos. They show the same on a machine of any speed: clients wait a minute for an answer, and an
event loop counts what its own process ran."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.chaos.night.checks import Watch, check_watch
from tests.chaos.night.load import Load
from tests.chaos.night.site import Place

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 900.0


def night(folder: Path, *options: str) -> dict[str, Any]:
    """Its report, in which nothing is violated."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "tests.chaos.night", *options, "--report", str(report), "--keep", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S, check=False
    )
    assert report.exists(), done.stdout[-8000:]
    found: dict[str, Any] = json.loads(report.read_text())
    assert found["violations"] == {}, done.stdout[-8000:]
    assert found["faults_not_over"] == [], done.stdout[-8000:]
    assert all(any(kind.startswith(one) for kind in found["requests"]) for one in DIALECTS), done.stdout[-8000:]
    return found


DIALECTS = ("chat", "completions", "responses", "messages", "gemini")


@pytest.mark.parametrize(("leak", "grows"), [(0.0, False), (0.05, True)])
def test_a_leak_is_seen_in_long_lives_and_no_saw_tooth_is_one(leak: float, grows: bool) -> None:
    """Of an hour: memory that goes up and down by a tenth in the time of a sweep, and lives too short to tell."""
    watch = Watch(cast("Place", None))
    for at in range(0, 3600, 5):
        saw_tooth = 0.1 * (at % 300) / 300
        watch.sizes["memory MiB", "worker", 1].append((at, 100 * (1 + saw_tooth + leak * at / 3600)))
        watch.sizes["memory MiB", "worker", 2 + at // 180].append((at, 50 + at % 180))  # filling memos
    load = SimpleNamespace(violations=[], violate=lambda what, why: load.violations.append((what, why)))
    check_watch(cast("Load", load), watch)
    assert bool(load.violations) is grows


def test_some_faults_break_no_promise(tmp_path: Path) -> None:
    """Everyday: a minute with starting and ending. An engine stands still, Redis fails over, a worker is killed."""
    found = night(tmp_path, "--minutes", "0.12", "--every", "2.5", "--seed", "4")
    assert sum(found["faults"].values()) >= 3


@pytest.mark.slow
def test_every_kind_of_fault_breaks_no_promise(tmp_path: Path) -> None:
    """Ten minutes, three rounds of all kinds. The hour of `python -m tests.chaos.night` is for releases."""
    found = night(tmp_path, "--minutes", "9", "--seed", "2")
    kinds = {kind.partition(":")[0] for kind in found["faults"]}
    assert len(kinds) + len(found["faults_left_out"]) >= 14

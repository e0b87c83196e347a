"""deploy/systemd: units that systemd takes, with commands that the CLI takes, without rights that no service needs."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config import EngineSettings, load
from gateway.config import Settings

UNITS = sorted((Path(__file__).parents[1] / "deploy/systemd").glob("*.service"))
KVASIR = Path(sys.executable).parent / "kvasir"
WITH_SYSTEMD = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")

pytestmark = pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)


def values(unit: Path, name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)


@pytest.mark.slow
@WITH_SYSTEMD
def test_systemd_takes_the_unit_without_a_word(unit: Path, tmp_path: Path) -> None:
    here = tmp_path / unit.name  # with a command that there is
    here.write_text(unit.read_text().replace("/opt/kvasir/bin/kvasir", str(KVASIR)))
    done = subprocess.run(["systemd-analyze", "verify", str(here)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    here.write_text(here.read_text().replace("ProtectSystem=", "ProtectSistem="))
    done = subprocess.run(["systemd-analyze", "verify", str(here)], capture_output=True, text=True, timeout=60)
    assert "ProtectSistem" in done.stderr


@WITH_SYSTEMD
def test_the_unit_has_few_rights(unit: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_its_command_is_one_of_the_cli_and_a_missing_file_is_the_status_that_is_not_tried_again(unit: Path) -> None:
    (command,) = values(unit, "ExecStart")
    program, *arguments = shlex.split(command)
    assert program == "/opt/kvasir/bin/kvasir"
    done = subprocess.run([str(KVASIR), *arguments], capture_output=True, text=True, timeout=120)
    assert (str(done.returncode), done.stdout) == (values(unit, "RestartPreventExitStatus")[0], "")
    assert arguments[-1] in done.stderr, "the missing file is named"


def test_it_writes_to_its_own_folder_and_is_killed_after_its_drains_alone(unit: Path) -> None:
    environ = dict(one.split("=", 1) for one in shlex.split(values(unit, "Environment")[0]))
    folder = f"/var/lib/{values(unit, 'StateDirectory')[0]}"
    assert str(load(Settings, file=None, environ=environ, flags={}).server.data_dir) == folder == environ["HOME"]
    drains_s = EngineSettings().drain_s + (0 if "engine" in unit.stem else Settings().server.shutdown_s)
    assert float(values(unit, "TimeoutStopSec")[0]) > drains_s + 10


def test_all_units_are_hardened_alike(unit: Path) -> None:
    hardening = [one.read_text().partition("UMask=")[2].partition("[Install]")[0] for one in (unit, UNITS[0])]
    assert hardening[0] == hardening[1] != ""

"""What can be seen from here of machines that are not here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_every_call_is_there_on_macos_too(tmp_path: Path) -> None:
    """By the types of the standard library, which differ by platform."""
    command = [sys.executable, "-m", "mypy", "--platform", "darwin", "--cache-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout

"""Apps do not always have the newest SDK: an older major version sees exactly what the newest one sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.server import Server

ROOT = Path(__file__).parent.parent.parent
OLDER = [
    ("openai", "openai==1.109.1"),
    ("openai", "openai==2.54.0"),
    ("anthropic", "anthropic==0.125.0"),
    ("anthropic", "anthropic==1.17.0"),
    ("gemini", "google-genai==1.75.0"),
    ("gemini", "google-genai==2.34.0"),
]
LIMIT_S = 300.0

pytestmark = pytest.mark.slow


def installed(requirement: str, config: pytest.Config) -> Path:
    """A folder with this package and what it needs, made once and kept beside pytest's own cache."""
    folder = config.cache.mkdir("older-sdks") / requirement if config.cache else None
    assert folder is not None
    if not (folder / "done").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), requirement]
        subprocess.run(command, check=True, timeout=LIMIT_S)
        (folder / "done").touch()
    return folder


def tour(name: str, server: Server, *first: Path) -> Any:
    """What an app sees, with the packages of these folders before all others."""
    path = os.pathsep.join(map(str, [*first, ROOT]))
    command = [sys.executable, "-m", "tests.fakes.sdk_tour", name, server.url, "demo"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def newest(server: Server) -> Callable[[str], Any]:
    """What the newest SDK of a name sees, asked once."""
    return cache(lambda name: tour(name, server))


@pytest.mark.parametrize("replicas", ["bundled"], indirect=True)  # what is behind a gateway is nothing to an SDK
@pytest.mark.parametrize(("name", "requirement"), OLDER, ids=[requirement for _, requirement in OLDER])
def test_an_older_sdk_sees_what_the_newest_sees(
    name: str, requirement: str, server: Server, newest: Callable[[str], Any], pytestconfig: pytest.Config
) -> None:
    seen = tour(name, server, installed(requirement, pytestconfig))
    assert seen == newest(name)
    assert all(seen.values())

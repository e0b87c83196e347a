"""The real agents of the command line against a real server: two headless turns each, the second from the cache.

They are packages of npm, which `.ci/clients.sh` installs into `.clients`; without them these tests are skipped. Their
prompts have up to 35,000 tokens, whose prefill takes some tens of seconds of one core.
"""

from __future__ import annotations

import os
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.server import Server

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
CLIENTS = ROOT / ".clients/node_modules/.bin"
TURN_LIMIT_S = 900.0
QUESTION = "Say hello."

CODEX = """
model = "demo"
model_provider = "kvasir"
[model_providers.kvasir]
name = "kvasir"
base_url = "{url}/v1"
wire_api = "responses"
"""
AGENTS: dict[str, tuple[list[str], list[str]]] = {
    "claude": (
        ["-p", QUESTION, "--model", "demo", "--output-format", "json"],
        ["-p", QUESTION, "--model", "demo", "--output-format", "json", "--continue"],
    ),
    "codex": (
        ["exec", "--skip-git-repo-check", "--json", QUESTION],
        ["exec", "--skip-git-repo-check", "--json", "resume", "--last", QUESTION],
    ),
    "gemini": (
        ["-m", "demo", "--skip-trust", "-o", "json", "-p", QUESTION],
        ["-m", "demo", "--skip-trust", "-o", "json", "--resume", "latest", "-p", QUESTION],
    ),
}
"""What each is called with, for its first turn and for its second."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """What a newcomer starts: the demo model, with room for the prompts of agents."""
    with Server(tmp_path_factory.mktemp("agents") / "data") as running:
        yield running


def counted(server: Server, name: str) -> float:
    """The sum of a counter's series."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as page:
        text = page.read().decode()
    return sum(float(value) for value in re.findall(rf"^{name}_total\{{.*\}} (\S+)$", text, re.MULTILINE))


def environment(server: Server, home: Path) -> dict[str, str]:
    """Nothing of whoever runs this; the agents keep what they keep below `home`, and call nobody else."""
    (home / ".codex").mkdir(parents=True)
    (home / ".codex/config.toml").write_text(CODEX.format(url=server.url))
    (home / ".gemini").mkdir()
    (home / ".gemini/settings.json").write_text('{"security": {"auth": {"selectedType": "gemini-api-key"}}}')
    return {
        "HOME": str(home),
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "NO_PROXY": "127.0.0.1",
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4096",  # an answer cut off is an error to it; these have 20 to 600
        "GOOGLE_GEMINI_BASE_URL": server.url,
        "GEMINI_API_KEY": "none",
    }


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_completes_two_turns_and_the_second_comes_from_the_cache(
    name: str, server: Server, tmp_path: Path
) -> None:
    if not (CLIENTS / name).exists():
        pytest.skip(f"{CLIENTS / name} is not there; .ci/clients.sh installs it")
    work = tmp_path / "work"
    work.mkdir()
    environ = environment(server, tmp_path / "home")
    seen: list[tuple[float, float]] = []
    for arguments in AGENTS[name]:
        before = [counted(server, f"kvasir_{what}_tokens") for what in ("prompt", "cached")]
        ended = subprocess.run(
            [CLIENTS / name, *arguments],
            cwd=work,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TURN_LIMIT_S,
        )
        assert ended.returncode == 0, (ended.stdout[-2000:], ended.stderr[-2000:])
        after = [counted(server, f"kvasir_{what}_tokens") for what in ("prompt", "cached")]
        seen.append((after[0] - before[0], after[1] - before[1]))
    (first_prompt, _), (second_prompt, second_cached) = seen
    assert first_prompt > 1000
    # of what was sent: the model may call tools, so a turn may be several requests
    assert 0.8 * second_prompt < second_cached < second_prompt, seen

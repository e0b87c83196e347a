"""Real clients, as they are, on four backends: frameworks and SDKs of others on each, and agents.

    bundled      the model of an engine, by its name
    alias        the same by the name that the client asks for unless told, as deploy/examples has it
    replica      a vLLM with the same model
    translated   an upstream of another API, by an alias: a second gateway, in front of the first

`.ci/clients.sh` installs them into `.clients`; without them these tests are skipped, and without vLLM those with the
replica. Prompts of agents have up to 35,000 tokens, whose prefill takes some tens of seconds of one core.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.fakes import vllm_fleet, vllm_server
from tests.fakes.server import Server

pytestmark = pytest.mark.slow

ROOT: Final = Path(__file__).parent.parent.parent
CLIENTS: Final = ROOT / ".clients"
EXAMPLE: Final = ROOT / "deploy/examples/claude-code-on-a-local-model.toml"
LIMIT_S: Final = 900.0
CONTEXT: Final = ("--max-model-len", "65536")
"""Of the replica: the prompts of agents, and their answers."""

UPSTREAM = """
[[upstreams]]
name = "{name}"
dialect = "{dialect}"
api = "{api}"
api_only = {only}
url = "{url}"
models = ["{name} = local"]
lossy = "drop"  # Gemini CLI asks for top_k
"""
UPSTREAMS: Final = (
    ("far-chat", "openai", "chat", "/v1"),
    ("far-responses", "openai", "responses", "/v1"),
    ("far-anthropic", "anthropic", "chat", ""),
    ("far-gemini", "gemini", "chat", ""),
)
ALIASES: Final = {"claude-*": "far-chat", "gpt-*": "far-chat", "gemini-*": "far-responses"}
"""In front of upstreams: what Claude Code, Codex and Gemini CLI ask for."""


class Backends(NamedTuple):
    near: Server
    far: Server
    has_replica: bool


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backends]:
    folder = tmp_path_factory.mktemp("clients")
    with Server(folder / "near", config=EXAMPLE.read_text()) as near:
        config = '[prompt]\ncache_key = "hint"\n'
        for name, target in ALIASES.items():
            config += f'[[aliases]]\nname = "{name}"\ntarget = "{target}"\n'
        for name, dialect, api, path in UPSTREAMS:
            only = str(dialect == "openai").lower()
            config += UPSTREAM.format(name=name, dialect=dialect, api=api, only=only, url=near.url + path)
        if not vllm_server.installed():
            with Server(folder / "far", command="gateway", config=config) as far:
                yield Backends(near, far, has_replica=False)
            return
        (folder / "vllm").mkdir()
        with (
            vllm_fleet.replicas(folder / "vllm", 1, blocks=4096, arguments=(*vllm_server.EAGER, *CONTEXT)) as replicas,
            Server(folder / "far", *replicas.flags, command="gateway", config=config) as far,
        ):
            far.wait_for_line("engine engine-0 joined", vllm_fleet.JOIN_LIMIT_S)
            yield Backends(near, far, has_replica=True)


def environment(home: Path) -> dict[str, str]:
    """Without variables of this process; clients write below `home` alone, and call no other host."""
    return {
        "HOME": str(home),
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "NO_PROXY": "127.0.0.1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
    }


# -- frameworks and SDKs ----------------------------------------------------------------------------------------------

GPT, CLAUDE, GEMINI = "gpt-4o", "claude-sonnet-4-5", "gemini-2.5-flash"
FRAMEWORKS: Final[dict[str, tuple[str, str]]] = {
    "langchain_openai": (GPT, "far-anthropic"),
    "langchain_responses": (GPT, "far-gemini"),
    "langchain_anthropic": (CLAUDE, "far-chat"),
    "llama_index": (GPT, "far-gemini"),
    "litellm": (GPT, "far-responses"),
    "pydantic_ai_openai": (GPT, "far-gemini"),
    "pydantic_ai_anthropic": (CLAUDE, "far-responses"),
    "pydantic_ai_google": (GEMINI, "far-chat"),
    "openai_agents_chat": (GPT, "far-responses"),
    "openai_agents_responses": (GPT, "far-anthropic"),
    "instructor": (GPT, "far-anthropic"),
    "dspy": (GPT, "far-anthropic"),
    "llm": (GPT, "far-anthropic"),
    "vercel chat": (GPT, "far-anthropic"),
    "vercel responses": (GPT, "far-gemini"),
    "vercel anthropic": (CLAUDE, "far-responses"),
    "vercel google": (GEMINI, "far-chat"),
}
"""Client -> a name of a model that it knows, for which there is an alias, and an upstream of another API."""


def command_of(client: str) -> list[str | Path]:
    """Skips the test where the client is not installed."""
    script, _, api = client.partition(" ")
    found = CLIENTS / ("node_modules/ai" if script == "vercel" else "python/bin/python")
    if not found.exists():
        pytest.skip(f"{found} is not there; .ci/clients.sh installs it")
    folder = Path(__file__).parent / "clients"
    return ["node", folder / "vercel.mjs", CLIENTS, api] if api else [found, folder / "frameworks.py", script]


@pytest.mark.parametrize("client", FRAMEWORKS)
def test_a_framework_completes_a_turn_with_a_tool_on_every_backend(
    client: str, backends: Backends, tmp_path: Path
) -> None:
    near, far, has_replica = backends
    alias, upstream = FRAMEWORKS[client]
    asked = [near.url, "local", near.url, alias, far.url, upstream, *([far.url, "demo"] if has_replica else [])]
    ended = subprocess.run(
        [*command_of(client), *asked], env=environment(tmp_path), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ended.returncode == 0, (ended.stdout[-2000:], ended.stderr[-4000:])
    answers = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert len(answers) == len(asked) / 2, ended.stdout
    for answer in answers:
        assert answer["called"], answers
        assert all(isinstance(argument, str) for argument in answer["called"])
        assert answer["text"], answers


# -- agents of the command line ---------------------------------------------------------------------------------------

QUESTION: Final = "Say hello."
CODEX: Final = """
{model}
model_provider = "kvasir"
[model_providers.kvasir]
name = "kvasir"
base_url = "{url}/v1"
wire_api = "responses"
"""
AGENTS: Final[dict[str, tuple[list[str], list[str], list[str]]]] = {
    "claude": (["--model"], ["-p", QUESTION, "--output-format", "json"], ["--continue"]),
    "codex": (["-m"], ["exec", "--skip-git-repo-check", "--json"], ["resume", "--last"]),
    "gemini": (["-m"], ["--skip-trust", "-o", "json", "-p", QUESTION], ["--resume", "latest"]),
}
"""How each is told its model, asked a question, and asked again in the same session."""

CASES: Final = [
    pytest.param(name, backend, marks=vllm_fleet.MARKS if backend == "replica" else ())
    for backend in ("bundled", "alias", "translated", "replica")
    for name in AGENTS
    if (name, backend) != ("claude", "bundled")  # its prompts are the longest, and an alias leads to the same engine
]


def counted(server: Server, name: str) -> float:
    """The sum of a counter's series."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as page:
        text = page.read().decode()
    return sum(float(value) for value in re.findall(rf"^{name}_total\{{.*\}} (\S+)$", text, re.MULTILINE))


def agent_environment(url: str, model: str | None, home: Path) -> dict[str, str]:
    (home / ".codex").mkdir(parents=True)
    (home / ".codex/config.toml").write_text(CODEX.format(url=url, model=f'model = "{model}"' if model else ""))
    (home / ".gemini").mkdir()
    (home / ".gemini/settings.json").write_text('{"security": {"auth": {"selectedType": "gemini-api-key"}}}')
    return {
        **environment(home),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4096",  # an answer cut off is an error to it; these have 20 to 600
        "GOOGLE_GEMINI_BASE_URL": url,
        "GEMINI_API_KEY": "none",
    }


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_an_agent_completes_two_turns_and_the_second_comes_from_the_cache(
    name: str, backend: str, backends: Backends, tmp_path: Path
) -> None:
    command = CLIENTS / "node_modules/.bin" / name
    if not command.exists():
        pytest.skip(f"{command} is not there; .ci/clients.sh installs it")
    server = backends.near if backend in ("bundled", "alias") else backends.far
    model = {"bundled": "local", "replica": "demo"}.get(backend)
    option, first, again = AGENTS[name]
    chosen = [*option, model] if model else []
    turns = (
        [[*first, *chosen, QUESTION], [*first, *chosen, *again, QUESTION]]
        if name == "codex"
        else [[*first, *chosen], [*first, *chosen, *again]]
    )
    work = tmp_path / "work"
    work.mkdir()
    environ = agent_environment(server.url, model, tmp_path / "home")
    seen: list[tuple[float, float]] = []
    for arguments in turns:
        before = [counted(server, f"kvasir_{what}_tokens") for what in ("prompt", "cached")]
        ended = subprocess.run(
            [command, *arguments],
            cwd=work,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert ended.returncode == 0, (ended.stdout[-2000:], ended.stderr[-2000:], server.lines[-10:])
        after = [counted(server, f"kvasir_{what}_tokens") for what in ("prompt", "cached")]
        seen.append((after[0] - before[0], after[1] - before[1]))
    (first_prompt, _), (second_prompt, second_cached) = seen
    assert first_prompt > 1000
    # of what was sent: the model may call tools, so a turn may be several requests
    assert 0.8 * second_prompt < second_cached < second_prompt, seen

"""The package as users install it: what is in a wheel and an sdist, and that it runs away from the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest

from tests.fakes.server import Server

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
UV_S = 300


def _tracked(*folders: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, check=True, capture_output=True, text=True)
    return listed.stdout.split()


def _build(source: Path) -> list[Path]:
    """An sdist, and the wheel that is built from it."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(source / "dist"), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=UV_S)
    return sorted((source / "dist").iterdir(), key=lambda file: file.suffix)


def _copy_to(folder: Path, mode: int) -> Path:
    for name in _tracked():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
        target.chmod(mode)
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, built = _build(_copy_to(tmp_path_factory.mktemp("package"), 0o644))
    return built


def _uv(*arguments: str, expected: int = 0) -> str:
    """What a command of uv printed; it reads no settings of this project."""
    variables = {name: text for name, text in os.environ.items() if not name.startswith(("KVASIR_", "PYTHONPATH"))}
    done = subprocess.run(
        [shutil.which("uv") or str(Path(sys.executable).parent / "uv"), *arguments],
        capture_output=True,
        text=True,
        timeout=UV_S,
        env={**variables, "UV_NO_CONFIG": "1", "UV_PYTHON_DOWNLOADS": "never"},
        cwd="/",
    )
    assert done.returncode == expected, done.stderr
    return done.stdout + done.stderr


def test_two_builds_are_equal_and_hold_all_of_the_product_and_no_tests(wheel: Path, tmp_path: Path) -> None:
    again = _build(_copy_to(tmp_path, 0o600))
    assert again[1].read_bytes() == wheel.read_bytes()
    assert again[0].read_bytes() == wheel.with_name(again[0].name).read_bytes()
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    assert names == set(_tracked("gateway", "engine"))
    with tarfile.open(again[0]) as file:
        tops = {name.split("/")[1] for name in file.getnames()}
    assert tops == {"gateway", "engine", "deploy", "docs", "LICENSE", "README.md", "pyproject.toml", "PKG-INFO"} | (
        {".gitignore"} & tops
    )
    assert "PASSED" in _uv("tool", "run", "twine", "check", "--strict", str(wheel), str(again[0]))


def _find_python(version: str) -> str | None:
    """One on PATH, one of pyenv, or that of .ci/python.sh."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    cached = Path.home() / f".cache/kvasir/python{version}/usr/bin/python{version}"
    for python in (f"python{version}", *map(str, pyenv.glob(f"{version}.*/bin/python")), str(cached)):
        look = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        with suppress(OSError):
            if subprocess.run(look, capture_output=True, text=True).stdout.strip() == version:
                return python
    return None


@pytest.mark.parametrize("version", PYTHONS)
def test_a_gateway_runs_in_a_fresh_environment_with_a_redis_of_its_own(
    wheel: Path, tmp_path: Path, version: str
) -> None:
    """Without the extra `engine`, of which `kvasir serve` speaks in one line instead of starting engines in vain."""
    if (python := _find_python(version)) is None:
        pytest.skip(f"there is no Python {version} on this machine")
    _uv("venv", "--quiet", "--python", python, str(tmp_path / "venv"))
    _uv("pip", "install", "--quiet", "--python", str(tmp_path / "venv/bin/python"), str(wheel))
    programs = tmp_path / "venv" / "bin"
    flags = ("--data-dir", str(tmp_path / "none"), "--port", "0")
    done = subprocess.run([programs / "kvasir", "serve", *flags], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "pip install 'kvasir[engine]'" in done.stderr
    assert "Traceback" not in done.stderr
    with Server(tmp_path / "data", "--engines", "0", program=[str(programs / "kvasir")]) as server:
        assert [line for line in server.lines if line.strip().startswith("redis ") and "own, in" in line]
        assert "kvasir_requests_total" in server.get("/metrics")


@pytest.mark.parametrize("tool", ["uv", "pipx"])
def test_tools_that_install_programs_bring_the_command(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    for name, folder in (("UV_TOOL_DIR", "uv"), ("UV_TOOL_BIN_DIR", "bin"), ("PIPX_HOME", "pipx")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.setenv("PIPX_BIN_DIR", str(tmp_path / "bin"))
    before = ("tool", "run", "pipx", "install") if tool == "pipx" else ("tool", "install")
    _uv(*before, "--python", sys.executable, str(wheel))
    told = subprocess.run([tmp_path / "bin/kvasir", "--version"], capture_output=True, text=True, check=True).stdout
    assert told.split() == ["kvasir", wheel.name.split("-")[1]]


def test_the_wheel_alone_serves_the_demo_model(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the dependencies that are installed for the tests: torch is too large to be installed each time."""
    target = tmp_path / "installed"
    _uv("pip", "install", "--quiet", "--no-deps", "--target", str(target), "--python", sys.executable, str(wheel))
    monkeypatch.setenv("PYTHONPATH", str(target))
    monkeypatch.chdir(tmp_path)
    look = "import gateway, engine; print(gateway.__path__[0], engine.__path__[0])"
    found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout.split()
    assert found == [str(target / "gateway"), str(target / "engine")]
    with Server(tmp_path / "data", program=[sys.executable, str(target / "bin" / "kvasir")]) as server:
        answer = server.client().chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "Who is there?"}], max_tokens=8
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0

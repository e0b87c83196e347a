"""Sets up llama.cpp in a virtual environment of its own, for engine_vs_peers.py: built from llama-cpp-python's source
for the processor that is here (10 minutes on two cores), and done once for a folder.

Needs a C++ compiler. Installs nothing into the environment that runs Kvasir.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

VERSION: Final = "0.3.36"
SETUP_S: Final = 3600  # seconds that the build may take
_COMPLETE: Final = "kvasir-complete"
_CMAKE: Final = "-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAVA_BUILD=OFF"


def set_up(folder: Path) -> Path:
    """The Python of a virtual environment with llama.cpp, made in `folder` if it is not there yet.

    Raises subprocess.CalledProcessError or TimeoutExpired when the build fails or hangs.
    """
    python = folder / "bin" / "python"
    if (folder / _COMPLETE).is_file():
        return python
    print(f"building llama.cpp in {folder}", file=sys.stderr, flush=True)
    venv.create(folder, with_pip=True, clear=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-binary", "llama-cpp-python"]
    subprocess.run(
        [*command, f"llama-cpp-python=={VERSION}"],
        check=True,
        timeout=SETUP_S,
        env={**os.environ, "CMAKE_ARGS": _CMAKE},
    )
    (folder / _COMPLETE).write_text(f"llama-cpp-python {VERSION}\n", encoding="utf-8")
    return python

"""What decides the last bits of keys and values besides the model: a tag for blocks that outlive their engine.

A warm answer equals the cold one bit for bit only if the same arithmetic computed both. The number of threads is not in
it: keys and values came out equal with one to four (docs/lab-notebook.md).
"""

from __future__ import annotations

import hashlib
import platform
import re
from pathlib import Path
from typing import Final

import torch
import transformers

from engine.compute.kernel import library_digest

_FOLDER: Final = Path(__file__).parent
_CPUINFO: Final = Path("/proc/cpuinfo")
_CPU_LINE: Final = re.compile(
    r"^(vendor_id|cpu family|model|CPU implementer|CPU part|flags|Features)\s*:\s*(.*)$", re.M
)
_COMPUTES: Final = re.compile(r"(avx|fma|f16c|sse|amx|asimd|sve|bf16|i8mm)\w*")


def find_numerics(device: torch.device) -> str:
    """One line that changes with whatever may change a bit: torch, transformers, our code, the processor or GPU."""
    parts = [f"torch {torch.__version__}", f"transformers {transformers.__version__}", f"code {_hash_code()}"]
    if device.type == "cuda":
        parts += [f"cuda {torch.version.cuda}", torch.cuda.get_device_name(device)]
    else:
        parts += [f"kernel {library_digest()}", f"cpu {torch.backends.cpu.get_cpu_capability()} {hash_processor()}"]
    return ", ".join(parts)


def _hash_code() -> str:
    """Of all that computes a step. A comment changes it, too: then blocks of the version before are computed anew."""
    code = hashlib.sha256()
    for path in sorted([*_FOLDER.glob("*.py"), *_FOLDER.glob("*.c")]):
        code.update(path.name.encode() + b"\0" + path.read_bytes())
    return code.hexdigest()[:16]


def hash_processor(cpuinfo: Path = _CPUINFO) -> str:
    """Of its maker, model and instructions for numbers: libraries choose their kernels by them."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
    except OSError:
        text = ""
    told = [platform.machine(), platform.processor()]
    for name, value in _CPU_LINE.findall(text):
        told.append(
            " ".join(sorted(filter(_COMPUTES.match, value.split()))) if name in ("flags", "Features") else value
        )
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]

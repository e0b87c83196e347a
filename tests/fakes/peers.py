"""Event encoders of real vLLM and SGLang packages, so that decoders are tested with bytes that nobody here wrote.

The one file of a package that has its event classes is read out of its wheel on PyPI by HTTP ranges (about 1 MB of up
to 500), kept in a cache folder, and run in a process of its own with empty modules in place of what it imports. Nothing
of it is in this repository.

    python -m tests.fakes.peers PATH    runs the file at PATH: reads a list of batches from stdin, writes their payloads
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import subprocess
import sys
import types
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

FOLDER: Final = Path.home() / ".cache/kvasir/peers"
FILES: Final = {"vllm": "vllm/distributed/kv_events.py", "sglang": "sglang/srt/disaggregation/kv_events.py"}
MAX_BYTES: Final = 8 << 20  # of one wheel
MAX_READS: Final = 64
LIMIT_S: Final = 30.0
STUBBED: Final = ("vllm", "sglang", "zmq")


def encoder(package: str, version: str) -> Path:
    """The file with a version's event classes. Raises OSError when the index cannot be reached."""
    path = FOLDER / f"{package}-{version}.py"
    if not path.exists():
        index = urllib.request.Request(
            f"https://pypi.org/simple/{package}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
        )
        with urllib.request.urlopen(index, timeout=LIMIT_S) as answer:
            files = json.loads(answer.read(MAX_BYTES))["files"]
        wheels = [file for file in files if file["filename"].startswith(f"{package}-{version}-")]
        wheel = next(file for file in wheels if file["filename"].endswith(".whl"))
        with zipfile.ZipFile(io.BufferedReader(_Remote(wheel["url"], wheel["size"]), 256 << 10)) as archive:
            source = archive.read(FILES[package])
        FOLDER.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(source)
        part.replace(path)
    return path


def encode(package: str, version: str, batches: Sequence[Sequence[dict[str, Any]]]) -> list[bytes]:
    """What a version's publisher would send. An event is {"type": class, field: value}; fields that the version does
    not have are left out, and those that are required and missing are None."""
    command = [sys.executable, "-m", "tests.fakes.peers", str(encoder(package, version))]
    done = subprocess.run(
        command, input=msgspec.msgpack.encode(batches), stdout=subprocess.PIPE, timeout=LIMIT_S, check=True
    )
    return list(msgspec.msgpack.decode(done.stdout))


class _Remote(io.RawIOBase):
    """A file on a server that answers ranges."""

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size, self._at, self._read, self._reads = url, size, 0, 0, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = (0, self._at, self._size)[whence] + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._size - self._at)
        if wanted <= 0:
            return 0
        self._read, self._reads = self._read + wanted, self._reads + 1
        if self._read > MAX_BYTES or self._reads > MAX_READS:
            raise OSError(f"{self._url}: more than {MAX_BYTES} bytes or {MAX_READS} reads for one file")
        span = {"Range": f"bytes={self._at}-{self._at + wanted - 1}"}
        with urllib.request.urlopen(urllib.request.Request(self._url, headers=span), timeout=LIMIT_S) as answer:
            if answer.status != 206:
                raise OSError(f"{self._url}: no ranges, status {answer.status}")
            data = answer.read(wanted)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module for every import of a package in STUBBED; whatever is taken from it is a class."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in STUBBED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: type(name, (), {"__init__": lambda self, *a, **k: None})  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "vllm.logger":
            module.init_logger = lambda name: None  # type: ignore[attr-defined]
        if module.__name__ == "vllm.v1.core.kv_cache_utils":
            module.ExternalBlockHash = bytes | int  # type: ignore[attr-defined]


def _serve(path: str) -> None:
    sys.meta_path.insert(0, _Stubs())
    spec = importlib.util.spec_from_file_location("peer_events", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    payloads = []
    for batch in msgspec.msgpack.decode(sys.stdin.buffer.read()):
        events = []
        for event in batch:
            kind = getattr(module, event["type"])
            required = kind.__struct_fields__[: len(kind.__struct_fields__) - len(kind.__struct_defaults__)]
            given = {name: value for name, value in event.items() if name in kind.__struct_fields__}
            events.append(kind(**{**dict.fromkeys(required), **given}))
        whole = module.KVEventBatch(ts=1.5, events=events)
        for name in ("data_parallel_rank", "attn_dp_rank"):
            if name in whole.__struct_fields__:
                setattr(whole, name, 3)
        payloads.append(msgspec.msgpack.encode(whole))
    sys.stdout.buffer.write(msgspec.msgpack.encode(payloads))


if __name__ == "__main__":
    _serve(sys.argv[1])

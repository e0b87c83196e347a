"""Compiles engine/compute/paged_attention.c with the system's C compiler, once for a machine, and loads it.

The library is kept in the user's cache folder under a name made of the source and the compiler's flags, so a new
version of the source is a new file. Where anything is missing (the compiler, the processor's instructions, a folder to
write to) there is no library and engine/compute/flash.py computes with torch. Never raises; says once in the log
why not.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import torch

log = logging.getLogger(__name__)

SOURCE: Final = Path(__file__).with_name("paged_attention.c")
COMPILERS: Final = ("cc", "gcc", "clang")
FLAGS: Final = (
    *("-O3", "-fno-math-errno", "-shared", "-fPIC", "-lm"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma"),
)
COMPILE_S: Final = 60.0  # seconds that the compiler may take


class Item(ctypes.Structure):
    """item_t of the source."""

    _fields_ = (
        ("first_row", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("begin", ctypes.c_int32),
        ("end", ctypes.c_int32),
        ("table", ctypes.c_int64),
        ("flags", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class Call(ctypes.Structure):
    """call_t of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "out", "cache", "row_index", "positions", "tables", "items")),
        ("state", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_items", "num_heads", "num_kv_heads", "head_dim", "block_size")),
        ("query_stride", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("unused", ctypes.c_int32),
        ("next", ctypes.c_void_p),
    )


@functools.cache
def load_attend() -> ctypes._NamedFuncPointer | None:
    """kvasir_attend of the source; None where it cannot be compiled or run. The first call of a machine compiles."""
    if not _has_instructions():
        return None
    try:
        library = ctypes.CDLL(str(_compiled(default_folder())))
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        log.info("attention is computed with torch: %s", error)
        return None
    attend = library.kvasir_attend
    attend.argtypes, attend.restype = (ctypes.POINTER(Call),), ctypes.c_int
    return attend


def library_digest() -> str:
    """Of the library that computes attention, as it was compiled here; `none` where torch does. Compilers differ."""
    if load_attend() is None:
        return "none"
    return hashlib.sha256(_compiled(default_folder()).read_bytes()).hexdigest()[:16]


def default_folder() -> Path:
    """Where the library is kept. Raises RuntimeError when the user has no home."""
    return Path.home() / ".cache" / "kvasir" / "native"


def _has_instructions() -> bool:
    asks = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(asks and asks())


def _compiled(folder: Path) -> Path:
    """The library in `folder`, compiled if it is not there. Another process may do the same at the same time."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    identity = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:20]
    library = folder / f"paged_attention-{identity}.so"
    if library.is_file():
        return library
    if compiler is None:
        raise OSError(f"there is no C compiler ({', '.join(COMPILERS)})")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, made = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(descriptor)
    try:
        command = [compiler, str(SOURCE), "-o", made, *FLAGS]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)  # noqa: S603
        if ended.returncode:
            raise OSError(f"{compiler} failed: {ended.stderr.strip().splitlines()[:1]}")
        os.replace(made, library)
    finally:
        Path(made).unlink(missing_ok=True)
    return library

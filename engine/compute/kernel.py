"""Compiles and loads attention.c, which includes forward.c and layers.c, and products.c; knows the instruction sets.

The system's C compiler makes the library once for a machine, with every instruction set in it. It is kept in the user's
cache folder under a name made of the source and the compiler's flags, so a new version of the source is a new file.
Where anything is missing (a compiler, a folder to write to) there is no library, the log says once why not, and
engine/compute/reference.py attends. Never raises for that.
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
import time
from pathlib import Path
from typing import Final

import torch

log = logging.getLogger(__name__)

SOURCE: Final = Path(__file__).with_name("attention.c")  # includes the others
COMPILERS: Final = ("cc", "gcc", "clang")
FLAGS: Final = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", "-shared", "-fPIC", "-lm")
COMPILE_S: Final = 120.0  # seconds that the compiler may take; 6 are usual
VARIANTS: Final = ("plain", "neon", "avx2", "avx512", "avx512_bf16")  # of the source, in order; later ones are quicker
_KINDS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}  # of caches, of the source


PRODUCTS: Final = SOURCE.with_name("products.c")
PRODUCT_VARIANTS: Final = ("plain", "neon", "neon_dot", "avx2", "avx2_vnni", "avx512_vnni")  # of that source


class QuantizedBlocks(ctypes.Structure):
    """weight_t of products.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "scales", "minima", "bias")),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs", "run", "group_runs")),
        *((name, ctypes.c_int32) for name in ("bits", "variant", "rotated")),
    )


class Item(ctypes.Structure):
    """item_t of the source."""

    _fields_ = (
        ("table", ctypes.c_int64),
        *(
            (name, ctypes.c_int32)
            for name in ("first_row", "num_rows", "begin", "end", "kept", "head", "num_heads", "unused")
        ),
    )


class Call(ctypes.Structure):
    """call_t of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "out", "cache", "row_index", "positions", "tables", "items")),
        *((name, ctypes.c_void_p) for name in ("results_at", "results", "parallel")),
        *((name, ctypes.c_int64) for name in ("num_keeping", "num_items", "num_heads", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("width", "block_size", "query_stride", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, ctypes.c_int32) for name in ("kind", "variant", "threads", "unused")),
    )


class Product(ctypes.Structure):
    """product_t of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "rows", "other", "out", "parallel")),
        *((name, ctypes.c_int64) for name in ("num_rows", "row_stride", "in_features", "out_features")),
        ("out_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("then", "variant", "threads", "kind")),
    )


class Rows(ctypes.Structure):
    """rows_t of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "out", "weight", "cos", "sin", "positions", "parallel")),
        *((name, ctypes.c_int64) for name in ("num_rows", "row_stride", "out_stride", "heads", "dim")),
        ("epsilon", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("variant", "threads", "unused")),
    )


class Linear(ctypes.Structure):
    """linear_t of layers.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "quantized", "beside")),
        ("outputs", ctypes.c_int64),
    )


class Layer(ctypes.Structure):
    """layer_t of layers.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input_norm", "qk_norm", "mlp_norm")),
        *((name, ctypes.c_void_p) for name in ("qkv", "output", "gate", "up", "down")),
        ("window", ctypes.c_int64),
    )


class Decoder(ctypes.Structure):
    """decoder_t of layers.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "head", "final_norm", "cos", "sin", "products")),
        *((name, ctypes.c_int64) for name in ("num_layers", "hidden", "inner", "heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_float) for name in ("epsilon", "scale")),
        *((name, ctypes.c_int32) for name in ("variant", "unused")),
    )


UNWANTED: Final = ctypes.CFUNCTYPE(ctypes.c_int)


class DecoderStep(ctypes.Structure):
    """step_t of layers.c."""

    _fields_ = (
        ("attention", Call),
        *((name, ctypes.c_void_p) for name in ("hidden", "state", "attended", "tile", "logits", "positions", "slots")),
        ("unwanted", UNWANTED),
        ("parallel", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_rows", "layer_bytes", "first", "last", "threads")),
    )


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """None where it cannot be compiled. The first call on a machine takes seconds."""
    try:
        library = ctypes.CDLL(str(_compiled(default_folder())))
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        log.warning("attention and products are computed with torch, which is slower: %s", error)
        return None
    library.kvasir_attend.argtypes = (ctypes.POINTER(Call),)
    library.kvasir_multiply.argtypes, library.kvasir_multiply.restype = (ctypes.POINTER(Product),), None
    library.kvasir_turn.argtypes, library.kvasir_turn.restype = (ctypes.POINTER(Rows),), None
    library.kvasir_layers.argtypes = ctypes.POINTER(Decoder), ctypes.POINTER(DecoderStep)
    library.kvasir_supports.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    return library


@functools.cache
def load_products() -> ctypes.CDLL | None:
    """The library of products.c, which is compiled when a model has quantised weights; None where it cannot be."""
    try:
        library = ctypes.CDLL(str(_compiled(default_folder(), PRODUCTS)))
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        log.warning("products with quantised weights are computed with torch, which is much slower: %s", error)
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.kvasir_products.argtypes = (pointer, pointer, number, pointer, number, pointer, number, number, pointer)
    return library


@functools.cache
def supported(dtype: torch.dtype, head_dim: int) -> tuple[int, ...]:
    """Variants that this processor can run on a cache, as indices of VARIANTS; empty without the library."""
    library, kind = load_library(), _KINDS.get(dtype)
    if library is None or kind is None:
        return ()
    return tuple(number for number in range(len(VARIANTS)) if library.kvasir_supports(number, kind, head_dim))


def describe(dtype: torch.dtype, head_dim: int) -> str:
    """What computes on such a cache here, in words."""
    variants = supported(dtype, head_dim)
    return f"C kernels for {VARIANTS[variants[-1]]}" if variants else "torch"


def kind_of(dtype: torch.dtype) -> int:
    return _KINDS[dtype]


@functools.cache
def find_parallel() -> int | None:
    """Address of GOMP_parallel in the OpenMP that torch computes with: its threads are awake when its products end."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError, TypeError):
        log.info("attention runs on one thread: torch's OpenMP has no GOMP_parallel")
        return None


def library_digest() -> str:
    """Of the library that computes attention, as it was compiled here; `none` where torch does. Compilers differ."""
    if load_library() is None:
        return "none"
    return hashlib.sha256(_compiled(default_folder()).read_bytes()).hexdigest()[:16]


def default_folder() -> Path:
    """Where the library is kept. Raises RuntimeError when the user has no home."""
    return Path.home() / ".cache" / "kvasir" / "native"


def _compiled(folder: Path, source: Path | None = None) -> Path:
    """The library of a source in `folder`, compiled if it is not there. Others may do the same at the same time."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    source = source or SOURCE
    sources = b"".join(path.read_bytes() for path in sorted(source.parent.glob("*.c")))
    identity = hashlib.sha256(sources + " ".join(FLAGS).encode()).hexdigest()[:20]
    library = folder / f"{source.stem}-{identity}.so"
    if library.is_file():
        return library
    if compiler is None:
        raise OSError(f"there is no C compiler ({', '.join(COMPILERS)})")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for left in folder.glob("tmp*.so"):  # of compilations that were killed; others may compile now
        if time.time() - left.stat().st_mtime > 10 * COMPILE_S:
            left.unlink(missing_ok=True)
    descriptor, made = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(descriptor)
    try:
        command = [compiler, str(source), "-o", made, *FLAGS]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)  # noqa: S603
        if ended.returncode:
            raise OSError(f"{compiler} failed: {ended.stderr.strip().splitlines()[:1]}")
        os.replace(made, library)
    finally:
        Path(made).unlink(missing_ok=True)
    return library

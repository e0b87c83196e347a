"""attention.c: each instruction set that is here against the slow twin, others compiled or emulated; its library."""

from __future__ import annotations

import os
import shutil
import subprocess
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.compute import kernel
from engine.compute.attention import StepAttention
from engine.compute.batch import Batch, Span
from engine.compute.kernel import VARIANTS, supported
from engine.compute.kv_cache import CacheShape, KVCache
from engine.compute.paged import PagedAttention, can_attend
from engine.compute.reference import ReferenceAttention

CPU = torch.device("cpu")
HERE = Path(__file__).parent
EDGES = [0, 1, 15, 16, 17, 126, 127, 128, 129, 255, 256, 257, 400]
needs_library = pytest.mark.skipif(not supported(torch.float32, 64), reason="no C compiler")


@needs_library
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_instruction_set_equals_the_slow_twin_and_a_row_is_the_same_alone(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.int8]))
    computed = torch.float32 if dtype == torch.int8 else dtype
    head_dim = data.draw(st.sampled_from([32, 40, 64, 80, 96, 128, 192, 256]))
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (2, 3), (1, 7), (2, 8), (1, 12)]))
    size = data.draw(st.sampled_from([8, 16, 32]))
    window = data.draw(st.sampled_from([None, None, 1, 100, 128, 300]))
    cap = data.draw(st.sampled_from([None, None, 1.0, 30.0]))
    cache = KVCache(CacheShape(1, kv_heads, head_dim, dtype), 2048 // size, size, CPU)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    written = torch.randn(cache.zero_slot, 2, kv_heads, head_dim, generator=generator).to(computed)
    cache.layers[0][: cache.zero_slot] = cache.encode(written)
    free = torch.randperm(cache.num_blocks, generator=generator).tolist()
    shared = [free.pop() for _ in range(data.draw(st.sampled_from([0, 128, 288])) // size)]
    spans: list[Span] = []
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.sampled_from(EDGES))
        count = data.draw(st.sampled_from([1, 1, 2, 5, 20, 130]))
        table = list(shared) if start >= len(shared) * size else []
        table += [free.pop() for _ in range(-(-(start + count) // size) - len(table))]
        spans.append(Span(spans[-1].row + spans[-1].count if spans else 0, count, start, array("i", table)))
    num_heads = kv_heads * group
    query = torch.randn(spans[-1].row + spans[-1].count, num_heads, head_dim, generator=generator).to(computed)
    want = torch.full_like(query, float("nan"))
    ReferenceAttention(cache, spans).attend(0, query, 0.15, window, cap, want)
    near = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[computed]
    for variant in supported(dtype, head_dim):
        got = torch.full_like(query, float("nan"))
        PagedAttention(cache, spans, num_heads, variant).attend(0, query, 0.15, window, cap, got)
        torch.testing.assert_close(got, want, atol=near, rtol=near, msg=VARIANTS[variant])
        for span in spans:
            row = data.draw(st.integers(0, span.count - 1))
            asked = query[span.row + row : span.row + row + 1]
            alone = torch.full_like(asked, float("nan"))
            one = [Span(0, 1, span.start + row, span.table)]
            PagedAttention(cache, one, num_heads, variant).attend(0, asked, 0.15, window, cap, alone)
            assert torch.equal(alone[0], got[span.row + row]), VARIANTS[variant]


@needs_library
def test_the_quickest_variant_that_the_processor_has_is_taken() -> None:
    cache = KVCache(CacheShape(1, 1, 64, torch.float32), 4, 16, CPU)
    plan = PagedAttention(cache, [Span(0, 1, 3, array("i", [1]))], 1)
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    assert VARIANTS[plan.call.variant] == (
        "avx512" if " avx512f" in flags and " avx512vl" in flags else "avx2" if " avx2" in flags else
        "neon" if " asimd" in flags else "plain"
    )  # fmt: skip
    assert not supported(torch.float64, 64)
    assert not supported(torch.float32, 257)


def _compiler(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}")
    return found


def _run(*command: str | Path) -> None:
    ended = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.slow
def test_avx512_computes_the_textbook_in_an_emulation(tmp_path: Path) -> None:
    if 2 not in supported(torch.float32, 64):
        pytest.skip("the emulation takes AVX2")
    check = tmp_path / "check"
    flags = ("-O1", "-mavx2", "-mfma", "-ffp-contract=off", "-Wno-psabi", "-include", HERE / "emulated_avx512.h")
    _run(_compiler("gcc"), *flags, HERE / "attention_check.c", "-o", check, "-lm")
    _run(check, "0", "2", "3", "4")


@pytest.mark.slow
def test_neon_computes_the_textbook_in_an_emulation(tmp_path: Path) -> None:
    compiler, emulator, check = _compiler("aarch64-linux-gnu-gcc"), _compiler("qemu-aarch64"), tmp_path / "check"
    _run(compiler, "-O1", "-static", "-ffp-contract=off", HERE / "attention_check.c", "-o", check, "-lm")
    _run(emulator, check, "1")


@pytest.mark.slow
@pytest.mark.parametrize("source", [kernel.SOURCE, kernel.PRODUCTS])
@pytest.mark.parametrize("name", ["gcc", "clang", "aarch64-linux-gnu-gcc"])
def test_all_instruction_sets_compile_without_a_warning(name: str, source: Path, tmp_path: Path) -> None:
    """-O1 finds the warnings that -O3 finds, in half of the time."""
    flags = [flag for flag in kernel.FLAGS if flag not in ("-lm", "-shared")]
    _run(_compiler(name), *flags, "-O1", "-Wall", "-Wextra", "-Werror", "-c", source, "-o", tmp_path / "object.o")


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine without a compiler, on which nothing was compiled before."""
    monkeypatch.setattr(kernel, "default_folder", lambda: tmp_path)
    monkeypatch.setattr(kernel.shutil, "which", lambda name: None)
    kernel.load_library.cache_clear()
    supported.cache_clear()
    yield
    kernel.load_library.cache_clear()
    supported.cache_clear()


@pytest.mark.usefixtures("no_library")
def test_without_a_compiler_torch_attends() -> None:
    cache = KVCache(CacheShape(1, 2, 64, torch.float32), 16, 16, CPU)
    cache.data.normal_(generator=torch.Generator().manual_seed(3))
    assert not can_attend(cache)
    assert kernel.library_digest() == "none"
    span, query = Span(0, 3, 20, array("i", [7, 3])), torch.randn(3, 4, 64)
    nothing = np.zeros(3, np.int64)
    got = StepAttention(cache, Batch(nothing, nothing, nothing, nothing, [span], nothing[:0])).attend(0, query)
    seen = cache.layers[0][[*range(112, 128), *range(48, 55)]]
    key, value = (part.repeat_interleave(2, 1) for part in seen.unbind(1))
    scores = torch.einsum("rhd,khd->hrk", query, key) / 8 + torch.full((3, 23), -torch.inf).triu(21)
    torch.testing.assert_close(got, torch.einsum("hrk,khd->rhd", scores.softmax(-1), value), atol=1e-5, rtol=1e-5)


@needs_library
def test_the_library_is_compiled_once_and_only_when_the_source_is_new(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "small.c"
    source.write_text("int kvasir_attend(void) { return 0; }")
    monkeypatch.setattr(kernel, "SOURCE", source)
    folder = tmp_path / "native" / "deep"
    made = kernel._compiled(folder)
    assert [path.name for path in folder.iterdir()] == [made.name]
    monkeypatch.setattr(kernel.shutil, "which", lambda name: None)
    assert kernel._compiled(folder) == made
    source.write_text("int kvasir_attend(void) { return 1; }")
    with pytest.raises(OSError, match="no C compiler"):
        kernel._compiled(folder)


@needs_library
def test_what_a_killed_compilation_left_is_removed_and_one_that_runs_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source, old, new = tmp_path / "small.c", tmp_path / "tmpold.so", tmp_path / "tmpnew.so"
    source.write_text("int kvasir_attend(void) { return 0; }")
    old.touch(), new.touch()
    os.utime(old, (0, 0))
    monkeypatch.setattr(kernel, "SOURCE", source)
    kernel._compiled(tmp_path)
    assert (old.exists(), new.exists()) == (False, True)


@needs_library
def test_a_compiler_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernel, "FLAGS", ("--no-such-flag",))
    with pytest.raises(OSError, match="failed"):
        kernel._compiled(tmp_path)
    assert not list(tmp_path.iterdir())

"""The tag of blocks that outlive their engine changes with whatever may change a bit, and with nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from engine.compute import numerics
from engine.compute.numerics import find_numerics, hash_processor

CPU = torch.device("cpu")
ONE = "processor : 0\nvendor_id : A\ncpu family : 25\nmodel : 1\nflags : fpu avx2 fma sse4_2\ncpu MHz : 2000\n\n"


def test_it_is_the_same_for_the_same_and_one_line() -> None:
    assert find_numerics(CPU) == find_numerics(CPU)
    assert find_numerics(CPU).isprintable()


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (torch, "__version__", "99.0"),
        (transformers, "__version__", "99.0"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "OTHER"),
        (numerics, "library_digest", lambda: "other"),
        (numerics, "_hash_code", lambda: "other"),
        (numerics, "hash_processor", lambda: "other"),
    ],
)
def test_it_changes_with_each_part(owner: object, name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    before = find_numerics(CPU)
    monkeypatch.setattr(owner, name, value)
    assert find_numerics(CPU) != before


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (("2000", "3000"), True),
        (("fma sse4_2", "sse4_2 fma erms"), True),
        (("avx2", "avx2 avx512f"), False),
        (("model : 1", "model : 17"), False),
        (("vendor_id : A", "vendor_id : B"), False),
    ],
)
def test_a_processor_is_its_model_and_its_instructions(change: tuple[str, str], same: bool, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text(ONE * 2)
    other.write_text((ONE * 2).replace(*change))
    assert (hash_processor(one) == hash_processor(other)) == same
    assert hash_processor(tmp_path / "missing")


def test_code_that_computes_is_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "_FOLDER", tmp_path)
    (tmp_path / "fused.py").write_text("a")
    before = numerics._hash_code()
    (tmp_path / "fused.py").write_text("b")
    assert numerics._hash_code() != before

"""Times one layer's product with quantised weights: our kernel against torch's own on a CPU, and whether a row's
numbers depend on the number of rows beside it.

    python -m tests.bench.products [--inputs 2048] [--outputs 8192] [--rows 1 8 64 512] [--threads 1] [--rounds 15]

The sides take turns; medians of microseconds. torch's int8 is `_weight_int8pack_mm` (weights alone are rounded) and the
dynamic product of its quantised engine (x86 or qnnpack: rows are rounded too); its int4 is
`_weight_int4pack_mm_for_cpu`, which is what torchao calls on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from engine.compute.linear import pack_weight
from engine.compute.quantize import QuantizedWeight, dequantize, quantize

Side = Callable[[Tensor], Tensor]


def sides(weight: Tensor) -> dict[str, Side]:
    int8, int4 = quantize(weight, 8), quantize(weight, 4)
    ours8, ours4, ours32 = QuantizedWeight(int8, None), QuantizedWeight(int4, None), pack_weight(weight, None)
    half, scales = weight.bfloat16(), int8.scales.flatten().bfloat16()
    assert int4.minima is not None
    numbers = torch.stack((int4.values & 15, int4.values >> 4), -1).view(weight.shape).to(torch.int32)
    # torch's zero is the middle of the sixteen numbers
    of_groups = torch.stack((int4.scales, int4.minima + 8 * int4.scales), -1).transpose(0, 1).contiguous().bfloat16()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
    prepacked = torch.ops.quantized.linear_prepack(
        torch.quantize_per_channel(
            weight, int8.scales.flatten().double(), torch.zeros(len(weight), dtype=torch.long), 0, torch.qint8
        ),
        None,
    )
    return {
        "float32, ours": ours32,
        "float32, torch": lambda rows: functional.linear(rows, weight),
        "bfloat16, torch": lambda rows: functional.linear(rows.bfloat16(), half),
        "int8, ours": ours8,
        "int8, torch, weights alone": lambda rows: torch.ops.aten._weight_int8pack_mm(
            rows.bfloat16(), int8.values, scales
        ),
        "int8, torch, dynamic": lambda rows: torch.ops.quantized.linear_dynamic(rows, prepacked),
        "int4, ours": ours4,
        "int4, torch": lambda rows: torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows.bfloat16(), packed, int4.group, of_groups
        ),
        "int4, dequantised": lambda rows: functional.linear(rows, dequantize(int4)),
    }


def microseconds(side: Side, rows: Tensor) -> float:
    began = time.perf_counter()
    side(rows)
    return 1e6 * (time.perf_counter() - began)


def depends_on_rows(side: Side, rows: Tensor) -> bool:
    """Whether the first rows alone have other bits than together with the others."""
    whole = side(rows)
    return any(not torch.equal(whole[:count], side(rows[:count])) for count in (1, 2, 3, 5, 8, 17))


def main() -> None:
    parser = argparse.ArgumentParser(description="Our products with quantised weights against torch's.")
    parser.add_argument("--inputs", type=int, default=2048)
    parser.add_argument("--outputs", type=int, default=8192)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(3)
    weight = torch.randn(asked.outputs, asked.inputs) * asked.inputs**-0.5
    found = sides(weight)
    rows = torch.randn(64, asked.inputs)
    exact = functional.linear(rows.double(), weight.double())
    times: dict[tuple[str, int], list[float]] = {}
    for count in asked.rows:
        given = torch.randn(count, asked.inputs)
        for side in found.values():
            side(given)
        for _ in range(asked.rounds):
            for name, side in found.items():
                times.setdefault((name, count), []).append(microseconds(side, given))
    print(f"{asked.outputs} x {asked.inputs}, {asked.threads} thread(s), microseconds")
    print("| side | " + " | ".join(f"{count} rows" for count in asked.rows) + " | error | a row depends on others |")
    print("| --- |" + " --- |" * (len(asked.rows) + 2))
    for name, side in found.items():
        figures = " | ".join(f"{statistics.median(times[name, count]):,.0f}" for count in asked.rows)
        error = ((side(rows).double() - exact).norm() / exact.norm()).item()
        print(f"| {name} | {figures} | {error:.4f} | {'yes' if depends_on_rows(side, rows) else 'no'} |")


if __name__ == "__main__":
    main()

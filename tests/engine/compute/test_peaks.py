"""What is told of a model's cost is what torch counts, and the peak of a machine is measured."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from engine.compute.peaks import find_cost, measure_peak
from engine.compute.probe import observe
from tests.fakes.tiny_models import CONTEXT, make_module, random_ids

TOKENS = 24


@pytest.mark.parametrize(
    ("kind", "share"),
    [("llama", 1.0), ("qwen2", 1.0), ("mixtral", 0.5)],
)
def test_the_flops_of_a_model_are_those_that_torch_counts_and_each_weight_is_read_once(kind: str, share: float) -> None:
    module = make_module(kind)
    module.set_attn_implementation("eager")  # else it does not see what a kernel does
    if share != 1.0:
        module.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        module(input_ids=torch.tensor([random_ids(TOKENS, seed=1)]), use_cache=False)
    with torch.inference_mode():
        shape, windows, _ = observe(module, CONTEXT)
    cost = find_cost(module, shape, windows)
    assert cost is not None
    # It counts every pair of tokens, and every row.
    pairs = TOKENS * TOKENS * sum(cost.windows.values())
    own = 2 * TOKENS * (cost.token_params + cost.row_params) + pairs * cost.pair_flops
    assert own == pytest.approx(counter.get_total_flops(), rel=0.03)
    head = module.get_output_embeddings().weight
    tables = [one.weight for one in module.modules() if isinstance(one, torch.nn.Embedding)]
    looked_up = sum(one.nbytes for one in tables if one is not head)
    whole = cost.weight_bytes + cost.expert_bytes + cost.row_bytes + looked_up
    assert whole == sum(one.nbytes for one in module.parameters())
    assert (cost.expert_share, bool(cost.expert_bytes)) == (share, share != 1.0)


def test_a_machine_is_measured_in_a_moment() -> None:
    peak = measure_peak(torch.device("cpu"), torch.float32, 1)
    assert peak.flops_per_s > 1e7
    assert peak.bytes_per_s > 1e7

"""Linear layers in the layout that oneDNN computes fastest with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import nn

_ONEDNN: Final = torch.ops.mkldnn
_QUICK: Final[dict[torch.dtype, Callable[[], bool]]] = {
    torch.float32: lambda: True,
    torch.bfloat16: _ONEDNN._is_mkldnn_bf16_supported,  # noqa: SLF001 - what torch.compile asks too
    torch.float16: _ONEDNN._is_mkldnn_fp16_supported,  # noqa: SLF001
}


def has_onednn() -> bool:
    """Whether this torch computes with oneDNN on the CPU."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def is_quick(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for the dtype. Slow types are better computed in float32."""
    return _QUICK[dtype]()


def pack(module: nn.Module) -> int:
    """Replaces linear layers. Returns how many."""
    return 0

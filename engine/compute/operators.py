"""Operators of torch that are not public: found by name, and missed with a message instead of an error.

torch may rename them in any version. engine/compute/linear.py and engine/compute/flash.py ask, and take a slower way
where one is missing. The range of versions that they were seen in is in pyproject.toml.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

log = logging.getLogger(__name__)


@functools.cache
def find_operator(name: str, overload: str = "default") -> Any | None:
    """The overload of `namespace::name`; None where this torch has none, which is said once in the log."""
    namespace, _, plain = name.partition("::")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), plain), overload)
    except AttributeError:
        log.warning(
            "torch %s has no operator %s.%s: a slower way is taken (pyproject.toml has the versions that have it)",
            torch.__version__,
            name,
            overload,
        )
        return None

"""Additive attention masks, cut as views from templates instead of being built for every step."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

TILE_ROWS: Final = 128  # positions of a tile: rows that are computed together where masks or bits matter. On some
# processors (AMD EPYC) the library behind torch's kernel splits sums over 208 keys and more in two
KEY_MULTIPLE: Final = 16  # keys that fill a vector of the processor


class MaskTemplates:
    """Additive causal masks, cut as views from one template per window.

    A mask depends only on (key position - query position), so the mask of any rows over any keys is a rectangle of
    one large template. The template grows by doubling, up to the longest context that was seen.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._templates: dict[int | None, Tensor] = {}

    def mask(self, start: int, rows: int, keys: int, window: int | None) -> Tensor:
        """(rows, keys) view: 0 where the query at start + row attends to the key, -inf elsewhere.

        window  a query attends to the last `window` positions, its own included; None is all of them
        """
        template = self._templates.get(window)
        reach = template.shape[1] - TILE_ROWS - KEY_MULTIPLE if template is not None else 0
        if template is None or start > reach:
            reach = max(2 * reach, start, 1024)
            template = self._templates[window] = self._make(reach, window)
        shift = reach - start
        return template[:rows, shift : shift + keys]

    def _make(self, reach: int, window: int | None) -> Tensor:
        width = reach + TILE_ROWS + KEY_MULTIPLE
        distance = torch.arange(width, device=self._device) - torch.arange(TILE_ROWS, device=self._device)[:, None]
        hidden = distance > reach
        if window is not None:
            hidden |= distance <= reach - window
        zeros = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return zeros.masked_fill_(hidden, float("-inf"))

"""How likely a candidate's answer is the right one: a logistic of four parameters, fitted to labels and to a prior.

Pure. budget.py brings the labels. The prior is worth 1,000 of them, so that it neither starts blind nor stays with what
other traffic taught; as labels come in, they take over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

PRIOR: Final = (-4.0, 2.0, 0.5, 1.0)
"""What the evidence says before any label. More cautious than most pairs are."""

PRIOR_LABELS: Final = 1000.0
NEWTON_STEPS: Final = 12
NO_NEIGHBOUR: Final = 0.5
"""Similarity of the nearest neighbour with another answer, where there is none."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What speaks for a candidate.

    similarity  cosine of the two questions
    overlap     words of content that they share, of all that they have: 0 to 1
    margin      how much nearer it is than the nearest neighbour with another answer
    """

    similarity: float
    overlap: float
    margin: float

    def row(self) -> tuple[float, float, float, float]:
        """Inputs of the model, about as large as each other."""
        distance = max(1.0 - self.similarity, 0.001) + 0.005
        return 1.0, -math.log(distance), 3.0 * self.overlap, 5.0 * self.margin


def logistic(values: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-np.clip(values, -30.0, 30.0)))


def fit(rows: Floats, same: Floats, weights: Floats) -> Floats:
    """Parameters under which these labels, and those of the prior, are likeliest.

    rows     (labels, 4)
    same     (labels,)  1.0 where the answer was the right one
    weights  (labels,)  how many requests like it each stands for
    """
    x = np.concatenate([_PRIOR_ROWS, rows])
    y = np.concatenate([_PRIOR_SAME, same])
    w = np.concatenate([_PRIOR_WEIGHTS, weights])
    prior = np.array(PRIOR)
    parameters = prior.copy()
    for _ in range(NEWTON_STEPS):
        p = logistic(x @ parameters)
        gradient = x.T @ (w * (y - p)) - (parameters - prior)
        hessian = (x * (w * p * (1.0 - p))[:, None]).T @ x + np.eye(len(prior))
        step = np.linalg.solve(hessian, gradient)
        size = float(np.abs(step).max())
        parameters += step / max(size, 1.0)  # full steps overshoot where labels leave no doubt
        if size < 1e-4:
            break
    return parameters


def _made_up() -> tuple[Floats, Floats, Floats]:
    """Labels of the prior: evidence of all kinds, as often right as it says."""
    rows = np.array(
        [
            Evidence(similarity, overlap, margin).row()
            for similarity in (0.62, 0.7, 0.78, 0.84, 0.88, 0.91, 0.94, 0.96, 0.98, 0.995)
            for overlap in (0.1, 0.4, 0.7, 1.0)
            for margin in (0.0, 0.1, 0.3)
        ]
    )
    return rows, logistic(rows @ np.array(PRIOR)), np.full(len(rows), PRIOR_LABELS / len(rows))


_PRIOR_ROWS, _PRIOR_SAME, _PRIOR_WEIGHTS = _made_up()

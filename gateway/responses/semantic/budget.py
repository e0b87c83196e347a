"""How sure a hit has to be so that wrong ones stay under the bound that the operator stated, learned while it serves.

Pure: chance is injected, time is counted in requests. space.py tells it of every request and of every judgement.

    label  whether a candidate's answer was the right one. Every miss with a near neighbour gives one for nothing, when
           its own answer is there; of hits a part is audited, and each of those stands for `weight` hits
    bar    the least probability that is a hit: the lowest under which neither the last 1,500 nor the last 500 requests
           would have had more wrong hits than is aimed at, by what was counted and by what the model expects
    exact  requests whose question was looked up before and that the exact cache answered: they are requests, too
    spent  weights of the wrong hits, all together. Near the bound nothing is a hit until there are more requests

How likely an answer is the right one is a logistic of four parameters, fitted to labels and to a prior. The prior is
worth 1,000 of them, so that it neither starts blind nor stays with what other traffic taught; as labels come in, they
take over.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
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

REFIT_LABELS: Final = 100
MAX_LABELS: Final = 4000
WINDOWS: Final = (1500, 500)
AIM: Final = 0.8
"""Share of the bound that is aimed at."""

CLOSED_FROM: Final = 0.8
"""Share of the bound, over all requests so far, from which on nothing is a hit."""

MAX_EXACT: Final = 0.25
"""Requests that the exact cache answered, for each that was looked up, that count at most: however often one
question is repeated, what is looked up is wrong in no more than 1.25 times the bound."""

Z: Final = 1.96
"""Of a two-sided interval of 95%."""


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


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a candidate.

    audit   the hit is compared with a fresh answer; it then stands for `weight` hits
    """

    probability: float
    hit: bool
    audit: bool = False
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Since the start; shares are of hits, and of requests.

    requests       that were looked up, and `exact` ones
    wrong_share    of hits, estimated from audits; low and high are the ends of its Wilson interval of 95%, for as many
                   audits as their weights are worth (Kish)
    wrong_requests the same as a share of requests: what the bound is about
    """

    requests: int
    exact: int
    hits: int
    audits: int
    labels: int
    wrong_share: float
    wrong_share_low: float
    wrong_share_high: float
    wrong_requests: float
    wrong_requests_high: float
    bar: float
    closed: bool


@dataclass(slots=True)
class _Label:
    """request  number of requests at that time"""

    request: int
    row: tuple[float, ...]
    same: bool
    weight: float


class Budget:
    """Of the requests of one owner to one model, in one gateway. Gateways that each keep to the bound do together."""

    def __init__(self, bound: float, *, audit_share: float, random: Callable[[], float]) -> None:
        """bound        wrong hits, as a share of requests
        audit_share  audits, as a share of requests, about; unlikely hits are audited on top
        random       a number from 0 to 1, evenly distributed
        """
        self._bound = bound
        self._audit_share = audit_share
        self._random = random
        self._labels: deque[_Label] = deque(maxlen=MAX_LABELS)
        self._seen: deque[tuple[int, tuple[float, ...]]] = deque(maxlen=max(WINDOWS))
        self._parameters: Floats = np.array(PRIOR)
        self._bar = self._first_bar
        self._unfitted = 0
        self._requests = self._exact = self._hits = self._audits = 0
        self._spent = self._weights = self._squares = 0.0

    def count(self) -> None:
        """One more request that a hit could have answered."""
        self._requests += 1

    def count_exact(self) -> None:
        """One more that the exact cache answered, and that would have been looked up."""
        if self._exact < MAX_EXACT * (self._requests - self._exact):
            self._requests += 1
            self._exact += 1

    def decide(self, evidence: Evidence, *, counts: bool = True) -> Verdict:
        """What becomes of the best candidate of a request: the one that was counted last, or one that is not counted,
        and whose hit is not audited."""
        if counts:
            self._seen.append((self._requests, evidence.row()))
        probability = float(logistic(np.array(evidence.row()) @ self._parameters))
        hit = probability >= self._bar and not self.closed
        if not hit or not counts:
            return Verdict(probability, hit)
        evenly = self._audit_share * self._requests / max(self._hits, 1)
        share = min(1.0, max(evenly, 1.0 - probability))
        return Verdict(probability, hit=True, audit=self._random() < share, weight=1.0 / share)

    def given(self) -> None:
        """A hit was given to its client."""
        self._hits += 1

    @property
    def closed(self) -> bool:
        return self._spent > CLOSED_FROM * self._bound * self._requests

    def learn(self, evidence: Evidence, same: bool, *, weight: float | None = None) -> None:
        """A judgement: of an audited hit with its weight, or of a miss."""
        if weight is not None:
            self._audits += 1
            self._weights += weight
            self._squares += weight * weight
            self._spent += 0.0 if same else weight
        self._labels.append(_Label(self._requests, evidence.row(), same, weight or 1.0))
        self._unfitted += 1
        wrong_hit = weight is not None and not same
        if self._unfitted >= REFIT_LABELS or wrong_hit:
            self._refit()

    def figures(self) -> Figures:
        share = self._spent / self._weights if self._weights else 0.0
        low, high = _wilson(share, self._weights * self._weights / self._squares if self._squares else 0.0)
        hit_share = self._hits / max(self._requests, 1)
        return Figures(
            self._requests,
            self._exact,
            self._hits,
            self._audits,
            len(self._labels),
            share,
            low,
            high,
            share * hit_share,
            high * hit_share,
            self._bar,
            self.closed,
        )

    @property
    def _first_bar(self) -> float:
        """Before anything is known: hits are a quarter of requests, or fewer."""
        return 1.0 - 4.0 * min(self._bound, 0.1)

    def _refit(self) -> None:
        self._unfitted = 0
        rows = np.array([label.row for label in self._labels])
        same = np.array([label.same for label in self._labels], dtype=np.float64)
        weights = np.array([label.weight for label in self._labels])
        self._parameters = fit(rows, same, weights)
        ages = self._requests - np.array([label.request for label in self._labels])
        labelled = logistic(rows @ self._parameters), weights * (1.0 - same), ages
        seen_ages = self._requests - np.array([request for request, _ in self._seen])
        seen = logistic(np.array([row for _, row in self._seen]).reshape(-1, len(PRIOR)) @ self._parameters), seen_ages
        self._bar = max(self._lowest_bar(window, labelled, seen) for window in WINDOWS)

    def _lowest_bar(self, window: int, labelled: tuple[Any, Any, Any], seen: tuple[Any, Any]) -> float:
        """labelled  probabilities, weights of wrong answers, ages in requests
        seen      probabilities and ages of all candidates
        """
        bars = -np.sort(-seen[0][seen[1] < window])
        if not len(bars):
            return self._first_bar
        expected = np.cumsum(1.0 - bars)
        recent = labelled[2] < window
        order = np.argsort(-labelled[0][recent])
        counted = np.concatenate([[0.0], np.cumsum(labelled[1][recent][order])])
        counted = counted[np.searchsorted(-labelled[0][recent][order], -bars, side="right")]
        # Few requests are taken for a third of a window: what the first ones showed may be chance.
        allowed = AIM * self._bound * min(window, max(self._requests, window / 3))
        over = np.flatnonzero((counted + expected) / 2 > allowed)
        return float(bars[over[0]]) + 1e-9 if len(over) else min(float(bars[-1]), self._first_bar)

    def to_state(self) -> dict[str, Any]:
        """For JSON: what a gateway that starts again goes on with."""
        labels = [asdict(label) for label in self._labels]
        return {
            "labels": labels,
            "counts": [self._requests, self._exact, self._hits, self._audits],
            "sums": [self._spent, self._weights, self._squares],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `to_state` wrote. Raises ValueError for anything else, and stays as it was."""
        try:
            labels = [_Label(**label) for label in state["labels"]]
            requests, exact, hits, audits = (int(count) for count in state["counts"])
            sums = [float(value) for value in state["sums"]]
            if not np.isfinite([*sums, *(value for label in labels for value in (*label.row, label.weight))]).all():
                raise ValueError("a number is not finite")
            if any(len(label.row) != len(PRIOR) for label in labels):
                raise ValueError("a label has other evidence")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the state of a budget cannot be read: {error}") from error
        self._labels = deque(labels, maxlen=MAX_LABELS)
        self._requests, self._exact, self._hits, self._audits = requests, exact, hits, audits
        self._spent, self._weights, self._squares = sums
        if labels:
            self._seen.extend((label.request, label.row) for label in labels[-max(WINDOWS) :])
            self._refit()


def _wilson(share: float, count: float) -> tuple[float, float]:
    """Ends of the interval for a share that was found among so many; 0 to 1 for none."""
    if count <= 0:
        return 0.0, 1.0
    square = Z * Z / count
    middle = (share + square / 2) / (1 + square)
    half = Z / (1 + square) * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return max(middle - half, 0.0), min(middle + half, 1.0)

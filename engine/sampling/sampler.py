"""Chooses the next token of many rows of logits at once.

A row is a position of a sequence: its settings, and the tokens before it. What is drawn depends on the row's logits,
its settings and a random number made of nothing but seed and position (a counter-based generator), so the same seed
gives the same text whatever else is in the batch and wherever the sequence was preempted. A request without a seed
draws from the process's own generator.

Order of operations: logit bias, repetition penalty, penalties over generated tokens, what a grammar forbids, what may
not come yet (min_tokens), temperature, top-k, top-p, min-p, one draw in the order of ids. Where the filters are sure to
keep only some of the CANDIDATES highest logits nothing else is looked at. Log probabilities are those of the model's
own distribution, before all of these. Knows tensors of logits and sequences; its neighbour is
engine/compute/runner.py.
"""

from __future__ import annotations

import logging
from array import array
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from engine.compute.batch import scored_positions
from engine.protocol import TokenLogprobs
from engine.sampling.grammar_worker import Masks
from engine.sequence import NOT_FINITE, ROW_FAILED, Sequence, Step

log = logging.getLogger(__name__)

CANDIDATES: Final = 256  # highest logits of a row that top-k, top-p and min-p look at first
_SEED_BITS: Final = (1 << 64) - 1
_STREAM: Final = 0x6B7661736972  # the generator's second key word: our own stream of every seed
_STRIDES: Final = 16  # tokens of one column in `highest_of`
_CHUNK: Final = 512  # weights that are added up in float32
_SCRATCH: Final = 1 << 17  # logits whose weights are computed at a time
_LEAST_TEMPERATURE: Final = 1e-30  # in float32, where it is not 0


@dataclass(slots=True)
class Row:
    """A position whose token is chosen: the one behind the sequence's tokens and those drafted for it.

    logprobs  of the chosen token, once there is one, if the sequence wants them
    """

    sequence: Sequence
    drafted: tuple[int, ...] = ()
    logprobs: TokenLogprobs | None = None

    @property
    def may_not_end(self) -> bool:
        """Whether the tokens that end the sequence are forbidden here."""
        s = self.sequence
        return s.num_generated + len(self.drafted) < s.sampling.min_tokens and bool(s.end_ids)

    @property
    def is_plain(self) -> bool:
        """Whether nothing but a mask changes its logits."""
        s = self.sequence.sampling
        penalties = s.presence_penalty != 0 or s.frequency_penalty != 0 or s.repetition_penalty != 1
        return not (penalties or s.logit_bias or self.may_not_end)

    def tokens(self, start: int = 0) -> npt.NDArray[np.int64]:
        """Those before it, from `start` on. A copy: the sequence's grow."""
        return np.array(self.sequence.tokens[start:] + array("I", self.drafted), np.int64)


class Sampler:
    """Stateless but for the generator that serves requests without a seed."""

    def __init__(self) -> None:
        self._unseeded = np.random.default_rng()

    def choose(self, logits: Tensor, rows: list[Row], masks: Masks | None = None) -> list[int]:
        """One token id for each row, and its `logprobs`; NOT_FINITE where no logit of a row is the highest, what stands
        in place of a mask, ROW_FAILED where an error is that row's alone.

        logits  (num_rows, vocab_size), any floating dtype; left as they are
        """
        masks = masks or {}
        try:
            return self._choose(logits, rows, masks)
        except Exception:
            if len(rows) > 1:  # each for itself
                own = [{0: masks[i]} if i in masks else None for i in range(len(rows))]
                return [self.choose(logits[i : i + 1], rows[i : i + 1], mask)[0] for i, mask in enumerate(own)]
            log.exception("sampling failed (request %s)", rows[0].sequence.request_id or "-")
            return [ROW_FAILED]

    def _choose(self, logits: Tensor, rows: list[Row], masks: Masks) -> list[int]:
        # 1. The highest logit: of most greedy rows it is the answer.
        settings = [row.sequence.sampling for row in rows]
        found, finite = highest(logits)
        tokens = [found[i] if finite[i] else NOT_FINITE for i in range(len(rows))]
        tokens = [m if isinstance(m := masks.get(i), int) and t >= 0 else t for i, t in enumerate(tokens)]
        # 2. The others have bias, penalties or masks, or are drawn.
        left = [i for i, token in enumerate(tokens) if token >= 0]
        greedy = [i for i in left if settings[i].temperature <= 0 and (i in masks or not rows[i].is_plain)]
        drawn = [i for i in left if settings[i].temperature > 0]
        for group in filter(None, (greedy, drawn)):
            edited = (logits if len(group) == len(rows) else logits[group]).float()
            if not all(rows[i].is_plain and i not in masks for i in group):
                edited = edited.clone() if edited is logits else edited
                edit(edited, [rows[i] for i in group], {at: masks[i] for at, i in enumerate(group) if i in masks})
                found, finite = highest(edited)
                if not all(finite):
                    raise ValueError("no token is left that may come")
            if group is drawn:
                controls = torch.tensor([self._controls(rows[i]) for i in group], dtype=torch.float64)
                found = draw(edited, controls.to(logits.device)).tolist()
            for index, token in zip(group, found, strict=True):
                tokens[index] = token
        # 3. Log probabilities.
        asked = {i: one.logprobs for i, one in enumerate(settings) if tokens[i] >= 0 and one.logprobs is not None}
        if asked:
            told = find_logprobs(logits[list(asked)], [tokens[i] for i in asked], list(asked.values()))
            for index, logprobs in zip(asked, told, strict=True):
                rows[index].logprobs = logprobs
        return tokens

    def _controls(self, row: Row) -> tuple[float, float, float, float, float]:
        s, position = row.sequence.sampling, row.sequence.num_tokens + len(row.drafted)
        random = float(self._unseeded.random()) if s.seed is None else uniform(s.seed, position)
        return s.temperature, s.top_k, s.top_p, s.min_p, random


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on the seed and the position alone (Philox 4x64)."""
    key = np.array([seed & _SEED_BITS, _STREAM], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=position)).random())


def highest(logits: Tensor) -> tuple[list[int], list[bool]]:
    """The first token of the highest logit in each row, and whether that logit is finite: it is NaN where any is.

    logits  (num_rows, vocab_size), any floating dtype
    """
    if logits.device.type == "cpu":  # numpy's search is several times as quick as torch's there
        rows = logits.float().numpy()
        choice = rows.argmax(-1)
        return choice.tolist(), np.isfinite(rows[np.arange(len(rows)), choice]).tolist()
    values, indices = logits.max(-1)
    return indices.tolist(), values.isfinite().tolist()


def highest_of(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest of each row, and their ids: Tensor.topk in half the time. Of equals it is not said which.

    logits  (num_rows, vocab_size) float32
    """
    width = logits.shape[1] // _STRIDES
    if width <= 2 * count:
        return logits.topk(min(count, logits.shape[1]))
    # They are in the columns with the highest maxima, or behind all columns.
    whole = torch.arange(width * _STRIDES, device=logits.device).view(_STRIDES, width)
    columns = logits[:, : whole.numel()].view(-1, _STRIDES, width).amax(1).topk(count, sorted=False).indices
    rest = torch.arange(whole.numel(), logits.shape[1], device=logits.device).expand(len(logits), -1)
    ids = torch.cat(((columns[:, None] + whole[:, :1]).flatten(1), rest), 1)
    values, at = logits.gather(1, ids).topk(count)
    return values, ids.gather(1, at)


# -- bias, penalties, masks -------------------------------------------------------------------------------------------


def edit(logits: Tensor, rows: list[Row], masks: Masks) -> None:
    """Changes logits, (num_rows, vocab_size) float32, in place."""
    for values, row in zip(logits, rows, strict=True):
        if not row.is_plain:
            penalise(values, row)
    if masks:  # arithmetic takes a fraction of what branches on each bit take
        limits = torch.from_numpy(np.stack(list(masks.values()))).to(logits).sub_(0.5).mul_(torch.inf)
        logits[list(masks)] = logits[list(masks)].minimum(limits)
    for values, row in zip(logits, rows, strict=True):
        if row.may_not_end:
            ends = torch.tensor([t for t in row.sequence.end_ids if t < len(values)], device=logits.device).long()
            before = values[ends]
            values[ends] = -torch.inf
            if values.max() == -torch.inf:  # nothing else can come: the sequence, or its grammar's text, is complete
                values[ends] = before


def penalise(logits: Tensor, row: Row) -> None:
    """Bias and penalties, in place. Token ids beyond the vocabulary are left out.

    A token of prompt or answer has its logit divided by repetition_penalty, or multiplied when below 0 (Keskar et al.,
    2019). For those of the answer alone: - frequency * count - presence.

    logits  (vocab_size,) float32
    """
    sampling, size = row.sequence.sampling, len(logits)
    for token, bias in sampling.logit_bias:
        if 0 <= token < size:
            logits[token] += bias
    if (penalty := sampling.repetition_penalty) != 1:
        tokens = row.tokens()
        seen = torch.from_numpy(tokens[tokens < size]).to(logits.device)
        values = logits[seen]
        # A token that comes twice is written twice, with the same value.
        logits[seen] = torch.where(values < 0, values * penalty, values / penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        tokens, counts = np.unique(row.tokens(row.sequence.num_prompt), return_counts=True)
        less = sampling.frequency_penalty * counts[tokens < size] + sampling.presence_penalty
        logits[torch.from_numpy(tokens[tokens < size]).to(logits.device)] -= torch.from_numpy(less).to(logits)


# -- draws ------------------------------------------------------------------------------------------------------------


def draw(logits: Tensor, controls: Tensor) -> Tensor:
    """One token of each row after temperature, top-k, top-p and min-p, (num_rows,).

    top-k keeps every token that is as likely as the k-th; top-p keeps the shortest run of most likely tokens that adds
    up to top_p of these, of equals the first; min-p keeps those that are at least min_p times as likely as the
    likeliest, which is always kept. The draw is the inverse of the cumulative distribution, in the order of ids.

    logits    (num_rows, vocab_size) float32, the highest of each row finite
    controls  (num_rows, 5) float64: temperature above 0, top_k, top_p, min_p, and a random number in [0, 1)
    """
    tokens = torch.full((len(logits),), -1, device=logits.device)
    filtered = (controls[:, 1:4] != controls.new_tensor([0, 1, 0])).any(1)
    ways = *((filtered, count) for count in (CANDIDATES, 16 * CANDIDATES, logits.shape[1])), (~filtered, None)
    for wanted, count in ways:
        if len(rows := (wanted & (tokens < 0)).nonzero()[:, 0]):
            own = logits if len(rows) == len(logits) else logits[rows]
            tokens[rows] = _draw_best(own, controls[rows], count) if count else _draw_any(own, controls[rows])
    return tokens


def _draw_best(logits: Tensor, controls: Tensor, count: int) -> Tensor:
    """Looks at so many candidates only; -1 for rows of which others may be kept, too.

    Which rows these are, and what is drawn, must not depend on how equal logits are ordered, nor on other rows: those
    that are equal to the lowest candidate do not count, unless there are no others.
    """
    temperature, top_k, top_p, min_p, random = controls[..., None].unbind(1)
    # 1. The highest first, of equals the first.
    is_whole = count >= logits.shape[1]
    values, ids = logits, torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    if not is_whole:
        values, ids = highest_of(logits, count)
        ids, order = ids.sort(-1)
        values = values.gather(1, order)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    lowest, count = values[:, -1:], values.shape[1]
    wide = values.double()
    weights = ((wide - wide[:, :1]) / temperature).exp()
    # 2. Each filter keeps some; a row is settled by one that keeps nothing as low as the lowest.
    kth = values.gather(1, top_k.long().clamp(1, count) - 1)
    by_k = (top_k > 0) & (top_k <= count) & (kth > lowest) | is_whole
    kept = ((values > lowest) | is_whole) & ((values >= kth) | (top_k <= 0))
    total = (weights * kept).sum(-1, keepdim=True)
    if len(rows := ((top_p < 1) & ~by_k)[:, 0].nonzero()[:, 0]):
        total[rows] = _weigh_chunks(logits[rows], values[rows, :1], temperature[rows]).sum(-1, keepdim=True)
    reached = (weights * kept).cumsum(-1)
    goal = top_p * total
    kept &= (functional.pad(reached[:, :-1], (1, 0)) < goal) | (top_p >= 1)
    kept &= weights >= min_p
    by_p_or_m = (top_k <= 0) & ((top_p < 1) & (reached[:, -1:] >= goal) | (weights[:, -1:] < min_p))
    settled = (values[:, :1] > lowest) & (by_k | by_p_or_m) | is_whole
    kept[:, 0] = True
    # 3. One draw, in the order of ids.
    by_id = torch.zeros_like(weights).scatter_(1, order, weights * kept)
    return ids.gather(1, _search(by_id, random)[0]).where(settled, -1)[:, 0]


def _draw_any(logits: Tensor, controls: Tensor) -> Tensor:
    """Of the whole vocabulary: first the chunk, then the token in it."""
    highest, temperature = logits.amax(-1, keepdim=True), controls[:, :1]
    chunk, random = _search(_weigh_chunks(logits, highest, temperature), controls[:, 4:])
    ids, size = chunk * _CHUNK + torch.arange(_CHUNK, device=logits.device), logits.shape[1]
    own = logits.gather(1, ids.clamp(max=size - 1)).where(ids < size, -torch.inf)
    index, _ = _search(_weigh(own, highest, temperature).double(), random)
    return (chunk * _CHUNK + index)[:, 0]


def _weigh_chunks(logits: Tensor, highest: Tensor, temperature: Tensor) -> Tensor:
    """The weights of each _CHUNK tokens of a row together, (num_rows, num_chunks) float64. A few rows at a time: the
    processor's cache has them from the first operation to the last."""
    few, chunks = max(1, _SCRATCH // logits.shape[1]), logits.shape[1] // _CHUNK
    sums = []
    for first in range(0, len(logits), few):
        own = slice(first, first + few)
        weights = _weigh(logits[own], highest[own], temperature[own])
        whole = weights[:, : chunks * _CHUNK].view(len(weights), chunks, _CHUNK).sum(-1)
        sums.append(torch.cat((whole, weights[:, chunks * _CHUNK :].sum(-1, keepdim=True)), 1))
    return torch.cat(sums).double()


def _weigh(logits: Tensor, highest: Tensor, temperature: Tensor) -> Tensor:
    """exp((logits - highest) / temperature), float32."""
    return (logits - highest).div_(temperature.float().clamp(min=_LEAST_TEMPERATURE)).exp_()


def _search(weights: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """The first index of each row at which more than `random` of the sum is reached, and the share of its own weight at
    which that is. One of weight 0 is never found.

    weights  (num_rows, count) float64; random, as what is returned, (num_rows, 1)
    """
    reached = weights.cumsum(-1)
    total = reached[:, -1:].contiguous()
    last = torch.searchsorted(reached, total)  # where rounding goes past the end
    index = torch.searchsorted(reached, random * total, right=True).minimum(last)
    own = weights.gather(1, index)
    return index, ((random * total - reached.gather(1, index) + own) / own).clamp_(0, 1)


# -- log probabilities ------------------------------------------------------------------------------------------------

LEAST: Final = -9999.0
"""In place of minus infinity, which JSON does not have; OpenAI's number for the same."""

_DIGITS: Final = 6  # behind the point: float32 knows no more of them


def find_logprobs(logits: Tensor, tokens: list[int], counts: list[int]) -> list[TokenLogprobs]:
    """For each row the token's log probability, and those of the `counts` likeliest tokens.

    logits  (num_rows, vocab_size), any floating dtype; left as they are
    tokens  one id for each row, below vocab_size
    """
    found = logits.float().log_softmax(-1)
    chosen = found.gather(1, torch.tensor(tokens, device=found.device)[:, None])[:, 0].tolist()
    values, ids = highest_of(found, max(counts))
    rows = zip(chosen, counts, ids.tolist(), values.tolist(), strict=True)
    return [
        TokenLogprobs(_plain(own), tuple(zip(best[:count], map(_plain, highest[:count]), strict=True)))
        for own, count, best, highest in rows
    ]


def note_prompt_logprobs(logits: Tensor, step: Step) -> set[Sequence]:
    """Appends to the sequences' `prompt_logprobs`. Returns those for which that failed.

    logits  (num_scored, vocab_size), of the rows of engine/compute/batch.py's `scored`, in that order
    """
    row, failed = 0, set[Sequence]()
    for work in step.work:
        if positions := scored_positions(work):
            sequence, count = work.sequence, work.sequence.sampling.prompt_logprobs or 0
            tokens = list(sequence.tokens[positions.start + 1 : positions.stop + 1])
            rows = logits[row : row + len(positions)]
            try:
                sequence.prompt_logprobs += find_logprobs(rows, tokens, [count] * len(positions))
            except Exception:
                log.exception("log probabilities of a prompt failed (request %s)", sequence.request_id or "-")
                failed.add(sequence)
            row += len(positions)
    return failed


def _plain(logprob: float) -> float:
    return round(max(logprob, LEAST), _DIGITS)

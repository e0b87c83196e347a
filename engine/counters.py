"""What an engine did since its start: the scheduler's figures in /v1/stats."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.protocol import FinishReason


@dataclass(slots=True)
class Counters:
    """What happened since the start; sequences, tokens or events, as the name says."""

    submitted: int = 0
    refused: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})
    not_finite: int = 0
    failed_rows: int = 0  # sequences that an error of their own ended, in a step that went on with the others
    preemptions: int = 0
    shared_waits: int = 0  # times a waiting sequence was passed over while another computed their common prefix
    shared_tokens: int = 0  # of cached_tokens, those that another computed after the sequence had arrived
    masks_late: int = 0  # rows that were computed and not sampled from, because their grammar's mask was not there
    forks: int = 0  # sequences that took the prompt of a sibling, and computed nothing of it
    copied_blocks: int = 0  # that were shared when one of their sequences wrote into them
    steps: int = 0  # those that were given up among them
    steps_given_up: int = 0  # because somebody came to the online lane
    prompt_tokens: int = 0  # of sequences at their first admission
    cached_tokens: int = 0  # of those, reused
    prefilled_tokens: int = 0  # computed, recomputation after preemption included
    decoded_tokens: int = 0

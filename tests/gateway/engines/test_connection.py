"""Updates that wait for their consumer are merged, and lose nothing."""

from __future__ import annotations

from engine.protocol import SequenceUpdate, TokenLogprobs
from gateway.engines.connection import Stream


async def test_updates_that_waited_are_taken_as_one_with_all_their_log_probabilities() -> None:
    stream = Stream(1, 10)
    found = [TokenLogprobs(-float(token), ()) for token in range(3)]
    stream.push(SequenceUpdate(1, [0], logprobs=[found[0]]))
    stream.push(SequenceUpdate(1, [1, 2], logprobs=found[1:]))
    stream.push(SequenceUpdate(1, finish="stop", stop_id=9))
    update = await stream.take()
    assert (update.tokens, update.logprobs, update.finish) == ([0, 1, 2], found, "stop")


async def test_without_log_probabilities_there_are_none() -> None:
    stream = Stream(1, 10)
    stream.push(SequenceUpdate(1, [0]))
    stream.push(SequenceUpdate(1, [1]))
    assert (await stream.take()).logprobs is None

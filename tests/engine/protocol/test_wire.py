"""Messages as bytes, and back."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import Abort, BlockEvents, Hello, ProtocolError, Submit, Taker, decode, encode
from tests.fakes.messages import SOME, counts, events, frames, hellos, submits


@given(st.one_of(submits, st.builds(Abort, seq=counts), frames, events, hellos))
def test_decode_is_the_inverse_of_encode(message: Any) -> None:
    assert decode(encode(message)) == message


@given(submits, st.integers(0, 400))
def test_a_submit_cut_short_is_refused_or_loses_whole_digests_only(submit: Submit, cut: int) -> None:
    data = encode(submit)
    try:
        message = decode(data[: max(0, len(data) - cut)])
    except ProtocolError:
        return
    assert isinstance(message, Submit)
    assert message.tokens == submit.tokens
    assert submit.digests.startswith(message.digests)


@given(st.binary(max_size=80))
def test_arbitrary_bytes_are_a_protocol_error_and_nothing_else(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


@pytest.mark.parametrize("header", ["[]", "null", "{}", '{"op":"dance"}', '{"op":"abort"}', '{"op":"step"}', "{"])
def test_a_header_that_is_not_ours_is_a_protocol_error(header: str) -> None:
    with pytest.raises(ProtocolError):
        decode(struct.pack("<I", len(header)) + header.encode())


def test_a_header_nested_deeper_than_anybody_reads_is_a_protocol_error() -> None:
    header = b'{"op":"abort","seq":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    with pytest.raises(ProtocolError):
        decode(struct.pack("<I", len(header)) + header)


@pytest.mark.parametrize("blocks", [(1,), (3,), (3, -1), (10**12,), (2, 0)])
def test_places_of_more_or_fewer_blocks_than_are_removed_are_a_protocol_error(blocks: tuple[int, ...]) -> None:
    takers = tuple(Taker(count, "north", "req_1") for count in blocks)
    with pytest.raises(ProtocolError, match="places of 2 blocks"):
        decode(encode(BlockEvents(removed=b"x" * 32, takers=takers)))


def test_an_engine_of_another_version_is_refused_with_both_numbers() -> None:
    hello = Hello("i", "m", SOME, 1, 1, 1, 1, (), "t", 0, version=7)
    with pytest.raises(ProtocolError, match="version 7, not 5"):
        decode(encode(hello))

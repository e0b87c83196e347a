"""Compressed bodies, decoded in pieces of any size."""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.body import DECODED, Decoder

if sys.version_info >= (3, 14):
    from compression.zstd import compress
else:
    from backports.zstd import compress

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": compress,
}


@pytest.mark.parametrize("encoding", DECODED)
@given(body=st.binary(max_size=300), repeat=st.integers(1, 50), cut=st.integers(1, 80), most=st.integers(1, 200))
def test_however_a_body_is_cut_it_is_decoded_within_the_limit_of_a_piece(
    encoding: str, body: bytes, repeat: int, cut: int, most: int
) -> None:
    compressed = COMPRESS[encoding](body * repeat) + b"trailing"
    decoder, decoded = Decoder(encoding), []
    for begin in range(0, len(compressed), cut):
        piece = compressed[begin : begin + cut]
        while some := decoder.decode(piece, most):
            assert len(some) <= most
            decoded.append(some)
            piece = b""
    assert decoder.eof
    assert b"".join(decoded) == body * repeat

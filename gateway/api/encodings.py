"""Content-Encodings of request bodies: gzip, deflate and zstd (RFC 8878), each decoded piece by piece within a limit.
Pure; body.py says how much may come out.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Final, Protocol

if sys.version_info >= (3, 14):
    from compression.zstd import DecompressionParameter, ZstdDecompressor, ZstdError
else:
    from backports.zstd import DecompressionParameter, ZstdDecompressor, ZstdError

BROKEN: Final = (zlib.error, ZstdError)
"""What `decode` raises for bytes that are not compressed as they say."""

NAMES: Final = "gzip, deflate, zstd or identity"

_GZIP_OR_ZLIB: Final = 32 + zlib.MAX_WBITS  # zlib finds out which of the two it is
_ZSTD_WINDOW_LOG: Final = 23  # 8 MiB of memory for one body, which RFC 8878 asks decoders to have (3.1.1.1.2)


class Decoder(Protocol):
    """Of one body."""

    @property
    def eof(self) -> bool:
        """Whether the compressed body is complete; what comes behind it is left out."""
        ...

    def decode(self, data: bytes, most: int) -> bytes:
        """At most `most` bytes of what was given so far. The rest comes when it is called again, with no data."""
        ...


class _Zlib:
    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(_GZIP_OR_ZLIB)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    def decode(self, data: bytes, most: int) -> bytes:
        return self._zlib.decompress(self._zlib.unconsumed_tail + data, most)


class _Zstd:
    def __init__(self) -> None:
        self._zstd = ZstdDecompressor(options={DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG})

    @property
    def eof(self) -> bool:
        return self._zstd.eof

    def decode(self, data: bytes, most: int) -> bytes:
        return b"" if self._zstd.eof else self._zstd.decompress(data, most)


DECODERS: Final[Mapping[str, Callable[[], Decoder]]] = {
    "gzip": _Zlib,
    "x-gzip": _Zlib,
    "deflate": _Zlib,
    "zstd": _Zstd,
}

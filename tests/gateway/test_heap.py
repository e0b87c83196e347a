"""That large buffers stay out of the heap: glibc's own rule puts them there once one was freed."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SOURCE = """
import ctypes, sys
from gateway.heap import keep_small

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena blocks small mapped e f g h i j".split()]

library = ctypes.CDLL(None)
library.mallinfo2.restype = Info
if sys.argv[1] == "kept small":
    keep_small()
larger = bytearray(8 << 20)
del larger
before = library.mallinfo2().mapped
large = bytearray(1 << 20)
print(library.mallinfo2().mapped - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize(("how", "mapped"), [("kept small", "1"), ("as it is", "0")])
def test_a_large_buffer_is_of_the_system_also_behind_a_larger_one(how: str, mapped: str) -> None:
    ended = subprocess.run([sys.executable, "-c", SOURCE, how], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == mapped

r"""The patterns of a JSON Schema, as the compiler has to read them: it is Rust's, and has sets inside of sets.

`[`, `&&`, `--` and `~~` are characters in a class of ECMA 262, and operators in Rust's; `[]` is an empty class, and in
Rust's the beginning of one. engine/sampling/schema.py asks for every pattern; pure.
"""

from __future__ import annotations

import re
from typing import Final

_PIECE: Final = re.compile(r"\\.|\[\^?\]?|\]|--|.", re.DOTALL)


def spell(pattern: str) -> str:
    """The same pattern, with the characters escaped that are none to the compiler. Raises ValueError for a class that
    it could not read."""
    out: list[str] = []
    inside = False
    for piece in _PIECE.findall(pattern):
        if inside and piece == "--":
            raise ValueError(r"'--' in a class is not supported: escape it as '\-\-'")
        if not inside and piece in ("[]", "[^]"):
            raise ValueError(f"{piece!r} is not supported: a class has at least one character")
        out.append("\\" + piece if inside and piece[0] in "[&~" else piece)
        inside = (piece[0] == "\\" or piece[-1] != "]") if inside else piece[0] == "["
    return "".join(out)

"""Which requests may be answered with what another one was answered. Pure.

Only a chat's last text may differ: everything else is compared exactly, as the scope (key.py makes its digest). And
what is left has to be a question whose answer depends on its text alone.
"""

from __future__ import annotations

from gateway.responses.semantic.lexicon import MOMENTS


def find_unfit(text: str, *, max_chars: int) -> str | None:
    """Why a text is not compared with others, as one word for metrics; None where it is.

    length  there is none, or too much
    text    it is not Unicode
    moment  its answer is a matter of when it is asked
    """
    if not text or len(text) > max_chars:
        return "length"
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return "text"
    return None if MOMENTS.isdisjoint(_words(text)) else "moment"


def _words(text: str) -> set[str]:
    return {word.strip(".,;:!?\"'()[]") for word in text.lower().split()}

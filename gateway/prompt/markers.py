"""Where a client's breakpoints lie in the rendered text: a marker goes through the template with the message.

The text that is tokenised is never the marked one, so that a breakpoint changes no token. A template that reads what it
renders (strips it, looks at how it ends) may render something else around a marker; then the two texts are compared,
and the breakpoint is put where they begin to differ, which is at the marker or before it, never after. Pure text; the
neighbours are template.py, which puts the markers in, and tokenizer.py, which counts the tokens before them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.errors import BadRequestError
from gateway.prompt.masking import Masking
from gateway.types import Marker

Render = Callable[[Sequence[Marker]], str]


def find_markers(text: str, markers: Sequence[Marker], render: Render, masking: Masking) -> list[int]:
    """Character offsets in `text`, one for each marker; 0 for one that the template does not render.

    text    masked, as rendered without markers
    render  the same messages with some of the markers
    """
    found = _find(text, len(markers), _rendered(markers, render), masking)
    if found is not None:
        return found
    return [_first_difference(text, _rendered([marker], render), masking) for marker in markers]


def _rendered(markers: Sequence[Marker], render: Render) -> str:
    try:
        return render(markers)
    except BadRequestError:  # the template refuses contents with markers, and took those without
        return ""


def _find(text: str, count: int, marked: str, masking: Masking) -> list[int] | None:
    """None when anything but the markers has changed, or not every marker is there once."""
    sequences = masking.markers[:count]
    places = [marked.find(sequence) for sequence in sequences]
    width, done, unmarked = len(sequences[0]), 0, 0
    found = [0] * count
    for place, which in sorted(zip(places, range(count), strict=True)):
        if place < 0 or not text.startswith(marked[done:place], unmarked):
            return None
        found[which] = unmarked = unmarked + place - done
        done = place + width
    # What is left has no marker, or it would not be equal to text that has none.
    return found if marked[done:] == text[unmarked:] else None


def _first_difference(text: str, marked: str, masking: Masking) -> int:
    if masking.markers[0] not in marked:
        return 0
    low, high = 0, min(len(text), len(marked))  # the common beginning is at least `low` long, and at most `high`
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(marked[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low - 1 if text[:low].endswith(masking.mark) else low  # a mark and its code stay together

"""What the night's tenants say: conversations whose turns are sent one after the other, each with all before it."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final

Turn = tuple[str, str]
"""Role and text."""

FILES: Final = ("tau_airline_chats.jsonl.gz", "aider_chats.jsonl.gz", "questions.jsonl.gz")
MOST_FILE_ROWS: Final = 120
MOST_TURNS: Final = 7
MOST_CHARS: Final = 900
"""Of one turn: on a machine without a GPU prompts of a few hundred tokens are enough to have blocks."""

TEXT: Final = (
    "the ship came into harbour at night and nobody saw her until the pilot went out with a lamp in the rain while "
    "letters for the captain lay in the office where a clerk wrote down what each crew had brought from the south"
)


def made(dice: random.Random, number: int) -> list[list[Turn]]:
    """So many of the night's own."""
    return [
        [
            (
                "user" if turn % 2 == 0 else "assistant",
                " ".join(dice.choices(TEXT.split(), k=dice.randrange(20, 90))) + ".",
            )
            for turn in range(dice.choice((1, 3, 5)))
        ]
        for _ in range(number)
    ]


def read(folder: Path) -> list[list[Turn]]:
    """Recorded ones. A tool's result is told by the user, turns of one role in a row are one."""
    found: list[list[Turn]] = []
    for name in FILES:
        with gzip.open(folder / name, "rt", encoding="utf-8") as file:
            for _, line in zip(range(MOST_FILE_ROWS), file, strict=False):
                row = json.loads(line)
                messages = row.get("messages") or [{"role": "user", "content": text} for text in row.get("turns", ())]
                if turns := _turns(messages):
                    found.append(turns)
    return found


def _turns(messages: Sequence[dict[str, object]]) -> list[Turn]:
    turns: list[Turn] = []
    for message in messages:
        role = "assistant" if message["role"] == "assistant" else "user"
        text = message.get("content")
        if not isinstance(text, str) or not text.strip() or message["role"] == "system":
            continue
        text = text[:MOST_CHARS].replace("<<", "< <")
        if turns and turns[-1][0] == role:
            turns[-1] = (role, f"{turns[-1][1]}\n{text}"[:MOST_CHARS])
        else:
            turns.append((role, text))
    turns = turns[1 if turns and turns[0][0] == "assistant" else 0 : MOST_TURNS]
    return turns if not turns or turns[-1][0] == "user" else turns[:-1]

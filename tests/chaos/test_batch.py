from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.batch import Chaos


@pytest.mark.slow
def test_every_line_has_one_result_whatever_is_killed(tmp_path: Path) -> None:
    """The short form of `python -m tests.chaos.batch`."""
    outcome = Chaos(tmp_path, lines=80, kills=4, seed=3, max_tokens=4).run()
    assert outcome.batch.status == "completed"
    assert outcome.results == Counter(f"line-{number}" for number in range(80))
    # A line whose engine died twice is failed, whoever ended it.
    assert outcome.succeeded >= 80 - 32 * max(0, outcome.kills["engine"] + outcome.kills["gateway"] - 1)
    assert sum(outcome.kills.values()) >= 3, "something may be on its way back when it is its turn"
    assert outcome.files == set()
    assert outcome.left_on_disk == []

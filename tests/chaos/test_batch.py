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
    # Lines whose engine died run alone the next time. Nothing tells a second kill by an operator from a crash that the
    # line caused (both may be SIGKILL), so the one line that runs alone then is failed, and no other.
    assert outcome.succeeded >= 80 - max(0, outcome.kills["engine"] - 1)
    assert sum(outcome.kills.values()) >= 3, "something may be on its way back when it is its turn"
    assert outcome.files == set()
    assert outcome.left_on_disk == []

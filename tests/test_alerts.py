from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gateway.admin import scraped

ALERTS = Path(__file__).parents[1] / "deploy/prometheus"


def test_alerts_ask_for_metrics_that_there_are() -> None:
    asked = set(re.findall(r"kvasir_(\w+)", (ALERTS / "alerts.yml").read_text()))
    names, prefix = set(), ""
    for line in Path(scraped.__file__).read_text().splitlines():
        if section := re.fullmatch(r"\[\S*\] ?(\w*)", line):
            prefix = section[1]
        elif metric := re.match(r"(\w+) \|", line):
            names.add(prefix + metric[1])
    assert asked
    assert asked <= names


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool")
def test_alerts_fire_when_they_should_and_only_then() -> None:
    done = subprocess.run(["promtool", "test", "rules", "alerts_test.yml"], cwd=ALERTS, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr

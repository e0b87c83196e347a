"""deploy/prometheus and deploy/grafana: they ask for what there is, and alerts fire when they should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.gateway import running

DEPLOY = Path(__file__).parents[1] / "deploy"
ALERTS = DEPLOY / "prometheus"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/kvasir.json").read_text())
WITH_PROMTOOL = pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool")


async def families() -> dict[str, set[str]]:
    """Of /metrics: each family's samples, families without any too."""
    async with running() as gateway:
        _, text, _ = await gateway.get("/metrics")
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}
    return {one.name: {one.name + end for end in suffixes[one.type]} for one in text_string_to_metric_families(text)}


@pytest.mark.parametrize("text", [(ALERTS / "alerts.yml").read_text(), json.dumps(DASHBOARD["panels"])])
async def test_alerts_and_dashboard_ask_for_metrics_that_there_are(text: str) -> None:
    asked = set(re.findall(r"kvasir_\w+", text))
    assert len(asked) >= 8
    assert asked <= set().union(*(await families()).values())


def test_every_panel_asks_the_data_source_that_was_chosen() -> None:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {"datasource"}
    assert all(one["datasource"] == chosen for panel in panels for one in (panel, *panel["targets"]))
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(numbers) == len(set(numbers))


@WITH_PROMTOOL
@pytest.mark.parametrize(
    "command",
    [("check", "rules", "alerts.yml"), ("check", "config", "prometheus.yml"), ("test", "rules", "alerts_test.yml")],
)
def test_alerts_fire_when_they_should_and_only_then(command: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *command], cwd=ALERTS, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr

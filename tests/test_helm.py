"""deploy/helm/kvasir: rendered by helm itself, held to Kubernetes' schemas and to what a gateway reads and answers."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from engine.config import load
from gateway.config import Settings
from gateway.workers import MORE_S
from tests.fakes.gateway import running

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy/helm/kvasir"
THERE = ROOT / ".clients/kubernetes"
HELM = THERE / "bin/helm"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
REDIS = {"redis": {"url": "redis://redis:6379/0"}}
VLLM = {**REDIS, "discovery": {"enabled": True}, "vllm": {"enabled": True}}
CUSTOM = {
    "HTTPRoute": "gateway-api/gateway.networking.k8s.io/v1",
    "ScaledObject": "keda/keda.sh/v1alpha1",
    "ServiceMonitor": "prometheus-operator/monitoring.coreos.com/v1",
    "PrometheusRule": "prometheus-operator/monitoring.coreos.com/v1",
}
VALIDATE = """
import { readFileSync } from "node:fs";
for (const [path, found] of JSON.parse(readFileSync(0, "utf8"))) {
  const { [found.kind]: Kind } = await import(path);
  new Kind(found).validate();
}
"""

pytestmark = pytest.mark.skipif(not HELM.is_file(), reason="there is no helm: .ci/kubernetes.sh installs it")


def run(*arguments: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    given = ["--values", "-"] if values is not None else []
    command = [str(HELM), *arguments, str(CHART), "--namespace", "prod", *given]
    return subprocess.run(command, input=json.dumps(values or {}), capture_output=True, text=True, timeout=120)


@functools.cache
def _rendered(values: str) -> list[dict[str, Any]]:
    done = run("template", "kvasir", values=json.loads(values))
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def render(values: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Kind and name -> object; of those in several namespaces the last."""
    found = _rendered(json.dumps(values, sort_keys=True))
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def example(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(path.read_text())
    return values


def settings_of(objects: dict[tuple[str, str], Any], tmp_path: Path) -> Settings:
    """As the gateway of the rendered pod reads them."""
    file = tmp_path / "kvasir.toml"
    file.write_text(objects["ConfigMap", "kvasir"]["data"]["kvasir.toml"])
    (container,) = objects["Deployment", "kvasir"]["spec"]["template"]["spec"]["containers"]
    environ = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    return load(Settings, file=file, environ=environ, flags={})


@functools.cache
def _schemas(minor: int) -> tuple[Path, Any]:
    folder = THERE / f"kubernetes_validate/kubernetes-json-schema/v1.{minor}.0-local-strict"
    definitions = json.loads((folder / "_definitions.json").read_text())
    resource = Resource.from_contents(definitions, default_specification=DRAFT202012)
    return folder, Registry().with_resource("/api/_definitions.json", resource)


def check_schema(found: dict[str, Any], minor: int) -> None:
    folder, registry = _schemas(minor)
    group, _, version = found["apiVersion"].rpartition("/")
    name = "-".join(filter(None, (found["kind"].lower(), group.partition(".")[0], version)))
    schema = json.loads((folder / f"{name}.json").read_text())
    jsonschema.Draft202012Validator(schema, registry=registry).validate(found)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_renders_to_settings_that_the_gateway_takes(path: Path, tmp_path: Path) -> None:
    settings = settings_of(render(example(path)), tmp_path)
    assert (settings.server.host, settings.server.port, settings.server.shutdown_s) == ("0.0.0.0", 8080, 120.0)
    services = [one.service for one in settings.replicas]
    assert ("vllm" in path.stem) == bool(services)
    assert all(services)


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_renders_to_objects_that_the_oldest_and_the_newest_version_take(path: Path) -> None:
    for found in render(example(path)).values():
        if found["kind"] not in CUSTOM:
            check_schema(found, 25)
            check_schema(found, 37)


@pytest.mark.slow
@pytest.mark.parametrize("minor", [25, 37])
def test_the_schemas_refuse_a_field_that_there_is_not(minor: int) -> None:
    found = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"sellector": {}}}
    with pytest.raises(jsonschema.ValidationError, match="sellector"):
        check_schema(found, minor)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node, which runs the schemas of custom resources")
def test_custom_resources_are_as_their_schemas_say() -> None:
    found = [one for path in EXAMPLES for one in render(example(path)).values() if one["kind"] in CUSTOM]
    assert {one["kind"] for one in found} == set(CUSTOM)
    folder = THERE / "node_modules/@kubernetes-models"
    given = json.dumps([(str(folder / CUSTOM[one["kind"]] / f"{one['kind']}.js"), one) for one in found])
    command = ["node", "--input-type=module", "--eval", VALIDATE]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    broken = subprocess.run(
        command, input=given.replace('"maxReplicaCount": 8', '"maxReplicaCount": "8"'), capture_output=True, text=True
    )
    assert broken.returncode != 0


def test_the_chart_has_no_lint_and_each_value_a_schema() -> None:
    done = run("lint", "--strict", values=REDIS)
    assert done.returncode == 0, done.stdout + done.stderr

    def untyped(values: Any, schema: dict[str, Any], path: str) -> list[str]:
        while "$ref" in schema:
            schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
        if not isinstance(values, dict) or "properties" not in schema:
            return []
        missing = [f"{path}.{name}" for name in values if name not in schema["properties"]]
        rest = [one for one in values if one in schema["properties"]]
        return missing + [
            bad for name in rest for bad in untyped(values[name], schema["properties"][name], f"{path}.{name}")
        ]

    root = json.loads((CHART / "values.schema.json").read_text())
    assert untyped(example(CHART / "values.yaml"), root, "") == []


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, "more than one gateway or worker needs redis.url or redis.existingSecret"),
        ({"replicaCount": 1, "workers": 2}, "more than one gateway or worker needs redis.url"),
        (
            {"redis": {"url": "redis://r", "existingSecret": "s"}},
            "redis.url and redis.existingSecret exclude each other",
        ),
        ({**REDIS, "vllm": {"enabled": True}}, "vllm.enabled needs discovery.enabled"),
        ({**REDIS, "config": 'url = "k8s://a/b:http"'}, "which needs discovery.enabled"),
        ({**REDIS, "colour": "red"}, "colour"),
        ({**REDIS, "redis": {"url": "redis://user:secret@r:6379"}}, "/redis/url"),
        ({**REDIS, "drainSeconds": -1}, "/drainSeconds"),
        ({**REDIS, "ingress": {"enabled": True}}, "/ingress"),
        ({**REDIS, "extraEnv": [{"name": "KVASIR_SERVER_PORT", "value": "1"}]}, "/extraEnv/0"),
        ({**VLLM, "vllm": {"enabled": True, "kind": "DaemonSet"}}, "/vllm/kind"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], why: str) -> None:
    done = run("template", "kvasir", values=values)
    assert done.returncode != 0
    assert why in done.stderr.replace(".", "/") or why in done.stderr


def pods() -> list[tuple[str, dict[str, Any]]]:
    found = {f"{path.stem}/{kind}": one for path in EXAMPLES for (kind, _), one in render(example(path)).items()}
    return [
        (name, one["spec"] if one["kind"] == "Pod" else one["spec"]["template"]["spec"])
        for name, one in found.items()
        if one["kind"] in ("Pod", "Deployment", "StatefulSet")
    ]


def test_no_container_is_root_writes_to_its_image_or_has_a_capability() -> None:
    assert len(pods()) >= len(EXAMPLES)
    for name, spec in pods():
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] > 0, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name


def test_no_secret_is_in_an_object_and_a_token_only_where_it_is_used() -> None:
    for path in EXAMPLES:
        objects = render(example(path))
        assert not any(kind == "Secret" for kind, _ in objects)
        pod = objects["Deployment", "kvasir"]["spec"]["template"]["spec"]
        watches = example(path).get("discovery", {}).get("enabled", False)
        assert pod["automountServiceAccountToken"] is watches
        rules = [rule for (kind, _), one in objects.items() if kind == "Role" for rule in one["rules"]]
        watch = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
        assert all(rule == watch for rule in rules)
        assert bool(rules) is watches


def test_each_namespace_of_the_discovery_has_its_role_for_the_one_account() -> None:
    values = {**REDIS, "discovery": {"enabled": True, "namespaces": ["models"]}}
    found = [one for one in _rendered(json.dumps(values, sort_keys=True)) if one["kind"] == "RoleBinding"]
    assert [one["metadata"]["namespace"] for one in found] == ["prod", "models"]
    assert all(one["subjects"] == [{"kind": "ServiceAccount", "name": "kvasir", "namespace": "prod"}] for one in found)


async def test_probes_ask_what_there_is_and_liveness_needs_neither_redis_nor_an_engine() -> None:
    (container,) = render(REDIS)["Deployment", "kvasir"]["spec"]["template"]["spec"]["containers"]
    probes = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert probes["startup"] == probes["liveness"]
    async with running() as gateway:
        gateway.state |= {"engines": [], "redis": {"up": False, "outages": 1}}
        answers = {path: (await gateway.get(path))[0] for path in probes.values()}
    assert answers == {"/health/liveness": 200, "/health/readiness": 503}


def test_with_a_certificate_everybody_who_asks_the_port_speaks_tls(tmp_path: Path) -> None:
    values = example(CHART / "examples/monitoring.yaml")
    objects = render(values)
    tls = settings_of(objects, tmp_path).tls
    spec = objects["Deployment", "kvasir"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    folders = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    (secret,) = (one["secret"] for one in spec["volumes"] if one["name"] == folders["/tls"])
    assert secret["secretName"] == values["tls"]["existingSecret"]
    assert (str(tls.cert), str(tls.key)) == ("/tls/tls.crt", "/tls/tls.key")
    asking = [container[f"{name}Probe"]["httpGet"]["scheme"].lower() for name in ("startup", "liveness", "readiness")]
    asking += [objects["ServiceMonitor", "kvasir"]["spec"]["endpoints"][0]["scheme"]]
    asking += re.findall(r"(\w+)://kvasir:", objects["Pod", "kvasir-test"]["spec"]["containers"][0]["args"][0])
    assert asking == ["https"] * 5
    (container,) = render(REDIS)["Deployment", "kvasir"]["spec"]["template"]["spec"]["containers"]
    assert container["livenessProbe"]["httpGet"]["scheme"] == "HTTP"


def test_a_pod_lives_until_its_streams_have_ended() -> None:
    spec = render({**VLLM, "preStopSeconds": 7, "drainSeconds": 300})["Deployment", "kvasir"]["spec"]["template"][
        "spec"
    ]
    (container,) = spec["containers"]
    environ = {one["name"]: one.get("value") for one in container["env"]}
    assert container["lifecycle"]["preStop"] == {"exec": {"command": ["sleep", "7"]}}
    assert environ["KVASIR_SERVER_SHUTDOWN_S"] == "300"
    assert spec["terminationGracePeriodSeconds"] > 7 + 300 + MORE_S
    server = render(VLLM)["StatefulSet", "kvasir-vllm"]["spec"]["template"]["spec"]
    sleep = int(server["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert server["terminationGracePeriodSeconds"] > sleep >= 120


def test_a_change_of_the_settings_rolls_the_pods() -> None:
    def checksum(values: dict[str, Any]) -> str:
        template = render(values)["Deployment", "kvasir"]["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/config"])

    assert checksum(REDIS) != checksum({**REDIS, "config": "[queue]\n"})
    assert checksum(REDIS) != checksum(VLLM)


@pytest.mark.parametrize("kind", ["StatefulSet", "Deployment"])
def test_gateways_find_the_servers_and_only_they_reach_them(kind: str, tmp_path: Path) -> None:
    values = {**VLLM, "vllm": {"enabled": True, "kind": kind, "servedName": "qwen", "apiKeySecret": {"name": "key"}}}
    objects = render(values)
    (replica,) = settings_of(objects, tmp_path).replicas
    service = objects["Service", "kvasir-vllm"]
    assert replica.service is not None
    assert (replica.service.namespace, replica.service.name) == ("prod", service["metadata"]["name"])
    assert replica.service.port in [port["name"] for port in service["spec"]["ports"]]
    assert replica.served == ("qwen", "Qwen/Qwen3-8B")
    # Key and variable are the same on both sides.
    server = objects[kind, "kvasir-vllm"]
    (container,) = server["spec"]["template"]["spec"]["containers"]
    gateway = objects["Deployment", "kvasir"]["spec"]["template"]["spec"]["containers"][0]
    (key,) = (one for one in container["env"] if one["name"] == "VLLM_API_KEY")
    assert key in gateway["env"]
    assert replica.api_key_env == key["name"]
    # It publishes its events where its ports and the policy say, to the gateways alone.
    (events,) = (json.loads(arg.partition("=")[2]) for arg in container["args"] if arg.startswith("--kv-events-config"))
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert events["enable_kv_cache_events"] is True
    assert events["endpoint"] == f"tcp://*:{ports['kv-events']}"
    assert events["replay_endpoint"] == f"tcp://*:{ports['kv-replay']}"
    (rule,) = objects["NetworkPolicy", "kvasir-vllm"]["spec"]["ingress"]
    assert {one["port"] for one in rule["ports"]} == set(ports)
    labels = objects["Deployment", "kvasir"]["spec"]["template"]["metadata"]["labels"]
    wanted = rule["from"][0]["podSelector"]["matchLabels"]
    assert wanted.items() <= labels.items()
    assert not wanted.items() <= server["spec"]["template"]["metadata"]["labels"].items()


def test_selectors_name_their_own_pods_alone() -> None:
    objects = render(VLLM)
    workloads = {"gateway": objects["Deployment", "kvasir"], "vllm": objects["StatefulSet", "kvasir-vllm"]}
    labels = {name: one["spec"]["template"]["metadata"]["labels"].items() for name, one in workloads.items()}
    for name, other, of in (("gateway", "vllm", "kvasir"), ("vllm", "gateway", "kvasir-vllm")):
        selectors = [
            workloads[name]["spec"]["selector"]["matchLabels"],
            objects["Service", of]["spec"]["selector"],
            objects["NetworkPolicy", of]["spec"]["podSelector"]["matchLabels"],
        ]
        assert all(one.items() <= labels[name] and not one.items() <= labels[other] for one in selectors)


def test_a_disruption_budget_is_there_for_several_gateways_alone() -> None:
    assert ("PodDisruptionBudget", "kvasir") in render(REDIS)
    assert ("PodDisruptionBudget", "kvasir") not in render({"replicaCount": 1})


def test_gateways_scale_by_processor_and_servers_by_what_waits() -> None:
    objects = render(example(CHART / "examples/redis-cluster.yaml"))
    assert "replicas" not in objects["Deployment", "kvasir"]["spec"]
    assert objects["HorizontalPodAutoscaler", "kvasir"]["spec"]["scaleTargetRef"]["name"] == "kvasir"
    objects = render(example(CHART / "examples/vllm.yaml"))
    scaled = objects["ScaledObject", "kvasir-vllm"]["spec"]
    assert (scaled["scaleTargetRef"]["kind"], scaled["minReplicaCount"]) == ("StatefulSet", 2)
    assert "replicas" not in objects["StatefulSet", "kvasir-vllm"]["spec"]
    assert scaled["triggers"][0]["metadata"]["query"] == 'sum(kvasir_queue_waiting{job="kvasir", lane="online"})'


async def test_what_prometheus_and_grafana_get_is_what_deploy_has() -> None:
    objects = render(example(CHART / "examples/monitoring.yaml"))
    alerts = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())
    assert objects["PrometheusRule", "kvasir"]["spec"] == alerts
    board = objects["ConfigMap", "kvasir-dashboard"]
    assert board["data"]["kvasir.json"] == (ROOT / "deploy/grafana/kvasir.json").read_text()
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    monitor = objects["ServiceMonitor", "kvasir"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    service = objects["Service", "kvasir"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"][0]["port"] in [one["name"] for one in service["spec"]["ports"]]
    async with running() as gateway:
        assert re.search(r'^kvasir_queue_waiting\{lane="online"\}', (await gateway.get("/metrics"))[1], re.M)

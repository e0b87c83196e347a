"""Who may import whom. The pipeline stays a straight pipeline because this test reads every import."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
STAGES = (
    "prompt",
    "explain",
    "responses",
    "index",
    "queues",
    "engines",
    "replicas",
    "files",
    "issued",
    "ledger",
    "limits",
    "upstreams",
)
WITH_NUMPY = {
    "gateway.responses.embedding.bert",
    "gateway.responses.embedding.text_model",
    "gateway.responses.semantic.budget",
    "gateway.responses.semantic.judge",
    "gateway.responses.semantic.space",
}
"""What the extra `semantic` is for; imported when the first text is embedded or looked up."""
WITH_EVENTS = {"gateway.replicas.events": {"msgspec"}, "gateway.replicas.stream": {"zmq"}}
"""What the extra `fleet` is for; imported when a replica is configured."""
FOR_SERVERS = {"engine.publish", "engine.leases.leases", "engine.leases.pins", "engine.pool.blocks"}
"""What an engine does by itself, and is done here for servers of others: the index, and the rules of leases."""
FOUNDATION = {
    *("gateway.types", "gateway.errors", "gateway.tasks", "gateway.disk", "gateway.breaker"),
    *("gateway.storage.redis_calls", "gateway.storage.breaker", "gateway.storage.claims"),
    *("gateway.storage.byte_store", "gateway.storage.memory_bytes", "gateway.storage.redis_bytes"),
    "gateway.storage.ring",
    *("gateway.config", "gateway.digests", "gateway.gate", "gateway.logs", "gateway.native", "gateway.propagation"),
    "engine.protocol.frozen",
    *("engine.redis_url", "engine.redis_client", "engine.tls"),
}
PROTOCOL = {"engine.protocol"}
PROMISES = {
    "gateway.files.store",
    "gateway.issued.base",
    "gateway.issued.directory",
    "gateway.limits.budgets",
    "gateway.limits.holds",
    "gateway.limits.limits",
    "gateway.queues.batch.base",
    "gateway.queues.batch.store",
    "gateway.ledger.base",
    "gateway.ledger.history",
    "gateway.explain.causes",
    "gateway.explain.misses",
    "gateway.explain.parts",
    "gateway.responses.entries",
}
"""Modules of a stage that its users call: values, Protocols, and classes that would only have a Protocol for copy."""
SOURCES = sorted(path for package in ("gateway", "engine") for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(path: Path) -> frozenset[str]:
    """Full names of what a file imports, also inside functions and under TYPE_CHECKING."""
    return frozenset(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            for alias in node.names:
                inner = ROOT / module.replace(".", "/") / alias.name
                yield f"{module}.{alias.name}" if inner.with_suffix(".py").exists() or inner.is_dir() else module


def ours(path: Path) -> set[str]:
    return {name for name in imports(path) if name.split(".")[0] in ("gateway", "engine")}


def foreign(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


def strange(path: Path) -> set[str]:
    """Modules that a file imports against the rule of its room."""
    module = module_name(path)
    room = module.split(".")[1] if "." in module else ""
    used = ours(path) - {module, "gateway", "engine"}
    if module.startswith("engine"):  # the engine never imports the gateway
        return {name for name in used if name.startswith("gateway")}
    if module in FOUNDATION or room in ("config", "types", "logs", "storage"):  # it imports nothing above it
        own = {"engine.config"} if room == "config" else set()
        return {name for name in used if not name.startswith(f"gateway.{room}.")} - FOUNDATION - PROTOCOL - own
    if room in STAGES:  # stages never import each other
        own = FOR_SERVERS if room == "replicas" else set()
        return {name for name in used if not name.startswith(f"gateway.{room}")} - FOUNDATION - PROTOCOL - own
    if module in ("gateway.pipeline", "gateway.sequence"):  # the pipeline knows its stages as protocols
        own = {"gateway.stages", "gateway.metering", "gateway.receipts", "gateway.sequence"}
        return used - FOUNDATION - PROTOCOL - own
    if room in ("api", "admin"):  # the dialects import the pipeline, not its stages
        rooms = ("gateway.api", "gateway.admin", "gateway.dashboard", "gateway.pipeline", "gateway.stages")
        return {name for name in used if not name.startswith(rooms)} - PROMISES - FOUNDATION - PROTOCOL
    if room == "dashboard":  # files, and the routes that they are served at
        return used - FOUNDATION - {"gateway.api.dialect"}
    if room == "client":  # it is a client, which knows how a file has to be
        return {name for name in used if not name.startswith("gateway.client")} - {"gateway.api.openai.batches.rows"}
    if module in ("gateway.engine_processes", "gateway.vllm_process", "gateway.parent"):
        return used - FOUNDATION - {"engine.config", "engine.compute.machine", "gateway.processes", "gateway.peer"}
    if module not in ("gateway.app", "gateway.serving", "gateway.cli", "gateway.worker", "gateway.workers"):
        return used - FOUNDATION - PROTOCOL - {"engine.config"}  # a room of its own
    return set()


def test_imports_follow_the_pipeline() -> None:
    assert not {module_name(path): found for path in SOURCES if (found := strange(path))}


def test_no_torch_below_the_gateway() -> None:
    computes = {
        module_name(path): foreign(path) & {"torch", "transformers", "safetensors", "numpy"} for path in SOURCES
    }
    mine = {name: found for name, found in computes.items() if name.startswith("gateway") and found}
    assert not {name for name, found in mine.items() if found - {"safetensors", "numpy"}}
    assert mine.keys() <= WITH_NUMPY


def test_only_the_event_streams_need_the_extra_fleet() -> None:
    needs = {module_name(path): foreign(path) & {"msgspec", "zmq"} for path in SOURCES}
    assert not {name: found for name, found in needs.items() if found - WITH_EVENTS.get(name, set())}


def test_only_the_exporter_needs_the_extra_otel() -> None:
    needing = [module_name(path) for path in SOURCES if "opentelemetry" in foreign(path)]
    assert set(needing) <= {"gateway.admin.otel"}


def test_the_protocol_needs_only_the_standard_library_and_xxhash() -> None:
    known = {*sys.stdlib_module_names, "engine", "xxhash"}
    paths = sorted((ROOT / "engine/protocol").glob("*.py"))
    assert paths
    assert not {module_name(path): found for path in paths if (found := foreign(path) - known)}
    assert all(name.startswith("engine.protocol.") for path in paths for name in ours(path))


TORCHLESS = ("", "protocol", "pool", "leases", "tiers")
WITH_TORCH = {"engine.tiers.storage"}
DECIDES = [
    path
    for path in SOURCES
    if path.is_relative_to(ROOT / "engine")
    and ".".join(module_name(path.parent / "__init__.py").split(".")[1:]) in TORCHLESS
    and module_name(path) not in WITH_TORCH
]


def test_the_engine_decides_without_torch() -> None:
    assert DECIDES
    assert not [module_name(path) for path in DECIDES if "torch" in foreign(path)]

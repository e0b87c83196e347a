"""Who may import whom. The pipeline stays a straight pipeline because this test reads every import."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    *("engine.redis_url", "engine.redis_client"),
}
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


def imports(path: Path) -> Iterator[str]:
    """Full names of what a file imports, also inside functions and under TYPE_CHECKING."""
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


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_follow_the_pipeline(path: Path) -> None:
    module = module_name(path)
    room = module.split(".")[1] if "." in module else ""
    used = ours(path) - {module, "gateway", "engine"}
    if module.startswith("engine"):
        assert not {name for name in used if name.startswith("gateway")}, "the engine never imports the gateway"
    elif module in FOUNDATION or room in ("config", "types", "logs", "storage"):
        allowed = FOUNDATION | {"engine.protocol"} | ({"engine.config"} if room == "config" else set())
        outside = {name for name in used if not name.startswith(f"gateway.{room}.")}
        assert outside <= allowed, "the foundation imports nothing above it"
    elif room in STAGES:
        outside = {name for name in used if not name.startswith(f"gateway.{room}")}
        own = FOR_SERVERS if room == "replicas" else set()
        assert outside <= FOUNDATION | {"engine.protocol"} | own, "stages never import each other"
    elif module in ("gateway.pipeline", "gateway.sequence"):
        own = {"gateway.stages", "gateway.metering", "gateway.receipts", "gateway.sequence"}
        allowed = FOUNDATION | {"engine.protocol"} | own
        assert used <= allowed, "the pipeline knows its stages as protocols"
    elif room in ("api", "admin"):
        allowed_rooms = ("gateway.api", "gateway.admin", "gateway.dashboard", "gateway.pipeline", "gateway.stages")
        outside = {name for name in used if not name.startswith(allowed_rooms)} - PROMISES
        assert outside <= FOUNDATION | {"engine.protocol"}, "the dialects import the pipeline, not its stages"
    elif room == "dashboard":
        assert used <= FOUNDATION | {"gateway.api.dialect"}, "files, and the routes that they are served at"
    elif room == "client":
        outside = {name for name in used if not name.startswith("gateway.client")}
        assert outside <= {"gateway.api.openai.batches.rows"}, "it is a client, which knows how a file has to be"
    elif module in ("gateway.engine_processes", "gateway.vllm_process", "gateway.parent"):
        assert used <= FOUNDATION | {"engine.config", "gateway.processes", "gateway.peer"}
    elif module not in ("gateway.app", "gateway.serving", "gateway.cli", "gateway.worker", "gateway.workers"):
        assert used <= FOUNDATION | {"engine.protocol", "engine.config"}, f"{module}: a room of its own"


@pytest.mark.parametrize("path", [path for path in SOURCES if module_name(path).startswith("gateway")], ids=module_name)
def test_no_torch_below_the_gateway(path: Path) -> None:
    computes = {"safetensors", "numpy"} if module_name(path) in WITH_NUMPY else set()
    assert not foreign(path) & {"torch", "transformers", "safetensors", "numpy"} - computes


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_only_the_event_streams_need_the_extra_fleet(path: Path) -> None:
    assert foreign(path) & {"msgspec", "zmq"} <= WITH_EVENTS.get(module_name(path), set())


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_only_the_exporter_needs_the_extra_otel(path: Path) -> None:
    assert "opentelemetry" not in foreign(path) or module_name(path) == "gateway.admin.otel"


@pytest.mark.parametrize("path", sorted((ROOT / "engine/protocol").glob("*.py")), ids=module_name)
def test_the_protocol_needs_only_the_standard_library_and_xxhash(path: Path) -> None:
    assert foreign(path) - set(sys.stdlib_module_names) <= {"engine", "xxhash"}
    assert all(name.startswith("engine.protocol.") for name in ours(path))


TORCHLESS = ("", "protocol", "pool", "leases", "tiers")
WITH_TORCH = {"engine.tiers.storage"}
DECIDES = [
    path
    for path in SOURCES
    if path.is_relative_to(ROOT / "engine")
    and ".".join(module_name(path.parent / "__init__.py").split(".")[1:]) in TORCHLESS
    and module_name(path) not in WITH_TORCH
]


@pytest.mark.parametrize("path", DECIDES, ids=module_name)
def test_the_engine_decides_without_torch(path: Path) -> None:
    assert "torch" not in foreign(path)

"""What Kvasir is made of besides its own code: private names of packages are bounded, and the bill of materials has it
all."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCES = sorted(path for package in ("gateway", "engine") for path in (ROOT / package).rglob("*.py"))
FIELDS = {"_replace", "_asdict", "_fields"}
"""Of named tuples, where the underscore only keeps them apart from the fields."""

OURS = {"gateway", "engine", "pydantic", *sys.stdlib_module_names}
"""Packages whose classes may have what names they like; those of pydantic have our fields."""

STANDARD_LIBRARY = {("gateway/logs/__init__.py", "logging._srcfile"), ("engine/sampling/grammar_server.py", "os._exit")}
"""Whose bound is requires-python: the first is documented in the source of logging, the second is public."""

BOUNDED = {
    "gateway/upstreams/connections.py": "aiohttp",
    "gateway/upstreams/posting.py": "aiohttp",
    "engine/redis_client.py": "redis",
    "engine/compute/gguf_file.py": "gguf",
    "engine/compute/probe.py": "transformers",
    "engine/compute/quantized_layers.py": "transformers",
    "engine/compute/linear.py": "torch",  # operators, by a name that is put together
}


def private_names(path: Path) -> Iterator[str]:
    """Of other packages, as far as a file's text tells: attributes of what the file does not define, private imports,
    and methods of foreign classes that a class of the file overrides or calls."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    foreign: dict[str, str] = {}  # name -> module
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] not in OURS:
            foreign |= {alias.asname or alias.name: node.module for alias in node.names}
            yield from (alias.name for alias in node.names if is_private(alias.name))
            yield from (part for part in node.module.split(".") if is_private(part))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and is_strange(node.value, node.attr in own):
            yield ast.unparse(node)
    for node in nodes:
        if not isinstance(node, ast.ClassDef):
            continue
        bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in foreign]
        names = {getattr(inner, "name", None) or getattr(inner, "attr", None) for inner in ast.walk(node)}
        for base in bases if any(map(is_private, names)) else ():
            kind = getattr(importlib.import_module(foreign[base]), base)
            yield from (f"{base}.{name}" for name in filter(is_private, names) if name in dir(kind))


def is_private(name: Any) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name not in FIELDS


def is_strange(owner: ast.expr, defined_here: bool) -> bool:
    """Whether an attribute of this is another package's."""
    if isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "super":
        return True
    return not defined_here and not (isinstance(owner, ast.Name) and owner.id in ("self", "cls"))


def requirements() -> dict[str, Requirement]:
    optional = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *(line for extra in optional if extra != "test" for line in optional[extra])]
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}


def test_private_names_of_a_package_are_used_where_its_version_has_an_upper_bound() -> None:
    found = {(path.relative_to(ROOT).as_posix(), name) for path in SOURCES for name in private_names(path)}
    found -= STANDARD_LIBRARY
    assert {path for path, _ in found} == BOUNDED.keys() - {"engine/compute/linear.py"}, found
    bounds = {name: str(requirements()[name].specifier) for name in set(BOUNDED.values())}
    assert not {name: bound for name, bound in bounds.items() if "<" not in bound}


@pytest.fixture(scope="module")
def sbom() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sbom", ROOT / "deploy/sbom.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_bill_of_materials_has_all_that_is_installed_and_no_tools(sbom: ModuleType) -> None:
    document = sbom.bill(frozenset(sbom.EXTRAS.split(",")))
    assert document == sbom.bill(frozenset(sbom.EXTRAS.split(",")))
    listed = {one["name"]: one["version"] for one in document["components"]}
    here = {name: one for name, one in requirements().items() if one.marker is None or one.marker.evaluate()}
    assert {name: version(name) for name in here}.items() <= listed.items()
    assert not listed.keys() & {"kvasir", "pytest", "mypy", "ruff", "hypothesis"}
    assert not [one for one in document["components"] if not one["licenses"]]
    refs = [one["bom-ref"] for one in (document["metadata"]["component"], *document["components"])]
    assert {one["ref"] for one in document["dependencies"]} == {*refs}
    assert len(refs) == len({*refs})
    assert {ref for one in document["dependencies"] for ref in one["dependsOn"]} == {*refs[1:]}


def test_what_is_audited_is_what_is_installed(sbom: ModuleType) -> None:
    """.ci/audit.sh asks about the pinned versions, so each package of an installation has to be one."""
    lines = (ROOT / "deploy/constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", "\n".join(lines), re.MULTILINE)}
    listed = {one["name"] for one in sbom.bill(frozenset(sbom.EXTRAS.split(",")))["components"]}
    assert not listed - pinned


def test_a_bill_without_a_package_is_refused_in_one_line(
    sbom: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = sbom.distribution

    def distribution(name: str) -> Any:
        if name == "xxhash":
            raise sbom.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(sbom, "distribution", distribution)
    monkeypatch.setattr(sys, "argv", ["sbom.py", "--extras", ""])
    assert sbom.main() == 1
    assert capsys.readouterr() == ("", "sbom: xxhash is not installed, which kvasir[] needs\n")

"""The software bill of materials of what is installed: kvasir, and all that it needs, in CycloneDX 1.6 (JSON).

    python deploy/sbom.py [--extras engine,fleet,otel,semantic] > kvasir.cdx.json

Run by the Python of the environment that is to be described. Names, versions, licences and dependencies are those of
the installed packages' own metadata; nothing is downloaded, and equal environments give equal bytes. A package that an
extra needs and that is not installed is an error.
"""

from __future__ import annotations

import argparse
import json
import sys
import uuid
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any
from urllib.parse import quote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = "engine,fleet,otel,semantic"


def needs(found: Distribution, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """Names of what a package needs here, and the extras of those."""
    for text in found.requires or ():
        requirement = Requirement(text)
        contexts: list[dict[str, str]] = [{"extra": extra} for extra in ("", *sorted(extras))]
        if requirement.marker is None or any(requirement.marker.evaluate(one) for one in contexts):
            yield canonicalize_name(requirement.name), frozenset(requirement.extras)


def closure(root: str, extras: frozenset[str]) -> dict[str, tuple[Distribution, set[str]]]:
    """Package -> what is installed, and the packages that it needs. Raises PackageNotFoundError."""
    found: dict[str, tuple[Distribution, set[str]]] = {}
    looked_at: dict[str, frozenset[str]] = {}
    ahead = [(root, extras)]
    while ahead:
        name, wanted = ahead.pop()
        known = looked_at.get(name)
        if known is not None and wanted <= known:
            continue
        wanted |= known or frozenset()
        looked_at[name] = wanted
        installed = distribution(name)
        found[name] = installed, set()
        for needed, own in needs(installed, wanted):
            found[name][1].add(needed)
            ahead.append((needed, own))
    return found


def licences(installed: Distribution) -> list[dict[str, Any]]:
    """An SPDX expression (PEP 639) where the package has one, else what it says in its own words."""
    if expression := installed.metadata.get("License-Expression"):
        return [{"expression": expression}]
    classified = [
        line.rpartition(" :: ")[2] for line in installed.metadata.get_all("Classifier") or () if "License ::" in line
    ]
    names = classified or [(installed.metadata.get("License") or "").strip().partition("\n")[0][:100]]
    return [{"license": {"name": name}} for name in names if name]


def component(name: str, installed: Distribution, kind: str) -> dict[str, Any]:
    purl = f"pkg:pypi/{name}@{quote(installed.version)}"
    made = {"type": kind, "bom-ref": purl, "name": name, "version": installed.version, "purl": purl}
    described = {"description": installed.metadata.get("Summary"), "licenses": licences(installed)}
    return made | {key: value for key, value in described.items() if value}


def bill(extras: frozenset[str]) -> dict[str, Any]:
    """The whole document. Raises PackageNotFoundError."""
    found = closure("kvasir", extras)
    parts = {
        name: component(name, installed, "application" if name == "kvasir" else "library")
        for name, (installed, _) in sorted(found.items())
    }
    depends = [
        {"ref": part["bom-ref"], "dependsOn": sorted(parts[needed]["bom-ref"] for needed in found[name][1])}
        for name, part in parts.items()
    ]
    root = parts.pop("kvasir")
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([root, parts, depends], sort_keys=True))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{number}",
        "version": 1,
        "metadata": {"component": root},
        "components": list(parts.values()),
        "dependencies": depends,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extras", default=EXTRAS, help="of kvasir, with commas between; empty for none")
    extras = frozenset(extra for extra in parser.parse_args().extras.split(",") if extra)
    try:
        document = bill(extras)
    except PackageNotFoundError as error:
        sys.stderr.write(f"sbom: {error.name} is not installed, which kvasir[{','.join(sorted(extras))}] needs\n")
        return 1
    sys.stdout.write(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Strict validation of manifests against custom resource definitions (CRDs): no unknown field, all rules.

An API server removes without a word what a schema does not know, so that the schema is closed here first. A rule that
cannot be evaluated is a problem, so that none is passed over. Rules with `oldSelf` compare with an earlier version of
the object, and a new one has none.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from celpy import Environment, Runner
from celpy.adapter import json_to_cel
from celpy.evaluation import CELEvalError
from jsonschema import Draft202012Validator

_TEXT, _TEXTS = {"type": "string"}, {"type": "object", "additionalProperties": {"type": "string"}}
_METADATA = {
    "type": "object", "required": ["name"],
    "properties": {"name": _TEXT, "namespace": _TEXT, "labels": _TEXTS, "annotations": _TEXTS},
}  # fmt: skip


def load(path: Path) -> dict[str, Any]:
    """Return a CRD."""
    with gzip.open(path) as file:
        # PyYAML's loader in C, where it was built with it: these files have a megabyte.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        crd: dict[str, Any] = yaml.load(file, Loader=loader)  # noqa: S506 (both are safe)
    return crd


def problems(manifest: Mapping[str, Any], crds: list[dict[str, Any]]) -> list[str]:
    """Return what an API server would refuse, or remove without a word."""
    for crd in crds:
        spec = crd["spec"]
        for version in spec["versions"]:
            if (manifest["apiVersion"], manifest["kind"]) == (
                f"{spec['group']}/{version['name']}",
                spec["names"]["kind"],
            ):
                schema = dict(version["schema"]["openAPIV3Schema"])
                # The schema of this one is the API server's own.
                schema["properties"] = {**schema["properties"], "metadata": _METADATA}
                errors = Draft202012Validator(_strict(schema)).iter_errors(manifest)
                found = [f"{error.json_path.removeprefix('$.')}: {error.message}" for error in errors]
                return found or list(_broken_rules(manifest, schema, ""))
    return [f"no CRD of {manifest['apiVersion']} {manifest['kind']}"]


def _strict(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a CRD's schema as JSON Schema that refuses unknown fields."""
    strict = dict(schema)
    if strict.pop("x-kubernetes-int-or-string", False):
        return {"type": ["integer", "string"], **{key: strict[key] for key in ("pattern",) if key in strict}}
    if "properties" in strict:
        strict["properties"] = {name: _strict(one) for name, one in strict["properties"].items()}
    if isinstance(strict.get("additionalProperties"), dict):
        strict["additionalProperties"] = _strict(strict["additionalProperties"])
    elif strict.get("type") == "object" and not strict.get("x-kubernetes-preserve-unknown-fields"):
        strict["additionalProperties"] = False
    if "items" in strict:
        strict["items"] = _strict(strict["items"])
    return strict


def _broken_rules(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield the CEL rules that a value or a part of it breaks."""
    for entry in schema.get("x-kubernetes-validations", []):
        rule = " ".join(entry["rule"].split())
        if "oldSelf" in rule:
            continue
        try:
            holds = _program(rule).evaluate({"self": json_to_cel(value)})
        except CELEvalError as error:
            yield f"{path}: {rule} cannot be evaluated: {error}"
        else:
            if not holds:
                yield f"{path}: {entry.get('message', rule)}"
    if isinstance(value, dict):
        fields, others = schema.get("properties", {}), schema.get("additionalProperties")
        for name, item in value.items():
            part = fields.get(name, others)
            yield from _broken_rules(item, part if isinstance(part, dict) else {}, f"{path}.{name}".removeprefix("."))
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _broken_rules(item, schema["items"], f"{path}[{number}]")


@cache
def _program(rule: str) -> Runner:
    environment = Environment()
    return environment.program(environment.compile(rule))

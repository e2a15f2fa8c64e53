"""Strict validation of manifests against custom resource definitions (CRDs): no unknown field, all rules.

An API server removes without a word what a schema does not know. Each CEL rule is evaluated by a Python function, which
is found by the rule's own text. A rule that a manifest reaches and that has no function is an error, so that none is
passed over. Rules with `oldSelf` compare with an earlier version of the object, and a new one has none.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

Rule = Callable[[Any], bool]
RULES: dict[str, Rule] = {
    "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')": lambda it: bool(
        re.search("^[a-z]([-a-z0-9]*[a-z0-9])?$", it["metadata"]["name"])
    ),
    "size(self.metadata.name) <= 63": lambda it: len(it["metadata"]["name"]) <= 63,
    "self >= 1": lambda it: bool(it >= 1),
    "[has(self.torch), has(self.mpi), has(self.jax), has(self.xgboost),has(self.flux)].filter(x, x).size() <= 1": (
        lambda it: sum(name in it for name in ("torch", "mpi", "jax", "xgboost", "flux")) <= 1
    ),
    "!(has(self.startupPolicy) && self.startupPolicy.startupPolicyOrder == 'InOrder' && "
    "self.replicatedJobs.exists(x, has(x.dependsOn)))": lambda it: (
        not (
            it.get("startupPolicy", {}).get("startupPolicyOrder") == "InOrder"
            and any("dependsOn" in job for job in it["replicatedJobs"])
        )
    ),
}
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "boolean": (bool,),
    "number": (int, float),
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
                return list(_problems(manifest, schema, ""))
    return [f"no CRD of {manifest['apiVersion']} {manifest['kind']}"]


_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_METADATA = {
    "type": "object", "required": ["name"],
    "properties": {"name": {"type": "string"}, "labels": _TEXTS, "annotations": _TEXTS},
}  # fmt: skip


def _problems(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    if schema.get("x-kubernetes-int-or-string"):
        if not isinstance(value, int | str):
            yield f"{path} is {value!r}, and neither a number nor a string"
        elif "pattern" in schema and not re.search(schema["pattern"], str(value)):
            yield f"{path} is {value!r}, which does not match {schema['pattern']}"
        return
    kind = schema.get("type")
    if kind and (not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        yield f"{path} is {value!r}, and not of type {kind}"
        return
    yield from _of_fields(value, schema, path)
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _problems(item, schema["items"], f"{path}[{number}]")
    yield from _of_value(value, schema, path)
    yield from _of_rules(value, schema, path)


def _of_fields(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        return
    fields, others = schema.get("properties", {}), schema.get("additionalProperties")
    yield from (f"{path}.{name} is missing" for name in schema.get("required", []) if name not in value)
    for name, item in value.items():
        if name in fields:
            yield from _problems(item, fields[name], f"{path}.{name}")
        elif isinstance(others, dict):
            yield from _problems(item, others, f"{path}.{name}")
        elif not others and not schema.get("x-kubernetes-preserve-unknown-fields"):
            yield f"{path}.{name} is not known"


def _of_value(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path} is {value!r}; valid are {schema['enum']}"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{path} is {value!r}, which does not match {schema['pattern']}"
    size = value if isinstance(value, int | float) else len(value)
    for low, high in (("minimum", "maximum"), ("minLength", "maxLength"), ("minItems", "maxItems")):
        if size < schema.get(low, size) or size > schema.get(high, size):
            yield f"{path} is {value!r}, beyond {low} or {high}"


def _of_rules(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    for entry in schema.get("x-kubernetes-validations", []):
        rule = " ".join(entry["rule"].split())
        if "oldSelf" in rule:
            continue
        if rule not in RULES:
            yield f"{path} has a rule that these tests do not know: {rule}"
        elif not RULES[rule](value):
            yield f"{path}: {entry.get('message', rule)}"

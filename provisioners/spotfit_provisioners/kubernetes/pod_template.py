"""Overrides of the pod template by the user: a strategic merge that keeps what agents need.

Objects are merged field by field; a null removes a field. Lists of the table below are merged by
the given field, as the API server does for `kubectl patch`; other lists are replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import ErrorCollector

# `x-kubernetes-patch-merge-key` of PodSpec and Container in the OpenAPI document of Kubernetes:
# https://github.com/kubernetes/kubernetes/blob/master/api/openapi-spec/swagger.json
_MERGE_KEYS: Mapping[str, str] = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
}

_OWN_PREFIXES = ("SPOTFIT_", "spotfit.dev/")
"""Environment variables and labels with these prefixes belong to spotfit."""
_POD_FIELDS = ("restartPolicy", "subdomain", "hostname", "terminationGracePeriodSeconds")
_CONTAINER_FIELDS = ("command", "args", "envFrom", "image")
_OPTION_BY_FIELD = {
    "tolerations": "tolerations",
    "terminationGracePeriodSeconds": "grace_s",
    "image": "image",
}
"""Fields that options set. A list without merge key would replace that of the option."""


def merge_pod_template(
    template: Mapping[str, Any], overrides: Mapping[str, Any], *, container: str
) -> dict[str, Any]:
    """Return `template` with `overrides`, both pod templates with `metadata` and `spec`.

    `container` is the name of the agents' container. Raises `ConfigError`, or `ConfigErrors`, for
    overrides of fields that agents need, and for overrides that are no pod template.
    """
    errors = ErrorCollector()
    for problem, do in _find_problems(overrides, container=container):
        errors.add(ConfigError(f"KubernetesOptions(pod_template=…): {problem}", do=do))
    errors.raise_all()
    merged: dict[str, Any] = _merge(template, overrides, at="template")
    return merged


def _find_problems(overrides: Mapping[str, Any], *, container: str) -> Iterator[tuple[str, str]]:
    """Yield each problem with its remedy."""
    if unknown := sorted(set(overrides) - {"metadata", "spec"}):
        yield (
            f"a pod template has no field {', '.join(unknown)}.",
            "Write the fields of a pod under 'spec', and labels and annotations under 'metadata'.",
        )
    metadata, spec = overrides.get("metadata", {}), overrides.get("spec", {})
    labels = metadata.get("labels", {}) if isinstance(metadata, Mapping) else None
    if not isinstance(labels, Mapping) or not isinstance(spec, Mapping):
        yield (
            "metadata, its labels, and spec must be objects.",
            "Write {'spec': {'hostIPC': true}}.",
        )
        return
    if unknown := sorted(set(metadata) - {"labels", "annotations"}):
        yield (
            f"metadata.{', '.join(unknown)} cannot be set: pods are named by their Job.",
            "Set only labels and annotations.",
        )
    for name in labels:
        if name.startswith(_OWN_PREFIXES):
            yield f"the label {name} belongs to spotfit.", "Choose another name."
    yield from _find_own_fields(spec, (*_POD_FIELDS, "tolerations"), at="spec")
    for name, merge_key in _MERGE_KEYS.items():
        if name in spec and not _has_key(spec[name], merge_key):
            yield (
                f"spec.{name} must be a list of objects with the field {merge_key}.",
                f"Add {merge_key}; the entry with the same {merge_key} is merged, others are "
                "added.",
            )
            return
    for volume in spec.get("volumes") or ():
        if volume["name"] == "shm":
            yield "the volume shm belongs to spotfit.", "Set shared_memory_mib to change its size."
    for one in spec.get("containers") or ():
        if one["name"] == container:
            yield from _find_container_problems(one, at=f"the container {container}")


def _find_container_problems(container: Mapping[str, Any], *, at: str) -> Iterator[tuple[str, str]]:
    yield from _find_own_fields(container, _CONTAINER_FIELDS, at=at)
    for field, merge_key in (("env", "name"), ("volumeMounts", "mountPath")):
        entries = container.get(field, ())
        if not _has_key(entries, merge_key):
            yield f"{field} of {at} must be a list of objects with {merge_key}.", "Add the field."
            return
        for entry in entries:
            key = str(entry[merge_key])
            if key.startswith(_OWN_PREFIXES) or key.rstrip("/") == "/dev/shm":  # noqa: S108
                yield f"{field} of {at}: {key} belongs to spotfit.", "Remove the entry."


def _find_own_fields(
    given: Mapping[str, Any], fields: Sequence[str], *, at: str
) -> Iterator[tuple[str, str]]:
    for field in fields:
        if field in given:
            option = _OPTION_BY_FIELD.get(field)
            do = f"Set KubernetesOptions({option}=…) instead." if option else "Remove the field."
            yield f"{field} of {at} cannot be overridden.", do


def _has_key(entries: Any, merge_key: str) -> bool:
    return isinstance(entries, Sequence) and all(
        isinstance(entry, Mapping) and merge_key in entry for entry in entries
    )


def _merge(base: Any, overrides: Any, *, at: str) -> Any:
    if isinstance(base, Mapping) and isinstance(overrides, Mapping):
        merged = dict(base)
        for name, value in overrides.items():
            if value is None:
                merged.pop(name, None)
            else:
                merged[name] = _merge(merged.get(name), value, at=name)
        return merged
    if isinstance(base, Sequence) and isinstance(overrides, Sequence) and at in _MERGE_KEYS:
        merge_key = _MERGE_KEYS[at]
        by_key = {entry[merge_key]: entry for entry in base}
        for entry in overrides:
            key = entry[merge_key]
            by_key[key] = _merge(by_key.get(key, {}), entry, at="")
        return list(by_key.values())
    return overrides

"""Names, labels and tags that are valid on every cloud."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import ErrorCollector

NAME_PREFIX = "spotfit"
_UNSAFE_CHARACTERS = re.compile(r"[^a-z0-9-]+")


@dataclass(frozen=True, slots=True)
class LabelRules:
    """Limits of a cloud for the labels or tags that users choose."""

    name: re.Pattern[str]
    """Valid names, compared with the whole name."""
    value: re.Pattern[str]
    reserved: tuple[str, ...] = ()
    """Prefixes of names that the cloud or spotfit sets itself."""
    max_count: int = 64
    source: str = ""
    """URL of the cloud's documentation of these limits."""


def to_label(text: str, *, max_length: int = 63) -> str:
    """Return `text` reduced to lower case letters, digits and dashes, without dashes at the ends.

    The default length is the limit of DNS labels, which Kubernetes and Google Cloud share.
    """
    safe = _UNSAFE_CHARACTERS.sub("-", text.lower()).strip("-")
    return safe[:max_length].rstrip("-") or "x"


def allocation_labels(
    prefix: str, *, run: str, run_id: str = "", user: str, project: str
) -> dict[str, str]:
    """Return the labels by which costs are attributed: `<prefix>run`, `<prefix>run-id` and so on.

    `run` is the name of the run, which a later run may have again; its id never is. Values are
    reduced to characters that every cloud accepts; an id, user or project of '' has no label.
    """
    values = {"run": run or "run", "run-id": run_id, "user": user, "project": project}
    return {f"{prefix}{name}": to_label(value) for name, value in values.items() if value}


def check_labels(labels: Mapping[str, str], rules: LabelRules, *, option: str) -> None:
    """Raise `ConfigError`, or `ConfigErrors`, if the cloud would reject `labels`.

    `option` is the name of the option in messages, such as 'GcpBatchOptions(labels=…)'.
    """
    do = f"See {rules.source} for the limits of labels."
    errors = ErrorCollector()
    for name, value in labels.items():
        if not rules.name.fullmatch(name):
            errors.add(ConfigError(f"{option}: {name!r} is not a valid name of a label.", do=do))
        elif name.lower().startswith(rules.reserved):
            prefixes = ", ".join(rules.reserved)
            text = f"{option}: {name!r} is reserved, as all names that begin with {prefixes}."
            errors.add(ConfigError(text, do="Choose another name."))
        if not rules.value.fullmatch(value):
            text = f"{option}: {name!r} has the value {value!r}, which is not valid."
            errors.add(ConfigError(text, do=do))
    if len(labels) > rules.max_count:
        text = f"{option} has {len(labels)} entries; at most {rules.max_count} are possible."
        errors.add(ConfigError(text, do="Remove some of them."))
    errors.raise_all()


def content_addressed_name(body: Any, *, max_length: int = 63) -> str:
    """Return a name derived from the digest of `body`: equal content has an equal name."""
    digest = hashlib.sha256(msgspec.json.encode(body, order="deterministic")).hexdigest()
    return f"{NAME_PREFIX}-{digest[:16]}"[:max_length]

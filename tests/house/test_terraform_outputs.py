"""infra/terraform against the code: outputs are profiles, and roles have minimal permissions."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import types
import typing
from typing import Any

import pytest

from spotfit.host import plugins
from spotfit.provision.profile import PROVISIONER_ENTRY_POINTS
from spotfit_provisioners.kubernetes import checkup as kubernetes
from tests.house.hcl import (
    MODULES,
    NEEDS_TERRAFORM,
    STACKS,
    TERRAFORM,
    TerraformFolder,
    load_folder,
    unquoted,
)
from tests.house.tree import ROOT, text_files

BACKENDS = [module for module in MODULES if module.name in plugins.names(PROVISIONER_ENTRY_POINTS)]
FOLDERS = [load_folder(path) for path in (*MODULES, *STACKS)]
OTHER = "other_"
"""Prefix of outputs that are not options of the backend."""


def name_of(one: Any) -> str:
    return str(one.path.name if isinstance(one, TerraformFolder) else one.name)


@pytest.mark.parametrize("backend", BACKENDS, ids=name_of)
def test_outputs_of_a_module_are_options_of_its_backend(backend: Any) -> None:
    kinds, module = kinds_of_options(backend.name), load_folder(backend)
    outputs = {name: one for name, one in module.outputs.items() if not name.startswith(OTHER)}
    assert outputs
    assert {name: module.kind_of(one["value"]) for name, one in outputs.items()} == {
        name: kinds.get(name, "no option at all") for name in outputs
    }


@pytest.mark.parametrize("path", STACKS, ids=name_of)
def test_outputs_of_a_stack_are_a_profile(path: Any) -> None:
    stack = load_folder(path)
    backend = unquoted(stack.outputs["provisioner"]["value"])
    options: dict[str, Any] = stack.outputs[backend]["value"]
    kinds = kinds_of_options(backend)
    assert {name: stack.kind_of(value) for name, value in options.items()} == {
        name: kinds.get(name, "no option at all") for name in options
    }
    modules = [stack.called_module(name) for name in stack.module_calls]
    (module,) = [module for module in modules if module.path.name == backend]
    assert options.keys() == {name for name in module.outputs if not name.startswith(OTHER)}
    assert stack.kind_of(stack.outputs["storage_path"]["value"]) == "string"


def test_storage_path_of_s3_names_the_region_of_the_bucket() -> None:
    (bucket,) = [module for module in MODULES if module.name == "bucket_s3"]
    value = unquoted(load_folder(bucket).outputs["storage_path"]["value"])
    assert value.endswith("?region=${aws_s3_bucket.runs.region}")


@pytest.mark.parametrize("one", FOLDERS, ids=name_of)
def test_every_terraform_folder_has_its_files(one: TerraformFolder) -> None:
    for name in ("main.tf", "variables.tf", "outputs.tf", "versions.tf"):
        assert (one.path / name).is_file(), name
    assert (one.path / "README.md").is_file() or one.path in STACKS
    (required,) = one.blocks["terraform"]
    (providers,) = required["required_providers"]
    bounds = [
        provider["version"] for name, provider in providers.items() if not name.startswith("__")
    ]
    assert bounds
    assert all(">=" in bound and "<" in bound for bound in bounds)


@pytest.mark.parametrize("one", FOLDERS, ids=name_of)
def test_every_terraform_reference_resolves(one: TerraformFolder) -> None:
    """The part of `terraform validate` that needs no providers."""
    assert named(one, r"\bvar\.(\w+)") == one.variables.keys()
    assert named(one, r"\blocal\.(\w+)") == one.locals.keys()
    assert named(one, r"\bdata\.(\w+\.\w+)") <= one.declared_names("data")
    providers = {type_.partition("_")[0] for type_ in one.declared_names("resource")}
    for provider in providers:
        mentioned = named(one, rf"(?<![\w.\"])({provider}_\w+\.\w+)\b")
        assert mentioned <= one.declared_names("resource")
    for name, call in one.module_calls.items():
        inner = one.called_module(name)
        arguments = {key for key in call if not key.startswith("__")} - {"source", "count"}
        needed = {key for key, variable in inner.variables.items() if "default" not in variable}
        assert needed <= arguments <= inner.variables.keys()
        assert named(one, rf"\bmodule\.{name}(?:\[0\])?\.(\w+)") <= inner.outputs.keys()


@pytest.mark.parametrize("one", FOLDERS, ids=name_of)
def test_every_terraform_variable_has_a_description(one: TerraformFolder) -> None:
    for name, variable in one.variables.items():
        assert variable.keys() >= {"description", "type"}, name


@NEEDS_TERRAFORM
def test_terraform_files_are_formatted() -> None:
    command = ["terraform", "fmt", "-check", "-recursive", str(TERRAFORM)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_every_reference_to_a_terraform_folder_resolves() -> None:
    pointer = re.compile(r"infra/terraform/(?:modules|stacks)/[a-z0-9_]+")
    readable = [path for path in text_files() if path.suffix in {".md", ".py"}]
    pointers = {found for path in readable for found in pointer.findall(path.read_text())}
    assert pointers
    wrong = {one for one in pointers if not (ROOT / one).is_dir()}
    assert not wrong - {"infra/terraform/modules/sweeper_"}


# ── minimal permissions: exactly those that the code needs ────────────────────────────────────────


def test_aws_controller_policy_allows_the_calls_of_the_client() -> None:
    client = (ROOT / "provisioners/spotfit_provisioners/aws_batch/client.py").read_text()
    calls = set(re.findall(r"self\._batch\.(\w+)\(", client)) - {"get_paginator"}
    calls |= set(re.findall(r"_batch\.get_paginator\(\"(\w+)\"", client))
    actions = {f"batch:{''.join(map(str.capitalize, call.split('_')))}" for call in calls}
    actions |= {"logs:GetLogEvents", "ec2:DescribeSpotPriceHistory", "ec2:GetSpotPlacementScores"}
    actions |= {"pricing:GetProducts"}
    for_tags_and_roles = {"batch:TagResource", "iam:PassRole"}
    text = (TERRAFORM / "modules/aws_batch/main.tf").read_text()
    policy = text[text.index('"controller" {') :].replace("iam:PassedToService", "")
    assert (
        set(re.findall(r'"((?:batch|ec2|iam|logs|pricing):\w+)"', policy))
        == actions | for_tags_and_roles
    )
    guide = (ROOT / "docs/guides/aws_batch.md").read_text()
    assert set(re.findall(r"`((?:batch|iam):\w+)`", guide)) <= actions | for_tags_and_roles


@pytest.mark.parametrize(
    ("action", "variable"),
    [
        ("batch:TagResource", "aws:RequestTag/spotfit:queue"),
        ("batch:TerminateJob", "aws:ResourceTag/spotfit:queue"),
    ],
)
def test_aws_controllers_tag_and_terminate_only_jobs_of_their_queue(
    action: str, variable: str
) -> None:
    """Ids of jobs are random: without the condition, the permission is for all jobs."""
    (controller,) = [
        named['"controller"']
        for block in load_folder(TERRAFORM / "modules/aws_batch").blocks["data"]
        for named in block.values()
        if '"controller"' in named
    ]
    (statement,) = [
        one for one in controller["statement"] if action in map(unquoted, one["actions"])
    ]
    (condition,) = statement["condition"]
    assert unquoted(condition["test"]) == "StringEquals"
    assert unquoted(condition["variable"]) == variable
    assert condition["values"] == "${values(local.queues)}"


def test_google_roles_are_those_of_the_guide() -> None:
    text = (TERRAFORM / "modules/gcp_batch/main.tf").read_text()
    text += (TERRAFORM / "modules/bucket_gcs/main.tf").read_text()
    guide = (ROOT / "docs/guides/gcp_batch.md").read_text()
    assert set(re.findall(r'"(roles/[\w.]+)"', text)) == set(re.findall(r"`(roles/[\w.]+)`", guide))


def test_azure_roles_are_those_of_the_guide() -> None:
    text = (TERRAFORM / "modules/azure_batch/main.tf").read_text()
    text += (TERRAFORM / "modules/bucket_azure/main.tf").read_text()
    guide = (ROOT / "docs/guides/azure_batch.md").read_text()
    table = guide[guide.index("| who | role |") :].partition("\n\n")[0]
    roles = {line.split("|")[2].strip(" `") for line in table.splitlines()[2:]}
    assert set(re.findall(r'role(?:_definition_name)?\s*=\s*"([^"]+)"', text)) == roles


def test_kubernetes_role_has_the_permissions_of_the_doctor() -> None:
    (role,) = [
        named['"controller"']
        for block in load_folder(TERRAFORM / "modules/kubernetes").blocks["resource"]
        for type_, named in block.items()
        if unquoted(type_) == "kubernetes_role_v1"
    ]
    granted = {
        (unquoted(verb), unquoted(group), unquoted(resource))
        for rule in role["rule"]
        for group in rule["api_groups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    expected = {
        (permission.verb, permission.group, permission.description.partition(" ")[2])
        for permission in kubernetes.PROVISION_PERMISSIONS
    }
    assert granted == expected


# ── helpers ───────────────────────────────────────────────────────────────────────────────────────


def kinds_of_options(backend: str) -> dict[str, str]:
    options = plugins.load(PROVISIONER_ENTRY_POINTS, backend).Options
    hints = typing.get_type_hints(options)
    return {field.name: kind_of_hint(hints[field.name]) for field in dataclasses.fields(options)}


def kind_of_hint(hint: Any) -> str:
    origin = typing.get_origin(hint) or hint
    if origin in (typing.Union, types.UnionType):
        return kind_of_hint(next(one for one in typing.get_args(hint) if one is not type(None)))
    kinds = {
        tuple: "list",
        dict: "map",
        bool: "bool",
        int: "number",
        float: "number",
        str: "string",
    }
    return kinds.get(origin, "string")


def named(one: TerraformFolder, pattern: str) -> set[str]:
    """Return all names in the text that match the pattern."""
    return set(re.findall(pattern, one.text))

"""`spotfit.toml` is written from terraform outputs or answers, and is what `fit()` reads."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from spotfit.client.profile_file import (
    NewProfile,
    backend_questions,
    check_profile,
    profile_from_terraform,
    read_terraform_folder,
    render_profile,
    write_profile,
)
from spotfit.core.errors import ConfigError
from spotfit.provision.profile import provisioner_from_profile, resolve_options

IMAGE = "registry/spotfit:{spotfit}-py{python}-torch{torch}-cpu"


def terraform_outputs(**changes: Any) -> bytes:
    """In the format of `terraform output -json`."""
    outputs = {
        "provisioner": "aws_batch",
        "storage_path": "s3://runs/runs",
        "repository": "registry/spotfit",
        "aws_batch": {
            "queues": ["spotfit-spot"],
            "region": "eu-west-1",
            "image": IMAGE,
            "job_role": "",
            "log_group": None,
        },
        **changes,
    }
    return json.dumps(
        {name: {"sensitive": False, "type": "string", "value": v} for name, v in outputs.items()}
    ).encode()


def test_terraform_outputs_become_a_profile_that_fit_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = check_profile(profile_from_terraform(terraform_outputs(), "x"))
    write_profile(profile, tmp_path / "spotfit.toml")
    monkeypatch.chdir(tmp_path)
    assert provisioner_from_profile() == "aws_batch"
    options = resolve_options("aws_batch", {})
    assert options["queues"] == ("spotfit-spot",)
    assert "py3." in options["image"], "placeholders are replaced when the profile is read"
    written = tomllib.loads((tmp_path / "spotfit.toml").read_text())
    assert written["aws_batch"] == {
        "queues": ["spotfit-spot"],
        "region": "eu-west-1",
        "image": IMAGE,
    }
    assert "s3://runs/runs" in (tmp_path / "spotfit.toml").read_text()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "is not the output of `terraform output -json`"),
        (b"[]", "is not the output of `terraform output -json`"),
        (b"{}", "its outputs are: none"),
        (terraform_outputs(provisioner="gcp_batch"), "has no outputs `provisioner`"),
    ],
)
def test_other_texts_are_not_outputs_of_a_stack(text: bytes, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        profile_from_terraform(text, "outputs.json")
    assert "outputs.json" in str(caught.value)
    assert caught.value.do


def test_answers_become_values_of_the_types_of_the_options() -> None:
    answers = {"queues": "a, b", "image": "i", "workers_per_node": "4"}
    checked = check_profile(NewProfile(provisioner="aws_batch", options=answers))
    assert checked.options == {"queues": ("a", "b"), "image": "i", "workers_per_node": 4}


def test_values_survive_in_toml() -> None:
    options = {
        "text": 'a "quoted" \\ line\nü',
        "list": ["a", "b"],
        "table": {"a b": 1, "c": {"d": True}},
        "number": 1.5,
    }
    text = render_profile(NewProfile(provisioner="x", options=options, storage_path='s3://"b"'))
    assert tomllib.loads(text) == {"provisioner": "x", "x": options}
    assert tomllib.loads(render_profile(NewProfile(provisioner="x"))) == {"provisioner": "x"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"queues": ["a"]}, "image not set"),
        ({"queues": ["a"], "image": "i", "atempts": 3}, "has no option 'atempts'"),
        ({"queues": ["a"], "image": "i", "attempts": 99}, "must be from 1 to 10"),
    ],
)
def test_invalid_profile_is_rejected_as_by_fit(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_profile(NewProfile(provisioner="aws_batch", options=options))


def test_existing_file_is_replaced_only_by_force(tmp_path: Path) -> None:
    path = tmp_path / "spotfit.toml"
    path.write_text("mine")
    profile = NewProfile(provisioner="local")
    with pytest.raises(ConfigError, match="exists already") as caught:
        write_profile(profile, path)
    assert "--force" in caught.value.do
    assert path.read_text() == "mine"
    write_profile(profile, path, force=True)
    assert 'provisioner = "local"' in path.read_text()


def test_file_in_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_profile(NewProfile(provisioner="local"), tmp_path / "no" / "spotfit.toml")


@pytest.mark.parametrize("name", ["aws_batch", "gcp_batch", "azure_batch", "kubernetes"])
def test_questions_are_options_of_the_backend(name: str) -> None:
    """All of them are accepted as text, and enough for a plan."""
    answers = dict.fromkeys(backend_questions(name), "x") | {"flavour": "gke"}
    known = {option: answers[option] for option in backend_questions(name)}
    assert check_profile(NewProfile(provisioner=name, options=known)).options


def test_unknown_backend_is_reported_with_the_closest_one() -> None:
    with pytest.raises(ConfigError, match="aws_batch"):
        backend_questions("aws_bach")


def test_missing_or_failing_terraform_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="not installed"):
        read_terraform_folder(tmp_path)
    fake = tmp_path / "terraform"
    fake.write_text(
        '#!/bin/sh\nif [ "$1" = -chdir=/stack ]; then echo "$2 $3"; exit; fi\n'
        'echo "no state" >&2; exit 1\n'
    )
    fake.chmod(0o755)
    with pytest.raises(ConfigError, match="no state") as caught:
        read_terraform_folder(tmp_path)
    assert "terraform apply" in caught.value.do
    assert read_terraform_folder(Path("/stack")) == b"output -json\n"

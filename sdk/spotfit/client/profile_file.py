"""Writes `spotfit.toml` for `spotfit init`, from terraform outputs or from answers.

The options are checked as by `fit()`, without network, before the file is written.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.core.input_checks import did_you_mean
from spotfit.host import plugins
from spotfit.model.group import GroupRequest
from spotfit.provision.profile import (
    PROVISIONER_ENTRY_POINTS,
    open_provisioner,
    parse_options,
    parse_terraform_outputs,
)

PROFILE_NAME = "spotfit.toml"
_TERRAFORM_TIMEOUT_S = 300.0


class NewProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a `spotfit.toml` that `spotfit init` writes."""

    provisioner: str
    options: dict[str, Any] = {}
    """Plain data by option name."""
    storage_path: str = ""
    """Value for `RunConfig(storage_path=…)`, which is not part of a profile; written as a hint."""


def backend_names() -> list[str]:
    """Return the names of the installed backends."""
    return sorted(plugins.names(PROVISIONER_ENTRY_POINTS))


def backend_questions(name: str) -> Mapping[str, str]:
    """Return the options of the backend that a first profile needs, each with its question.

    They are those of `Options.questions`; empty for a backend without them. Raises `ConfigError`
    for an unknown backend.
    """
    names = backend_names()
    if name not in names:
        raise ConfigError(
            f"There is no provisioner {name!r}. {did_you_mean(name, names)}".rstrip(),
            do=f"Choose one of {', '.join(names)}.",
        )
    options_class = getattr(plugins.load(PROVISIONER_ENTRY_POINTS, name), "Options", None)
    return dict(getattr(options_class, "questions", {}))


def profile_from_terraform(text: bytes, source: str) -> NewProfile:
    """Return the profile in the output of `terraform output -json`.

    `source` describes where it comes from, for messages. Raises `ConfigError` if it is not the
    output of one of the stacks in infra/terraform.
    """
    try:
        outputs = parse_terraform_outputs(text)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{source} is not the output of `terraform output -json`: {error}.",
            do="Run `terraform output -json` in the folder of a stack that has been applied.",
        ) from error
    name = outputs.get("provisioner")
    options = outputs.get(name) if isinstance(name, str) else None
    if not isinstance(name, str) or not isinstance(options, Mapping):
        found = ", ".join(outputs) or "none"
        raise ConfigError(
            f"{source} has no outputs `provisioner` and its options; its outputs are: {found}.",
            do="Apply one of infra/terraform/stacks, or add the outputs that they have.",
        )
    given = {key: value for key, value in options.items() if value not in (None, "", [], {})}
    storage = outputs.get("storage_path", "")
    return NewProfile(provisioner=name, options=given, storage_path=str(storage))


def read_terraform_folder(folder: Path) -> bytes:
    """Return the output of `terraform output -json` in `folder`. Raises `ConfigError`."""
    command = ["terraform", f"-chdir={folder}", "output", "-json"]
    try:
        done = subprocess.run(  # noqa: S603  # arguments are our own, without a shell
            command, capture_output=True, check=False, timeout=_TERRAFORM_TIMEOUT_S
        )
    except FileNotFoundError as error:
        raise ConfigError(
            "`terraform` is not installed, or is not in PATH.",
            do="Install it, or pass its outputs in a file: --terraform-output FILE.",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"`{' '.join(command)}` did not end within {_TERRAFORM_TIMEOUT_S:g} s.",
            do="Run it by hand, and pass its output in a file: --terraform-output FILE.",
        ) from error
    if done.returncode != 0:
        message = done.stderr.decode(errors="replace").strip()
        raise ConfigError(
            f"`{' '.join(command)}` failed: {message}",
            do="Run `terraform init` and `terraform apply` in that folder first.",
        )
    return done.stdout


def check_profile(profile: NewProfile) -> NewProfile:
    """Return the profile with options of the right types, checked as by `fit()`.

    Text of options that contain placeholders, such as `{python}` in an image name, is kept. Raises
    `ConfigError`, or `ConfigErrors` for several invalid options.
    """
    provisioner_class = plugins.load(PROVISIONER_ENTRY_POINTS, profile.provisioner)
    options_class = getattr(provisioner_class, "Options", None)
    given = profile.options
    if options_class is not None:
        parsed = parse_options(options_class, given)
        values = {name: getattr(parsed, name) for name in given}
        # A text that was converted, such as 'a,b' for a list, is written in its own type.
        given = {
            name: given[name] if isinstance(value, str) else msgspec.to_builtins(value)
            for name, value in values.items()
        }
    request = GroupRequest(token=Token("t-init"), num_workers=1, total_workers=1, run_name="init")
    # Finds options that are missing; it sends no request.
    open_provisioner(profile.provisioner, given).plan(request)
    return msgspec.structs.replace(profile, options=given)


def write_profile(profile: NewProfile, path: Path, *, force: bool = False) -> None:
    """Write the profile as TOML. Raises `ConfigError` if the file exists, unless `force`."""
    text = render_profile(profile)
    try:
        # 'x' fails for an existing file, also if another process creates it at this moment.
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise _exists_error(path) from error
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror or error}.",
            do="Choose another file with --output.",
        ) from error


def require_new_file(path: Path) -> None:
    """Raise `ConfigError` if the file exists. `write_profile` checks it again."""
    if path.exists():
        raise _exists_error(path)


def _exists_error(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} exists already.",
        do="Edit it, write to another file with --output, or replace it with --force.",
    )


def render_profile(profile: NewProfile) -> str:
    """Return the text of `spotfit.toml`."""
    storage = profile.storage_path
    hint = f"# Storage: RunConfig(storage_path={_to_toml(storage)})\n" if storage else ""
    options = "".join(f"{name} = {_to_toml(value)}\n" for name, value in profile.options.items())
    table = f"\n[{profile.provisioner}]\n{options}" if options else ""
    return (
        "# Written by `spotfit init`. Options: docs/guides/backends.md\n"
        f"{hint}provisioner = {_to_toml(profile.provisioner)}\n{table}"
    )


def _to_toml(value: Any) -> str:
    if isinstance(value, Mapping):
        entries = [f"{_to_toml(str(key))} = {_to_toml(one)}" for key, one in value.items()]
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(_to_toml, value)) + "]"
    # The escapes of JSON texts, numbers and booleans are valid in TOML as well.
    return msgspec.json.encode(value).decode()

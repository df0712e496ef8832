"""`spotfit init`: write `spotfit.toml` from terraform outputs, or by asking."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from spotfit.cli import render
from spotfit.client.profile_file import (
    PROFILE_NAME,
    NewProfile,
    backend_names,
    backend_questions,
    check_profile,
    profile_from_terraform,
    read_terraform_folder,
    require_new_file,
    write_profile,
)
from spotfit.core.errors import ConfigError


def init(
    terraform_output: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="Output of `terraform output -json`; '-' reads standard input."
        ),
    ] = "",
    terraform: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Run `terraform output -json` in this folder."),
    ] = None,
    provisioner: Annotated[
        str, typer.Option(help="The backend to ask about; default: ask for it.")
    ] = "",
    output: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")] = Path(
        PROFILE_NAME
    ),
    force: Annotated[  # noqa: FBT002 - a flag of the command line
        bool, typer.Option("--force", help="Replace an existing file.")
    ] = False,
) -> None:
    """Write spotfit.toml from the outputs of a stack in infra/terraform, or by asking.

    The options are checked without network; `spotfit doctor` then checks the account.
    """
    if terraform_output and terraform is not None:
        raise ConfigError(
            "--terraform-output cannot be combined with --terraform.", do="Choose one of them."
        )
    if not force:
        require_new_file(output)  # before the questions, whose answers would be lost
    if terraform_output == "-":
        profile = profile_from_terraform(sys.stdin.buffer.read(), "standard input")
    elif terraform_output:
        profile = profile_from_terraform(_read(terraform_output), terraform_output)
    elif terraform is not None:
        profile = profile_from_terraform(read_terraform_folder(terraform), str(terraform))
    else:
        profile = _prompt(provisioner)
    write_profile(check_profile(profile), output, force=force)
    storage = f" --storage {profile.storage_path}" if profile.storage_path else ""
    render.success(f"Wrote {output} for {profile.provisioner}.")
    render.lines([f"Next, check the account: spotfit doctor{storage}"])


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"--terraform-output {path}: the file cannot be read: {error.strerror or error}.",
            do="Write it with `terraform output -json > FILE`.",
        ) from error


def _prompt(provisioner: str) -> NewProfile:
    if not _is_terminal():
        raise ConfigError(
            "`spotfit init` asks for settings, but standard input is not a terminal.",
            do="Pass --terraform-output FILE or --terraform FOLDER, or write spotfit.toml by hand.",
        )
    if not provisioner:
        render.lines([f"Backends: {', '.join(backend_names())}"])
        provisioner = str(typer.prompt("Backend", default="aws_batch"))
    answers = {
        option: str(typer.prompt(question, default="", show_default=False)).strip()
        for option, question in backend_questions(provisioner).items()
    }
    storage = typer.prompt(
        "Storage path of runs, such as s3://bucket/runs", default="", show_default=False
    )
    options = {option: answer for option, answer in answers.items() if answer}
    return NewProfile(provisioner=provisioner, options=options, storage_path=str(storage).strip())


def _is_terminal() -> bool:
    return sys.stdin.isatty()

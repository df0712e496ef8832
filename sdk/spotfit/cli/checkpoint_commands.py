"""List, show, export and delete the checkpoints of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spotfit.cli import json_fields, render
from spotfit.client.stored_checkpoints import (
    describe_checkpoint,
    export_checkpoint,
    list_checkpoints,
    remove_checkpoint,
)

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
Url = Annotated[
    str, typer.Argument(metavar="URL", help="Directory of the run: <storage_path>/<name>.")
]
Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the checkpoint; default: the latest.")
]

AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON, one object per line, for other programs.")
]


@app.command("ls")
def list_all(url: Url, as_json: AsJson = False) -> None:  # noqa: FBT002 - an option
    """List the stored checkpoints of a run, oldest first: name, step, size and metrics."""
    stored = list_checkpoints(url)
    if as_json:
        render.json_lines(map(json_fields.of_checkpoint, stored))
        return
    # An empty output would look like a failure.
    if not stored:
        render.lines(["The run has no checkpoints."])
    render.checkpoints(stored)


@app.command()
def show(url: Url, name: Name = "", as_json: AsJson = False) -> None:  # noqa: FBT002 - an option
    """Show size, metrics and content of a checkpoint, and why it was saved."""
    described = describe_checkpoint(url, name)
    if as_json:
        render.json_lines([json_fields.of_checkpoint(described)])
    else:
        render.checkpoint(described)


@app.command()
def export(
    url: Url,
    to: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="Output file: .safetensors, or .pt for the torch.save format."
        ),
    ],
    name: Annotated[str, typer.Option(help="Name of the checkpoint; default: the latest.")] = "",
    full_state: Annotated[  # noqa: FBT002 - an option of the command line
        bool, typer.Option("--all", help="Include the optimizer and all other state; .pt only.")
    ] = False,
) -> None:
    """Write the model of a checkpoint to one file that does not need spotfit to be read."""
    exported = export_checkpoint(url, name, to, full_state=full_state)
    render.success(f"Exported {exported} to {to}.")


# The name is required, unlike in the other commands: a forgotten one must not delete the latest.
@app.command("rm")
def delete(
    url: Url, name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the checkpoint.")]
) -> None:
    """Delete a checkpoint of a run that has ended, from the journal and the storage."""
    render.success(f"Deleted {remove_checkpoint(url, name)}.")

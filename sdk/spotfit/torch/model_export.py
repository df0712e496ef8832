"""Export of a torch model as a program for serving: `torch.export` or ONNX."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotfit.core.errors import ConfigError
from spotfit.host.plugins import require_module

if TYPE_CHECKING:
    import torch

PROGRAM_SUFFIXES = (".pt2", ".onnx")
# A file of protobuf is limited to 2 GiB. Above this, ONNX keeps the weights in a second file.
_MAX_INLINE_BYTES = 2**30


def export_model(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    example_inputs: tuple[Any, ...],
    *,
    dynamic_batch: bool = True,
) -> None:
    """Write a model with its weights to a file that is executed without its Python code.

    The suffix selects the format: `.pt2` for `torch.export.load`, or `.onnx`, which needs the
    packages onnx and onnxscript. Existing files are replaced; those with weights beside a large
    ONNX model, `<name>.data`, before the file itself.

    Args:
        model: It is exported in evaluation mode, and its mode is restored. In ONNX the inputs have
            the names of its arguments; the output is "output", or has the keys of a dictionary.
        path: A local file; its directory is created.
        example_inputs: The arguments of a call, with a first dimension of at least 2.
        dynamic_batch: Whether the first dimension of each tensor may have any size.

    Raises `ConfigError` for another suffix, a model that cannot be exported or a file that cannot
    be written, and `MissingExtraError`.
    """
    target = check_program_path(path)
    if not isinstance(example_inputs, tuple):
        raise ConfigError(
            f"example_inputs= must be a tuple of arguments, not a {type(example_inputs).__name__}.",
            do="Write example_inputs=(batch,).",
        )
    if target.suffix == ".onnx":
        for package in ("onnx", "onnxscript"):
            require_module(package, extra="onnx")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=target.parent) as folder:
            with _evaluation_mode(model):
                shapes = _dynamic_shapes(model, example_inputs) if dynamic_batch else None
                _write_program(model, Path(folder, target.name), example_inputs, shapes)
            # The data first: a reader of the model finds its weights.
            for part in sorted(Path(folder).iterdir(), key=lambda one: one.name == target.name):
                part.replace(target.with_name(part.name))
    except OSError as error:
        raise ConfigError(
            f"The output file {target} cannot be written: {error.strerror or error}.",
            do="Choose a directory with write permission and enough space for the model.",
        ) from error


def check_program_path(path: str | os.PathLike[str]) -> Path:
    """Return the path if its suffix is that of a program. Raises `ConfigError`."""
    target = Path(path)
    if target.suffix not in PROGRAM_SUFFIXES:
        raise ConfigError(
            f"The suffix {target.suffix!r} of the output file {target} does not select a format.",
            do="Pass a file name that ends with .pt2 for torch.export, or with .onnx.",
        )
    return target


@contextmanager
def _evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes.items():
            module.training = is_training


def _write_program(
    model: torch.nn.Module,
    path: Path,
    example_inputs: tuple[Any, ...],
    shapes: dict[str, Any] | None,
) -> None:
    import torch

    try:
        exported = torch.export.export(model, example_inputs, dynamic_shapes=shapes)
    # Each feature of Python that torch.export does not support has an exception of its own.
    except Exception as error:
        raise ConfigError(
            f"torch.export cannot export the model: {type(error).__name__}: {error}",
            do="Change the code of the model as the message says; if its first dimension is fixed, "
            "pass dynamic_batch=False.",
        ) from error
    if path.suffix == ".pt2":
        torch.export.save(exported, path)
        return
    size_bytes = sum(one.numel() * one.element_size() for one in exported.state_dict.values())
    with torch.no_grad():
        names = _output_names(model(*example_inputs))
    torch.onnx.export(
        exported,
        f=path,
        external_data=size_bytes > _MAX_INLINE_BYTES,
        output_names=names,
        verbose=False,
        dynamo=True,
    )


def _output_names(output: Any) -> list[str]:
    """Return "output", the keys of a dictionary, or "output_0" and so on."""
    match output:
        case Mapping():
            return [str(name) for name in output]
        case list() | tuple():
            return [f"output_{n}" for n in range(len(output))]
        case _:
            return ["output"]


def _dynamic_shapes(model: torch.nn.Module, example_inputs: tuple[Any, ...]) -> dict[str, Any]:
    """Return the same dynamic first dimension for each tensor among the arguments."""
    import torch

    batch = torch.export.Dim("batch")

    def shape_of(value: Any) -> Any:
        match value:
            case torch.Tensor():
                return {0: batch} if value.ndim else None
            case Mapping():
                return {name: shape_of(one) for name, one in value.items()}
            case list() | tuple():
                return [shape_of(one) for one in value]
            case _:
                return None

    arguments = inspect.signature(model.forward).bind(*example_inputs).arguments
    return {name: shape_of(value) for name, value in arguments.items()}

"""Layouts of model servers: a Triton model repository, and the folders that KServe reads.

The conventions are those of the documentation of Triton Inference Server and of KServe's servers.
Data is written first; the file that makes a model visible to a server comes last.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.core.errors import ConfigError
from spotfit.core.ids import parse_name
from spotfit.core.input_checks import did_you_mean
from spotfit.host.plugins import require_module
from spotfit.store.api import Store
from spotfit.store.factory import open_store

Layout = Literal["kserve", "triton"]

_CONFIG = "config.pbtxt"
# KServe's servers take the only file with one of their suffixes; all versions of those for XGBoost
# and LightGBM know ".bst".
_KSERVE_NAMES = {
    ".joblib": "model.joblib",
    ".pkl": "model.pkl",
    ".ubj": "model.bst",
    ".json": "model.bst",
    ".bst": "model.bst",
    ".txt": "model.bst",
}
# Numbers of onnx.TensorProto.DataType and Triton's names.
_TRITON_TYPES = {
    1: "TYPE_FP32",
    2: "TYPE_UINT8",
    3: "TYPE_INT8",
    4: "TYPE_UINT16",
    5: "TYPE_INT16",
    6: "TYPE_INT32",
    7: "TYPE_INT64",
    8: "TYPE_STRING",
    9: "TYPE_BOOL",
    10: "TYPE_FP16",
    11: "TYPE_FP64",
    12: "TYPE_UINT32",
    13: "TYPE_UINT64",
    16: "TYPE_BF16",
}


def export_for_serving(
    source: Checkpoint | str | PathLike[str],
    url: str | PathLike[str],
    *,
    layout: Layout,
    name: str | None = None,
    config: str | None = None,
) -> str:
    """Copy a model to the folder that a model server reads; return the URL of what was written.

    Args:
        source: A model file, or a folder or checkpoint with one. KServe also reads a folder of
            Hugging Face's `save_pretrained`.
        url: With "triton" the model repository, which may have other models and versions; with
            "kserve" a new folder, the `storageUri`. KServe serves an ONNX model by Triton: then the
            folder becomes a model repository.
        layout: "triton" or "kserve".
        name: Of the model in a repository; by default that of the file.
        config: The text of config.pbtxt. Generated for ONNX models, which needs the package onnx.

    A model that is in the repository already gets the next version. Raises `ConfigError` for an
    unsuitable source or a folder that has a model, `MissingExtraError` and `StoreError`.
    """
    if layout not in ("kserve", "triton"):
        raise ConfigError(
            f"layout={layout!r} is unknown.", do=did_you_mean(str(layout), ("kserve", "triton"))
        )
    store = open_store(str(fspath(url)), setting="The URL of the model server's folder")
    with _local_path(source) as path:
        is_pretrained = path.is_dir() and (path / "config.json").exists()
        if layout == "kserve" and is_pretrained:
            _check_empty(store)
            _copy_pretrained(path, store)
            return store.url
        file = path if path.is_file() else _find_model(path)
        if layout == "kserve" and file.suffix in _KSERVE_NAMES:
            _check_empty(store)
            store.put_file(_KSERVE_NAMES[file.suffix], file)
            return store.url
        model_name = parse_name(name or file.stem, what="export_for_serving(name=...):")
        return _add_to_repository(file, store.subtree(model_name), model_name, config)


@contextmanager
def _local_path(source: Checkpoint | str | PathLike[str]) -> Iterator[Path]:
    if isinstance(source, Checkpoint):
        with source.as_directory() as directory:
            yield Path(directory)
        return
    path = Path(source).expanduser()
    if not path.exists():
        raise ConfigError(
            f"The model {path} does not exist.",
            do="Pass the path of a model file or folder, or a Checkpoint.",
        )
    yield path


def _find_model(folder: Path) -> Path:
    known = {".onnx", *_KSERVE_NAMES}
    found = [path for path in sorted(folder.iterdir()) if path.suffix in known]
    models = [path for path in found if path.stem == "model"] or found
    if len(models) != 1:
        raise ConfigError(
            f"The folder {folder} has {len(models)} model files; one is needed.",
            do=f"Pass the file. Known suffixes: {', '.join(sorted(known))}.",
        )
    return models[0]


def _check_empty(store: Store) -> None:
    if any(True for _ in store.list()):
        raise ConfigError(
            f"The folder {store.url} is not empty: KServe reads one model per folder.",
            do="Pass a new folder, such as one per version.",
        )


def _copy_pretrained(folder: Path, store: Store) -> None:
    """Copy the files of `save_pretrained`; config.json last, by which servers find the model."""
    for path in sorted(folder.rglob("*"), key=lambda one: one == folder / "config.json"):
        if path.is_file():
            store.put_file(path.relative_to(folder).as_posix(), path)


# --- Triton ---------------------------------------------------------------------------------------


def _add_to_repository(file: Path, store: Store, name: str, config: str | None) -> str:
    """Write the next version of the model `name`, whose folder is `store`; return its URL."""
    weights: Sequence[Path] = ()
    if file.suffix == ".onnx":
        model = require_module("onnx", extra="onnx").load(file, load_external_data=False)
        weights = _external_files(model, file.parent)
        config = config or _onnx_config(model, name)
    if config is None:
        raise ConfigError(
            f"Triton needs a config.pbtxt for {file.name}; spotfit generates it for ONNX only.",
            do="Export the model to ONNX with spotfit.torch.export_model, or pass config=.",
        )
    folder = store.subtree(str(_next_version(store)))
    for path in weights:
        folder.put_file(path.name, path)
    folder.put_file(f"model{file.suffix}", file)
    store.put(_CONFIG, config.encode())
    return folder.url


def _next_version(store: Store) -> int:
    versions = (re.match(r"(\d+)/", info.key) for info in store.list())
    return max((int(found[1]) for found in versions if found), default=0) + 1


def _external_files(model: Any, folder: Path) -> list[Path]:
    """Return the files with weights beside an ONNX model."""
    locations = {
        entry.value
        for tensor in model.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return [folder / Path(location).name for location in sorted(locations)]


def _onnx_config(model: Any, name: str) -> str:
    """Return the text of config.pbtxt: every shape complete, -1 for a dynamic dimension."""
    inputs = ",\n".join(_tensor_config(value) for value in model.graph.input)
    outputs = ",\n".join(_tensor_config(value) for value in model.graph.output)
    return (
        f'name: "{name}"\nbackend: "onnxruntime"\nmax_batch_size: 0\n'
        f"input [\n{inputs}\n]\noutput [\n{outputs}\n]\n"
    )


def _tensor_config(value: Any) -> str:
    tensor = value.type.tensor_type
    if tensor.elem_type not in _TRITON_TYPES:
        raise ConfigError(
            f"Triton has no type for the tensor {value.name!r} of the ONNX model.",
            do="Change its dtype in the model, or pass config=.",
        )
    dims = ", ".join(
        str(dim.dim_value) if dim.HasField("dim_value") else "-1" for dim in tensor.shape.dim
    )
    data_type = _TRITON_TYPES[tensor.elem_type]
    return f'  {{ name: "{value.name}", data_type: {data_type}, dims: [ {dims} ] }}'

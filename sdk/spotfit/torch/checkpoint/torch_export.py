"""Export of a snapshot, merged from the shards of all ranks: a torch.save file or a program."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spotfit.checkpoint.export import reject_missing_weights, tensor_pieces
from spotfit.checkpoint.format import TensorPiece
from spotfit.checkpoint.reader import ReadRequest, SavedState, whole_piece_sink
from spotfit.core.errors import ConfigError
from spotfit.store.local import atomic_write
from spotfit.torch.checkpoint.load_plan import narrow_to_box, piece_as_tensor, torch_dtype
from spotfit.torch.checkpoint.save_plan import decode_values
from spotfit.torch.checkpoint.training_state import StateDict, insert_tensors, set_by_key
from spotfit.torch.model_export import export_model


def export_torch(saved: SavedState, path: Path, *, everything: bool = False) -> None:
    """Write the model's state dict, or with `everything` the whole state, in torch.save format.

    `torch.load(path)` reads the file, which is replaced atomically. Holds the tensors in main
    memory, and blocks while they are read. Raises `IntegrityError` if bytes are missing or corrupt,
    and `OSError` if the file cannot be written.
    """
    state = assemble_state(saved) if everything else assemble_state(saved, section="model")
    # A file object, because torch.save rejects the name of the temporary file.
    with atomic_write(path) as temporary, temporary.open("xb") as file:
        torch.save(state if everything else state["model"], file)


def export_program(
    saved: SavedState,
    path: str | os.PathLike[str],
    model: torch.nn.Module | None,
    example_inputs: tuple[Any, ...] | None,
) -> None:
    """Load the weights of a snapshot into `model`, and export that to a `.pt2` or `.onnx` file.

    Raises what `export_model` raises, and `ConfigError` without a model, weights or inputs.
    """
    if model is None or example_inputs is None:
        raise ConfigError(
            f"A checkpoint has weights and no code: the export to {path} needs the model.",
            do="Pass model= with the architecture that was trained, and example_inputs=(batch,).",
        )
    reject_missing_weights(saved)
    model.load_state_dict(assemble_state(saved, section="model")["model"])
    export_model(model, path, example_inputs)


def assemble_state(saved: SavedState, *, section: str | None = None) -> StateDict:
    """Return all tensors, unsharded on the CPU, and all values, nested as they were saved.

    Keys are "model", "optimizer" and the names of stateful objects, such as "scheduler". With
    `section`, such as "model", only that top-level part. Blocks while the chunks are read. Raises
    `IntegrityError` if bytes are missing or corrupt.
    """
    state: StateDict = {}
    requests: list[ReadRequest] = []
    sections = {piece.key[0] for index in saved.indices for piece in index.pieces}
    for name in sorted(sections if section is None else sections & {section}, key=str):
        for key, pieces in tensor_pieces(saved, str(name)).items():
            first = pieces[0][1]
            tensor = torch.empty(first.shape, dtype=torch_dtype(first))
            set_by_key(state, key, tensor)
            requests += [
                ReadRequest(rank, piece, whole_piece_sink(piece, partial(_copy_box, tensor, piece)))
                for rank, piece in pieces
            ]
    saved.read(requests)
    for index in saved.indices:
        keys = [key for key in index.value_keys if section in (None, key[0])]
        if not keys:
            continue  # the encoded values may be large
        decoded = decode_values(index.encoded_values, f"rank {index.rank} of {saved.name}")
        values = dict(zip(index.value_keys, decoded, strict=True))
        for key in keys:
            set_by_key(state, key, values[key])
    stateful_objects = state.pop("stateful_objects", {})
    return state | {
        name: insert_tensors(parts["structure"], parts.get("tensors", {}))
        for name, parts in stateful_objects.items()
    }


def _copy_box(tensor: torch.Tensor, piece: TensorPiece, body: memoryview) -> None:
    narrow_to_box(tensor, piece.offsets, piece.sizes).copy_(piece_as_tensor(piece, body))

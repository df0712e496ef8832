"""Export of a snapshot as a directory for `from_pretrained`."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.core.errors import ConfigError
from spotfit.torch.checkpoint.checkpointer import export_checkpoint

_CONFIG_FILE = "config.json"
_WEIGHTS_FILE = "model.safetensors"


def export_pretrained(
    checkpoint: Checkpoint,
    path: str | PathLike[str],
    *,
    config: Any = None,
    processing_class: Any = None,
) -> None:
    """Write a Checkpointer's checkpoint as a directory that `from_pretrained(path)` loads.

    It contains `config.json` and `model.safetensors`, and the files of `processing_class`, a
    tokenizer or processor, if one is passed. Runs anywhere with access to the checkpoint's storage
    and needs neither torch nor transformers for a checkpoint of `prepare_trainer(every=...)`. For
    other checkpoints pass the model's `config`. Files are replaced one by one, weights first.

    Raises `ConfigError` without a configuration or for an unwritable path, and `IntegrityError` for
    a corrupt checkpoint.
    """
    folder = Path(path)
    text = _saved_config(checkpoint) if config is None else config.to_json_string(use_diff=False)
    export_checkpoint(checkpoint, folder / _WEIGHTS_FILE)
    if processing_class is not None:
        processing_class.save_pretrained(folder)
    (folder / _CONFIG_FILE).write_text(text)


def _saved_config(checkpoint: Checkpoint) -> str:
    from spotfit.torch.checkpoint.torch_export import assemble_state

    state = assemble_state(checkpoint.open_snapshot(), section="stateful_objects")
    text: str = state.get("trainer", {}).get("config", "")
    if not text:
        raise ConfigError(
            "The checkpoint contains no configuration of a transformers model.",
            do="Pass config=model.config; only prepare_trainer(every=...) stores it.",
        )
    return json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"

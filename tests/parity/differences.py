"""Where we mean to differ from Ray Train, each with its reason. The migration guide names all."""

from __future__ import annotations

from collections.abc import Mapping

_NO_DATASETS = "Ray Data stays with Ray: the training function reads its data itself"

MEANT: Mapping[str, str] = {
    "DataConfig": _NO_DATASETS,
    "RunConfig.storage_context": "a training function asks get_context().get_storage()",
    "TRAIN_DATASET_KEY": _NO_DATASETS,
    "TrainRunContext": "it is given to callbacks, which read it; nobody makes one",
    "get_dataset_shard": _NO_DATASETS,
}
"""A name, or a name and its member."""

NOT_YET: Mapping[str, str] = {
    "Backend": "being built",
    "BackendConfig": "being built",
    "NCCLHangError": "being built",
    "TorchCheckpoint": "being built",
    "TorchConfig": "being built",
    "TorchXLAConfig": "being built",
    "TorchftConfig": "being built",
    "ValidationConfig": "being built",
    "ValidationFn": "being built",
    "ValidationTaskConfig": "being built",
}

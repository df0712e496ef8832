"""Where we mean to differ from Ray Train, each with its reason. The migration guide names all."""

from __future__ import annotations

from collections.abc import Mapping

MEANT: Mapping[str, str] = {
    "TorchCheckpoint": "it takes path and filesystem, as there, but shows them",
    "TrainRunContext": "it is given to callbacks, which read it; nobody makes one",
}
"""A name, or a name and its member."""

NOT_YET: Mapping[str, str] = {
    "NCCLHangError": "being built",
    "TorchConfig": "being built",
    "TorchXLAConfig": "being built",
    "TorchftConfig": "being built",
    "ValidationConfig": "being built",
    "ValidationFn": "being built",
    "ValidationTaskConfig": "being built",
}

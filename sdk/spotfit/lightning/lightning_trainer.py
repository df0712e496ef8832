"""LightningTrainer, the name of an earlier Ray Train for a trainer of Lightning scripts."""

from __future__ import annotations

from dataclasses import replace

from spotfit.client.request import FitRequest
from spotfit.client.trainer import TorchTrainer

_FRAMEWORK = "lightning"


class LightningTrainer(TorchTrainer):
    """A `TorchTrainer` whose machines import Lightning before they start workers.

    `train_loop_per_worker` creates and runs the `lightning.pytorch.Trainer`. The arguments are
    those of `TorchTrainer`; `lightning_config` and `LightningConfigBuilder` of Ray 2.4 to 2.6 do
    not exist, as in Ray Train V2.
    """

    def _build_request(self) -> FitRequest:
        request = super()._build_request()
        # A configuration of another framework, such as torchft, has preloading of its own.
        return replace(request, framework=_FRAMEWORK) if request.framework == "torch" else request

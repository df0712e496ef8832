"""TorchTrainer and its sisters to come: a trainer that knows its framework."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from spotfit.client.config import RunConfig, typed
from spotfit.client.trainer import DataParallelTrainer
from spotfit.frameworks.torch.config import TorchConfig
from spotfit.model.config import ScalingConfig
from spotfit.model.validation import ValidationConfig

if TYPE_CHECKING:
    from spotfit.client.result import Result


class TorchTrainer(DataParallelTrainer):
    """Runs one function on many workers that form a `torch.distributed` process group.

    Its backend is written into the `torch_config` that was given, if that named none.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        torch_config: TorchConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: dict[str, Any] | None = None,
        dataset_config: Any = None,
        validation_config: ValidationConfig | None = None,
        metadata: dict[str, Any] | None = None,
        resume_from_checkpoint: Any = None,
        provisioner: Any = None,
    ) -> None:
        torch_config = typed("torch_config", torch_config, TorchConfig, home="spotfit.torch")
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=torch_config,
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            resume_from_checkpoint=resume_from_checkpoint,
            metadata=metadata,
            validation_config=validation_config,
            provisioner=provisioner,
        )
        torch_config.backend = torch_config.backend_for(self.scaling_config)

    def _fit_here(self) -> Result:
        """In the process group of a launcher, if there is one."""
        from spotfit.client.here import fit_here
        from spotfit.frameworks.torch.launched import launched_group

        assert isinstance(self.backend_config, TorchConfig)
        return fit_here(self._request(), partial(launched_group, self.backend_config))

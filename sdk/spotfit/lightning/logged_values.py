"""LoggedValues: what an epoch's means have accumulated, so that they are exact after a resume.

`self.log(..., on_epoch=True)` and torchmetrics accumulate over an epoch, on each rank separately.
Lightning's own checkpoints do not contain them: after a resume within an epoch its means cover the
rest of the epoch only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from spotfit.lightning.lightning_package import load, package_of

_REDUCTIONS: Mapping[str, Any] = {
    "torch.mean": torch.mean,
    "torch.sum": torch.sum,
    "torch.max": torch.max,
    "torch.min": torch.min,
    "sum": sum,
    "max": max,
    "min": min,
}
_OPTIONS = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx",
    "dataloader_idx",
)  # fmt: skip


class LoggedValues:
    """This rank's logged values of the running training epoch, and the metrics of the module."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        package = package_of(trainer)
        self._result = load(package, "trainer.connectors.logger_connector.result")

    def state_dict(self) -> dict[str, Any]:
        """Return the values in dictionaries, for `Checkpointer(per_rank=...)`."""
        return {
            "results": {
                key: _describe(result)
                for key, result in self._results.items()
                if _is_accumulating(result)
            },
            "metrics": {
                name: {"state": metric.metric_state, "updates": metric._update_count}
                for name, metric in self._metrics()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue to accumulate from the values that `state_dict` returned."""
        for key, saved in state["results"].items():
            self._results[key] = self._restored_result(saved)
        metrics = dict(self._metrics())
        for name, saved in state["metrics"].items():
            if name in metrics:
                _load_metric(metrics[name], saved)

    @property
    def _results(self) -> Any:
        return self._trainer.fit_loop.epoch_loop._results

    def _metrics(self) -> Iterator[tuple[str, Any]]:
        # torchmetrics is imported with Lightning; its metrics are modules without saved buffers.
        for name, module in self._trainer.lightning_module.named_modules():
            if hasattr(module, "metric_state") and hasattr(module, "_update_count"):
                yield name, module

    def _restored_result(self, saved: Mapping[str, Any]) -> Any:
        meta = self._result._Metadata(**saved["options"], reduce_fx=_REDUCTIONS[saved["reduction"]])
        meta.sync = self._result._Sync(
            _should=saved["is_synchronized"],
            fn=self._trainer.strategy.reduce,
            rank_zero_only=saved["rank_zero_only"],
        )
        result = self._result._ResultMetric(meta, is_tensor=True)
        result._update_count = 1  # else it warns that it has no values
        for name, value in saved["values"].items():
            setattr(result, name, value.to(self._trainer.strategy.root_device))
        return result


def _is_accumulating(result: Any) -> bool:
    """Whether the value is one that a resume within the epoch needs, and can create again."""
    return (
        result.is_tensor
        and result.meta.on_epoch
        and not result.has_reset
        and result.meta.sync.group is None
        and _reduction_name(result) is not None
    )


def _reduction_name(result: Any) -> str | None:
    return next((name for name, fn in _REDUCTIONS.items() if fn is result.meta.reduce_fx), None)


def _describe(result: Any) -> dict[str, Any]:
    names = ("value", "cumulated_batch_size") if result.meta.is_mean_reduction else ("value",)
    return {
        "options": {name: getattr(result.meta, name) for name in _OPTIONS},
        "reduction": _reduction_name(result),
        "is_synchronized": result.meta.sync.should,
        "rank_zero_only": result.meta.sync.rank_zero_only,
        "values": {name: getattr(result, name).detach() for name in names},
    }


def _load_metric(metric: Any, saved: Mapping[str, Any]) -> None:
    for name, value in saved["state"].items():
        # States are tensors, or lists of tensors that grow with every batch.
        is_tensor = isinstance(value, torch.Tensor)
        moved = value.to(metric.device) if is_tensor else [one.to(metric.device) for one in value]
        setattr(metric, name, moved)
    metric._update_count, metric._computed = saved["updates"], None

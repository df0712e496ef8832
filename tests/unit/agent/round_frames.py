"""Frames of workers, and a coordinator that processes them, for tests."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from spotfit.agent import report_matching as report_matching
from spotfit.agent.collectives import OutgoingFrame
from spotfit.agent.round_coordinator import RoundCoordinator
from spotfit.core.codec import encode
from spotfit.protocol.worker_agent import (
    CheckpointNamed,
    FilesReport,
    FromWorker,
    MetricsReport,
    UploadFailed,
)

Frame = TypeVar("Frame")


def make_coordinator(world_size: int = 2, **options: Any) -> RoundCoordinator:
    return RoundCoordinator(3, world_size, default_checkpoint_name=lambda n: f"made-{n}", **options)


def send_frame(
    coordinator: RoundCoordinator, rank: int, frame: FromWorker, now: float = 0.0
) -> list[OutgoingFrame]:
    return coordinator.handle_frame(rank, msgspec.Raw(encode(frame)), now)


def raw(**metrics: Any) -> msgspec.Raw:
    return msgspec.Raw(encode(metrics))


def metrics_report(n: int, name: str | None = None, **metrics: Any) -> MetricsReport:
    return MetricsReport(report_index=n, metrics=raw(**metrics), checkpoint_dir_name=name)


def files_report(n: int, name: str | None = None, **metrics: Any) -> FilesReport:
    return FilesReport(report_index=n, metrics=raw(**metrics), checkpoint_dir_name=name)


def single_response(answers: list[OutgoingFrame]) -> tuple[int | None, Any]:
    assert len(answers) == 1
    return answers[0]


def responses_of_type(
    kind: type[Frame], answers: list[OutgoingFrame]
) -> list[tuple[int | None, Frame]]:
    assert all(isinstance(frame, kind) for _, frame in answers)
    return [(rank, frame) for rank, frame in answers if isinstance(frame, kind)]


def rejection_reasons(answers: list[OutgoingFrame]) -> dict[int | None, str]:
    """Return the reason why files were rejected; no name was assigned."""
    failures, names = answers[::2], answers[1::2]
    assert [
        (rank, one.checkpoint_name) for rank, one in responses_of_type(CheckpointNamed, names)
    ] == [(rank, "") for rank, _ in failures]
    return {rank: one.reason for rank, one in responses_of_type(UploadFailed, failures)}


def snapshot_report(n: int, name: str | None = None) -> FilesReport:
    return FilesReport(report_index=n, metrics=raw(), checkpoint_dir_name=name, incremental=True)

"""TrainingLoopMonitor: warnings about training loops that do not match their loader."""

from __future__ import annotations

from spotfit.host import log


class TrainingLoopMonitor:
    """Logs training loops that do not match their loader; each warning once, on one rank.

    Each data position has one. It only logs: it neither raises nor changes the position.
    """

    def __init__(self) -> None:
        self.is_reporting_rank = False
        self.counts_batches = False
        """Whether the batches that the loader yields are counted."""
        self.expects_epoch_saves = False
        """Whether saves are due at the end of epochs."""

    def check_batch_counts(self, yielded: int, trained: int) -> None:
        """Warn if more batches of a pass were trained on than the loader yielded.

        `yielded` and `trained` count the batches of this pass on this rank. Called for each batch;
        logs once, on rank 0.
        """
        if self.is_reporting_rank and self.counts_batches and trained > yielded:
            self.counts_batches = False
            log.warning(
                "checkpoint.loader_mismatch",
                reason=f"step() was called for {trained} batches, but loader= has yielded "
                f"{yielded}",
                do="pass the loader over which the loop iterates, created once for all epochs, and "
                "call step() once per batch; otherwise the position and epoch are unknown",
            )

    def check_epoch_end(self, yielded: int, trained: int, batches: int | None) -> None:
        """Warn if a pass begins although the previous one was trained on, but not to its end.

        `yielded` and `trained` count the previous pass's batches on this rank, `batches` those of a
        whole epoch. Called when a pass begins; logs once, on rank 0, and only with `every="epoch"`.
        A loop that prefetches past the end has read the last batch and will still train on it.
        """
        if self.is_reporting_rank and self.expects_epoch_saves and trained:
            self.expects_epoch_saves = False
            log.warning(
                "checkpoint.epoch_end_missed",
                reason=f"when the next epoch began, {yielded} of {batches} batches had been read "
                f'and step() had been called for {trained}, so every="epoch" has not saved',
                do="call step() once for every batch (with accumulating=True during gradient "
                "accumulation) and do not prefetch batches of the next epoch before the last "
                "step(); or set every= to a number of steps or a duration, or call save()",
            )

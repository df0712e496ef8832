"""A node is taken away in the middle, without a word, and training goes on from the checkpoint.

Shows the two calls that make a function survive: `get_checkpoint` at its start and `report` with a
checkpoint now and then. The reclaimer plays the spot market here; a cloud brings its own.
"""

import tempfile
from pathlib import Path

import spotfit
from spotfit_localsim.live.options import LocalOptions
from spotfit_localsim.live.reclaimer import at_step, reclaiming

STEPS = 100


def train() -> int:
    """Count to a hundred, in lock step; go on from where the last checkpoint was taken."""
    import time

    step, rank = 0, spotfit.get_context().get_world_rank()
    if checkpoint := spotfit.get_checkpoint():
        with checkpoint.as_directory() as directory:
            step = int(Path(directory, "step").read_text())
        print(f"rank {rank} goes on from step {step}")
    while step < STEPS:
        spotfit.collective.barrier()
        time.sleep(0.02)  # noqa: TID251  # a step of real work
        step += 1
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step").write_text(str(step))
            saved = step % 10 == 0 and rank == 0
            spotfit.report(
                {"step": step},
                checkpoint=spotfit.Checkpoint.from_directory(directory) if saved else None,
            )
    return step


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        machines = LocalOptions(nodes=2, root=f"{folder}/machines")
        trainer = spotfit.DataParallelTrainer(
            train,
            scaling_config=spotfit.ScalingConfig(num_workers=4),
            run_config=spotfit.RunConfig(name="resume", storage_path=f"{folder}/runs"),
            provisioner=machines,
        )
        with reclaiming(f"{folder}/runs/resume", [at_step(45)], options=machines) as market:
            result = trainer.fit()
        print(f"counted to {result.return_value}; taken away on the way: {market.done}")

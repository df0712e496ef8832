"""A node is killed without notice, and training resumes from the last checkpoint.

Two calls make a training function fault tolerant: `get_checkpoint` at its start, and `report` with
a checkpoint from time to time. `scheduled_reclaims` preempts the node here; spot clouds do it
themselves.
"""

import tempfile
from pathlib import Path

import spotfit
from spotfit_localsim.live.preemption import at_step, scheduled_reclaims
from spotfit_provisioners.local.options import LocalOptions

STEPS = 100


def train() -> int:
    """Count to 100 with a barrier per step; resume from the last checkpoint."""
    import time

    step, rank = 0, spotfit.get_context().get_world_rank()
    if checkpoint := spotfit.get_checkpoint():
        with checkpoint.as_directory() as directory:
            step = int(Path(directory, "step").read_text())
        print(f"rank {rank} resumes from step {step}")
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
        with scheduled_reclaims(
            f"{folder}/runs/resume", [at_step(45)], options=machines
        ) as schedule:
            result = trainer.fit()
        print(f"counted to {result.return_value}; preempted: {schedule.completed}")

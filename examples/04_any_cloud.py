"""One training, anywhere: this machine, a simulated cloud, a Slurm cluster, a real cloud.

    python examples/04_any_cloud.py                                 # here
    python examples/04_any_cloud.py sim://aws_batch                 # a simulated cloud, also here
    python examples/04_any_cloud.py "sim://gcp_batch?reclaims_per_hour=120"
    python examples/04_any_cloud.py slurm --storage /shared/runs
    python examples/04_any_cloud.py aws_batch --storage s3://my-bucket/runs

What a real cloud needs besides is said once, in spotfit.toml or in variables, and checked by
`spotfit doctor --provisioner <cloud>`; see docs/guides/<cloud>.md. In short:

    aws_batch    queues, image; a role for the jobs that may use the bucket
    gcp_batch    project, region, image; a service account that may use the bucket
    azure_batch  endpoint, image, a pool or what makes one; an identity that may use the container
    kubernetes   image, service_account; flavour = "eks" | "karpenter" | "gke" | "aks"
    slurm        partitions; --storage on a disk that all nodes share, or in a bucket
    ssh          hosts
"""

import argparse
import tempfile
from pathlib import Path

import spotfit

STEPS = 60


def train(config: dict[str, int]) -> int:
    """Add up in lock step what all ranks bring; go on from the last checkpoint."""
    import time

    step, total = 0, 0
    if checkpoint := spotfit.get_checkpoint():
        with checkpoint.as_directory() as directory:
            step, total = map(int, Path(directory, "state").read_text().split())
    while step < config["steps"]:
        time.sleep(0.03)  # noqa: TID251  # a step of real work
        step, total = step + 1, total + spotfit.collective.broadcast_from_rank_zero(step)
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "state").write_text(f"{step} {total}")
            saved = step % 10 == 0 and spotfit.get_context().get_world_rank() == 0
            spotfit.report(
                {"step": step, "total": total},
                checkpoint=spotfit.Checkpoint.from_directory(directory) if saved else None,
            )
    return total


def main() -> None:
    """Train with two workers wherever the arguments say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("provisioner", nargs="?", default="local")
    parser.add_argument("--storage", help="a bucket or a shared disk; local and sim:// need none")
    parser.add_argument("--name", default="any-cloud")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as here:
        result = spotfit.DataParallelTrainer(
            train,
            train_loop_config={"steps": STEPS},
            scaling_config=spotfit.ScalingConfig(num_workers=2),
            run_config=spotfit.RunConfig(name=told.name, storage_path=told.storage or here),
            provisioner=told.provisioner,
        ).fit()
    print(f"{told.provisioner}: {STEPS} steps, total {result.return_value}")


if __name__ == "__main__":
    main()

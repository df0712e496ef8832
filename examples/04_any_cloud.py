"""One training on any backend: this machine, a simulated cloud, a Slurm cluster, a real cloud.

    python examples/04_any_cloud.py                                 # local
    python examples/04_any_cloud.py sim://aws_batch                 # a simulated cloud
    python examples/04_any_cloud.py "sim://gcp_batch?reclaims_per_hour=120"
    python examples/04_any_cloud.py slurm --storage /shared/runs
    python examples/04_any_cloud.py aws_batch --storage s3://my-bucket/runs

A real cloud needs more settings, in spotfit.toml or in environment variables. Check them with
`spotfit doctor --provisioner <cloud>`; see docs/guides/<cloud>.md. In short:

    aws_batch    queues, image; a role for the jobs that may use the bucket
    gcp_batch    project, region, image; a service account that may use the bucket
    azure_batch  endpoint, image, a pool or the options to create one; an identity that may use the
                 container
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
    """Sum a value of rank 0 in every step; resume from the last checkpoint."""
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
    """Train with two workers on the given provisioner."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("provisioner", nargs="?", default="local")
    parser.add_argument(
        "--storage", help="bucket or shared directory; optional for local and sim://"
    )
    parser.add_argument("--name", default="any-cloud")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary_dir:
        result = spotfit.DataParallelTrainer(
            train,
            train_loop_config={"steps": STEPS},
            scaling_config=spotfit.ScalingConfig(num_workers=2),
            run_config=spotfit.RunConfig(
                name=options.name, storage_path=options.storage or temporary_dir
            ),
            provisioner=options.provisioner,
        ).fit()
    print(f"{options.provisioner}: {STEPS} steps, total {result.return_value}")


if __name__ == "__main__":
    main()

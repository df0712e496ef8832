"""Four workers on two nodes form a process group and sum their ranks.

The minimal program: a training function, the number of workers, and where they run. For a cloud,
name its provisioner and set `storage_path` to a bucket.
"""

import tempfile

import spotfit
from spotfit.torch import TorchTrainer


def train() -> float:
    """Run on every worker; the process group is initialized already."""
    import torch
    import torch.distributed as dist

    context = spotfit.get_context()
    total = torch.tensor(float(context.get_world_rank()))
    dist.all_reduce(total)
    print(f"worker {context.get_world_rank()} on node {context.get_node_rank()}: {total.item()}")
    return total.item()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as storage:
        trainer = TorchTrainer(
            train,
            scaling_config=spotfit.ScalingConfig(num_workers=4),
            run_config=spotfit.RunConfig(name="hello", storage_path=storage),
            provisioner="local?nodes=2",
        )
        print(f"sum of all ranks: {trainer.fit().return_value}")

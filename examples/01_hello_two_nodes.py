"""Four workers on two nodes meet and add up their ranks.

Shows the least that is needed: a function, how many workers, and where. For a cloud, name another
provisioner and put `storage_path` into a bucket.
"""

import tempfile

import spotfit
from spotfit.torch import TorchTrainer


def train() -> float:
    """Runs on every worker; the process group stands already."""
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
        print(f"all ranks add up to {trainer.fit().return_value}")

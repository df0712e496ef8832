"""Four workers on two nodes train with Horovod's interface, and continue after an interruption.

Only the import differs from a script for `horovod.torch`. Commits of the elastic state are saved,
and restored when the workers have been restarted. For a cloud, name its provisioner and set
`storage_path` to a bucket.
"""

import tempfile
from typing import Any

import spotfit
from spotfit.horovod import HorovodTrainer

EPOCHS, BATCH_SIZE = 6, 16


def train() -> float:
    """Run on every worker; `hvd.rank()` is its world rank."""
    import torch
    from sklearn.datasets import load_digits
    from torch.utils.data import DataLoader, TensorDataset

    import spotfit.horovod.torch as hvd

    hvd.init()
    torch.manual_seed(7)
    images, digits = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images / 16.0).float(), torch.tensor(digits))
    sampler = hvd.elastic.ElasticSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    @hvd.elastic.run(every=50)
    def train_epochs(state: Any) -> None:
        for epoch in range(state.epoch, EPOCHS):
            state.epoch = epoch
            for number, (rows, targets) in enumerate(loader):
                state.optimizer.zero_grad()
                torch.nn.functional.cross_entropy(state.model(rows), targets).backward()  # type: ignore[no-untyped-call]
                state.optimizer.step()
                state.sampler.record_batch(number, len(rows))
                state.commit()
            state.sampler.set_epoch(epoch + 1)

    train_epochs(hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0))
    model.eval()
    predicted = model(dataset.tensors[0]).argmax(dim=1)
    return float((predicted == dataset.tensors[1]).float().mean())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as storage:
        trainer = HorovodTrainer(
            train,
            scaling_config=spotfit.ScalingConfig(num_workers=4),
            run_config=spotfit.RunConfig(name="horovod", storage_path=storage),
            provisioner="local?nodes=2",
        )
        accuracy = trainer.fit().return_value
        print(f"{EPOCHS} epochs, accuracy above 90 %: {accuracy > 0.9}")

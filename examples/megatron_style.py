"""Tensor, pipeline and data parallel groups that the script creates, in the style of Megatron-LM.

    spotfit run --workers 4 --provisioner 'local?nodes=2' examples/megatron_style.py \\
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2

Each rank has a part of some layers. `torch.distributed.checkpoint` (DCP) saves the parts of all
ranks as one checkpoint, which `spotfit.report` commits; a restarted group loads it. The lines that
mention spotfit are the only ones that a script for torchrun does not have.
"""

import argparse
import hashlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

import spotfit

WIDTH, LAYERS, BATCH, MICRO_BATCHES = 32, 4, 64, 2


class ParallelGroups(NamedTuple):
    """The groups of this rank, and its place in each."""

    tensor: Any
    data: Any
    pipeline: Any
    pipeline_ranks: list[int]

    @property
    def stage(self) -> int:
        return dist.get_rank(self.pipeline)

    @property
    def is_last_stage(self) -> bool:
        return self.stage == dist.get_world_size(self.pipeline) - 1


def create_groups(*, tensor: int, pipeline: int) -> ParallelGroups:
    """Create all groups in the order of Megatron-LM: neighbors are tensor parallel."""
    grid = torch.arange(dist.get_world_size()).view(pipeline, -1, tensor)
    own: dict[int, tuple[Any, list[int]]] = {}
    for axis in range(grid.ndim):
        for ranks in grid.movedim(axis, -1).flatten(0, 1).tolist():
            group = dist.new_group(ranks)  # every rank creates every group
            if dist.get_rank() in ranks:
                own[axis] = group, ranks
    return ParallelGroups(
        tensor=own[2][0], data=own[1][0], pipeline=own[0][0], pipeline_ranks=own[0][1]
    )


class CopyToTensorGroup(torch.autograd.Function):
    """Passes activations on, and sums their gradients over the tensor parallel group."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceFromTensorGroup(torch.autograd.Function):
    """Sums activations over the tensor parallel group, and passes their gradients on."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: Any) -> torch.Tensor:
        total = hidden.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class ParallelMlp(nn.Module):
    """A block whose hidden units are split over the tensor parallel group."""

    shard_dims = {"up.weight": 0, "up.bias": 0, "down.weight": 1}  # noqa: RUF012

    def __init__(self, number: int, group: Any) -> None:
        super().__init__()
        self.group = group
        torch.manual_seed(number)  # the whole layer, so that its weights depend on no layout
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        for name, dim in self.shard_dims.items():
            layer, kind = name.split(".")
            part = self.get_parameter(name).detach().chunk(size, dim)[rank].clone()
            setattr(self.get_submodule(layer), kind, nn.Parameter(part))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        copy: Any = CopyToTensorGroup.apply
        reduce: Any = ReduceFromTensorGroup.apply
        part = self.down(functional.gelu(self.up(copy(self.norm(hidden), self.group))))
        output: torch.Tensor = hidden + reduce(part, self.group)
        return output


def create_stage(groups: ParallelGroups) -> nn.ModuleDict:
    """Return the layers of this rank's stage, named by their numbers in the whole model."""
    per_stage = LAYERS // dist.get_world_size(groups.pipeline)
    numbers = range(groups.stage * per_stage, (groups.stage + 1) * per_stage)
    layers: dict[str, nn.Module] = {}
    torch.manual_seed(1000)
    embedding, head = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 10)
    if groups.stage == 0:
        layers["embedding"] = embedding
    layers |= {f"layer{number}": ParallelMlp(number, groups.tensor) for number in numbers}
    if groups.is_last_stage:
        layers["head"] = head
    return nn.ModuleDict(layers)


def train_step(
    stage: nn.ModuleDict, groups: ParallelGroups, images: torch.Tensor, labels: torch.Tensor
) -> float:
    """Run all micro-batches forward, then backward, through the stages (GPipe)."""
    before, after = groups.stage - 1, groups.stage + 1
    passed: list[tuple[torch.Tensor, Any]] = []
    losses: list[Any] = []
    for part, targets in zip(images.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES), strict=True):
        received = part
        if groups.stage > 0:
            received = torch.empty(len(part), WIDTH)
            dist.recv(received, src=groups.pipeline_ranks[before], group=groups.pipeline)
            received.requires_grad_()
        hidden: Any = received
        for layer in stage.values():
            hidden = layer(hidden)
        if groups.is_last_stage:
            losses.append(functional.cross_entropy(hidden, targets) / MICRO_BATCHES)
        else:
            dist.send(hidden.detach(), dst=groups.pipeline_ranks[after], group=groups.pipeline)
        passed.append((received, hidden))
    for number, (received, hidden) in enumerate(passed):
        if groups.is_last_stage:
            losses[number].backward()
        else:
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, src=groups.pipeline_ranks[after], group=groups.pipeline)
            hidden.backward(gradient)
        if groups.stage > 0:
            assert received.grad is not None
            dist.send(received.grad, dst=groups.pipeline_ranks[before], group=groups.pipeline)
    for parameter in stage.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=groups.data)
        parameter.grad.div_(dist.get_world_size(groups.data))
    return float(sum(loss.item() for loss in losses))


def state_to_save(
    stage: nn.ModuleDict, optimizer: torch.optim.Optimizer, groups: ParallelGroups, step: int
) -> dict[str, Any]:
    """Return views of the state by names that are unique in the whole model.

    Parts of a tensor are DTensors on the tensor parallel group, so that DCP can load them with
    another number of ranks. Tensors of one name that several ranks have are saved once.
    """
    mesh = DeviceMesh.from_group(groups.tensor, "cpu")
    state: dict[str, Any] = {"step": torch.tensor(step)}
    for name, parameter in stage.named_parameters():
        layer, _, kind = name.partition(".")
        values = {"": parameter.detach(), **optimizer.state[parameter]}
        dim = ParallelMlp.shard_dims.get(kind) if layer.startswith("layer") else None
        for key, value in values.items():
            if dim is not None and value.shape == parameter.shape:
                value = DTensor.from_local(value, mesh, [Shard(dim)])
            state[f"{name} {key}".strip()] = value
    return state


def save(state: dict[str, Any], step: int, loss: float) -> None:
    """Report the parts of all ranks as one checkpoint, which is uploaded in the background."""
    folder = tempfile.mkdtemp()
    save_shards(state, checkpoint_id=folder)
    spotfit.report(
        {"step": step, "loss": loss},
        checkpoint=spotfit.Checkpoint.from_directory(folder),
        checkpoint_dir_name=f"iter_{step:07}",
        checkpoint_upload_mode=spotfit.CheckpointUploadMode.ASYNC,
    )


def restore(stage: nn.ModuleDict, optimizer: torch.optim.Optimizer, groups: ParallelGroups) -> int:
    """Load the last checkpoint into the parameters and the optimizer; return its step."""
    checkpoint = spotfit.get_checkpoint()
    if checkpoint is None:
        return 0
    # Adam creates its state in the first step, which changes no weights at a rate of 0.
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    state = state_to_save(stage, optimizer, groups, step=0)
    with checkpoint.as_directory() as folder:
        load_shards(state, checkpoint_id=folder)
    return int(state["step"])


def batches(groups: ParallelGroups, first: int, last: int) -> Iterator[tuple[int, Any, Any]]:
    """Yield step, images and labels: a function of the step and of the data parallel rank."""
    digits, classes = load_digits(return_X_y=True)
    images, labels = torch.tensor(digits).float() / 16, torch.tensor(classes)
    size, rank = dist.get_world_size(groups.data), dist.get_rank(groups.data)
    for step in range(first, last):
        chosen = torch.randint(
            len(images), (BATCH,), generator=torch.Generator().manual_seed(step)
        ).chunk(size)[rank]
        yield step, images[chosen], labels[chosen]


def digest_of_all_ranks(stage: nn.ModuleDict) -> str:
    own = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in stage.parameters()))
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, own.hexdigest())
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor-model-parallel-size", type=int, default=2)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=2)
    parser.add_argument("--train-iters", type=int, default=60)
    parser.add_argument("--save-interval", type=int, default=10)
    parser.add_argument("--step-s", type=float, default=0.0, help="longer steps, for a test")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    groups = create_groups(
        tensor=arguments.tensor_model_parallel_size,
        pipeline=arguments.pipeline_model_parallel_size,
    )
    stage = create_stage(groups)
    optimizer = torch.optim.Adam(stage.parameters(), lr=3e-3)
    first = restore(stage, optimizer, groups)
    if dist.get_rank() == 0:
        print(f"starts at step {first}")
    for step, images, labels in batches(groups, first, arguments.train_iters):
        optimizer.zero_grad()
        loss = train_step(stage, groups, images, labels)
        optimizer.step()
        time.sleep(arguments.step_s)  # noqa: TID251  # a step of real work
        if (step + 1) % arguments.save_interval == 0:
            save(state_to_save(stage, optimizer, groups, step + 1), step + 1, loss)
    digest = digest_of_all_ranks(stage)
    if dist.get_rank() == 0:
        print(f"weights {digest}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

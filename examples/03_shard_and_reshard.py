"""A model sharded over two workers goes on from its sharded checkpoint, sharded over three.

Shows FSDP2 (`fully_shard`) with torch.distributed.checkpoint: every worker keeps, saves and reports
its own shards only. The files of all become one checkpoint, which a group of any size can read: of
it, each worker takes what its new shards are made of. So a run may shrink and grow as machines go
and come.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.nn import functional

import spotfit
from spotfit.torch import TorchTrainer, prepare_model

WIDTH, HEADS, BLOCKS, WINDOW, LETTERS = 64, 4, 2, 32, 128
BATCH, SAVE_EVERY = 16, 10


class Block(nn.Module):
    """Look back at what was read, then think. Its weights are gathered together, when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.think = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.before_looking, self.before_thinking = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, read: torch.Tensor) -> torch.Tensor:
        calm = self.before_looking(read)
        ahead = torch.ones(WINDOW, WINDOW, dtype=torch.bool, device=read.device).triu(1)
        seen, _ = self.look(calm, calm, calm, attn_mask=ahead, need_weights=False)
        read = read + seen
        thought: torch.Tensor = self.think(self.before_thinking(read))
        return read + thought


class Reader(nn.Module):
    """Reads letters, guesses the next one after each, and tells how wrong it was."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, WIDTH), nn.Embedding(WINDOW, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.guess = nn.Linear(WIDTH, LETTERS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        places = torch.arange(WINDOW, device=text.device)
        read = self.blocks(self.letters(text[:, :-1]) + self.places(places))
        return functional.cross_entropy(self.guess(read).flatten(0, 1), text[:, 1:].flatten())


def train(config: dict[str, Any]) -> dict[str, float]:
    """Learn to spell until step `until`, from wherever the last checkpoint was taken."""
    torch.manual_seed(0)  # all workers begin with the same weights, of which each keeps a share
    model = prepare_model(
        Reader(), parallel_strategy="fsdp2", parallel_strategy_kwargs={"auto_wrap_policy": {Block}}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = restore(model, optimizer)
    first = step
    loss = torch.tensor(torch.nan)
    while step < config["until"]:
        loss = model(some_of(config["text"], step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % SAVE_EVERY == 0:
            save(model, optimizer, step, loss.item())
    return {"from": first, "to": step, "loss": round(loss.item(), 2)}


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, loss: float) -> None:
    """Report a checkpoint to which every worker brings the files of its own shards."""
    with tempfile.TemporaryDirectory() as folder:
        save_shards(everything(model, optimizer, step), checkpoint_id=folder)
        checkpoint = spotfit.Checkpoint.from_directory(folder)
        spotfit.report({"step": step, "loss": loss}, checkpoint=checkpoint)


def restore(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step to go on from; the shards are filled from a checkpoint of however many workers."""
    checkpoint = spotfit.get_checkpoint()
    if checkpoint is None:
        return 0
    state = everything(model, optimizer, step=0)
    with checkpoint.as_directory() as folder:
        load_shards(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return int(state["step"])


def everything(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """What has to be kept: of tensors this worker's shards, which know whose part they are."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step}


def some_of(text: bytes, step: int) -> torch.Tensor:
    """Pieces of the text: others at every step, and for every worker."""
    me = spotfit.get_context()
    dice = torch.Generator().manual_seed(step * me.get_world_size() + me.get_world_rank())
    starts = torch.randint(len(text) - WINDOW - 1, (BATCH,), generator=dice).tolist()
    return torch.tensor([list(text[start : start + WINDOW + 1]) for start in starts])


def spell(storage: str, *, workers: int, until: int) -> spotfit.Result:
    """The same run, whatever its size: its name and its storage make it so."""
    trainer = TorchTrainer(
        train,
        train_loop_config={"text": Path(__file__).read_bytes(), "until": until},
        scaling_config=spotfit.ScalingConfig(num_workers=workers),
        run_config=spotfit.RunConfig(name="spelling", storage_path=storage),
        provisioner="local?nodes=2",
    )
    return trainer.fit()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as storage:
        print("two workers:", spell(storage, workers=2, until=30).return_value)
        result = spell(storage, workers=3, until=60)
        print("three workers:", result.return_value)
        assert result.checkpoint is not None
        with result.checkpoint.as_directory() as folder:
            print("a checkpoint is", *sorted(path.name for path in Path(folder).iterdir()))

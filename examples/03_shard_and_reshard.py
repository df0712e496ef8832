"""A model sharded over two workers resumes from its sharded checkpoint on three workers.

FSDP2 (`fully_shard`) with torch.distributed.checkpoint: every worker holds, saves and reports its
own shards only. The files of all workers form one checkpoint, which a group of any size can load:
each worker reads the parts of its new shards. A run can therefore shrink and grow with the
available machines.
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
    """A transformer block; FSDP gathers its parameters when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(hidden)
        causal_mask = torch.ones(WINDOW, WINDOW, dtype=torch.bool, device=hidden.device).triu(1)
        attended, _ = self.attention(
            normed, normed, normed, attn_mask=causal_mask, need_weights=False
        )
        hidden = hidden + attended
        output: torch.Tensor = self.mlp(self.mlp_norm(hidden))
        return hidden + output


class CharacterModel(nn.Module):
    """A character-level language model; returns the cross-entropy loss."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding, self.position_embedding = (
            nn.Embedding(LETTERS, WIDTH),
            nn.Embedding(WINDOW, WIDTH),
        )
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(WINDOW, device=text.device)
        hidden = self.blocks(
            self.token_embedding(text[:, :-1]) + self.position_embedding(positions)
        )
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), text[:, 1:].flatten())


def train(config: dict[str, Any]) -> dict[str, float]:
    """Train until step `until`, from the last checkpoint."""
    torch.manual_seed(0)  # equal weights on all workers, before they are sharded
    model = prepare_model(
        CharacterModel(),
        parallel_strategy="fsdp2",
        parallel_strategy_kwargs={"auto_wrap_policy": {Block}},
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = restore(model, optimizer)
    first = step
    loss = torch.tensor(torch.nan)
    while step < config["until"]:
        loss = model(draw_batch(config["text"], step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % SAVE_EVERY == 0:
            save(model, optimizer, step, loss.item())
    return {"from": first, "to": step, "loss": round(loss.item(), 2)}


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, loss: float) -> None:
    """Report a checkpoint; every worker adds the files of its own shards."""
    with tempfile.TemporaryDirectory() as folder:
        save_shards(state_to_save(model, optimizer, step), checkpoint_id=folder)
        checkpoint = spotfit.Checkpoint.from_directory(folder)
        spotfit.report({"step": step, "loss": loss}, checkpoint=checkpoint)


def restore(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the last checkpoint, saved by any number of workers, and return its step."""
    checkpoint = spotfit.get_checkpoint()
    if checkpoint is None:
        return 0
    state = state_to_save(model, optimizer, step=0)
    with checkpoint.as_directory() as folder:
        load_shards(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return int(state["step"])


def state_to_save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """Return the state to save: DTensors of this worker's shards, and the step."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


def draw_batch(text: bytes, step: int) -> torch.Tensor:
    """Draw a batch of text windows, different in every step and on every worker."""
    context = spotfit.get_context()
    rng = torch.Generator().manual_seed(step * context.get_world_size() + context.get_world_rank())
    starts = torch.randint(len(text) - WINDOW - 1, (BATCH,), generator=rng).tolist()
    return torch.tensor([list(text[start : start + WINDOW + 1]) for start in starts])


def fit(storage: str, *, workers: int, until: int) -> spotfit.Result:
    """Train with that many workers.

    The name and the storage path identify the run, not its size.
    """
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
        print("two workers:", fit(storage, workers=2, until=30).return_value)
        result = fit(storage, workers=3, until=60)
        print("three workers:", result.return_value)
        assert result.checkpoint is not None
        with result.checkpoint.as_directory() as folder:
            print("a checkpoint is", *sorted(path.name for path in Path(folder).iterdir()))

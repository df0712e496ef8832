"""A language model trained by module-level code, in the style of nanoGPT's train.py.

    spotfit run --workers 4 --provisioner 'local?nodes=2' examples/nanogpt_style.py --max_iters=60

Settings are globals, which arguments replace. The script forms its group if torchrun's variables
are set, accumulates gradients, reads one batch ahead and writes a checkpoint of its own. The four
lines marked with (+) are added: with them it continues after the loss of a machine.
"""

import argparse
import hashlib
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from spotfit.torch import Checkpointer  # (+)

out_dir, eval_interval = "out", 30
gradient_accumulation_steps, batch_size, block_size = 8, 4, 16
n_layer, n_head, n_embd, dropout = 2, 2, 32, 0.1
learning_rate, max_iters, warmup_iters, min_lr, grad_clip = 1e-2, 60, 5, 1e-3, 1.0
step_s = 0.0  # longer steps, for a test
skipped_before = -1  # skip a batch before this iteration, for a test
for argument in sys.argv[1:]:
    name, _, value = argument.removeprefix("--").partition("=")
    globals()[name] = type(globals()[name])(value)
config = {name: value for name, value in globals().items() if isinstance(value, int | float | str)}

ddp = "RANK" in os.environ  # noqa: TID251
ddp_rank, ddp_world_size = 0, 1
if ddp:
    init_process_group("gloo")
    ddp_rank, ddp_world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))  # noqa: TID251
    gradient_accumulation_steps //= ddp_world_size
master_process = ddp_rank == 0
torch.manual_seed(1337 + ddp_rank)
tokens = numpy.memmap(argparse.__file__, dtype=numpy.uint8, mode="r")  # a text that exists


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(tokens) - block_size, (batch_size,)).tolist()
    rows = numpy.stack([tokens[one : one + block_size + 1] for one in starts]).astype(numpy.int64)
    return torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:])


class Block(nn.Module):
    """Causal attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(n_embd) for _ in range(2))
        self.qkv, self.out = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norms[0](hidden)).unflatten(2, (3, n_head, -1)).permute(2, 0, 3, 1, 4)
        query, key, values = heads
        attended = functional.scaled_dot_product_attention(query, key, values, is_causal=True)
        hidden = hidden + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        output: torch.Tensor = hidden + self.dropout(self.mlp(self.norms[1](hidden)))
        return output


class GPT(nn.Module):
    """Bytes to the loss of predicting the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*(Block() for _ in range(n_layer)))
        self.head = nn.Sequential(nn.LayerNorm(n_embd), nn.Linear(n_embd, 256))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.blocks(self.token(x) + self.place.weight))
        return functional.cross_entropy(scores.flatten(0, 1), y.flatten())


def get_lr(iteration: int) -> float:
    if iteration < warmup_iters:
        return learning_rate * (iteration + 1) / warmup_iters
    ratio = (iteration - warmup_iters) / max(1, max_iters - warmup_iters)
    return min_lr + (learning_rate - min_lr) * (1 + math.cos(math.pi * ratio)) / 2


iter_num = 0
model: Any = GPT()
scaler = torch.amp.GradScaler("cpu", enabled=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
raw_model = model
if ddp:
    # The order of summation then is the same after a restart (docs/guides/checkpointer.md).
    model = DistributedDataParallel(model, find_unused_parameters=True)
checkpointer = Checkpointer(model=model, optimizer=optimizer, scaler=scaler, every=10)  # (+)
iter_num = restored.step if (restored := checkpointer.restore()) else iter_num  # (+)
if master_process:
    Path(out_dir).mkdir(exist_ok=True)
    print(f"starts at iteration {iter_num}")

X, Y = get_batch()
while iter_num < max_iters:
    if iter_num == skipped_before:
        X, Y = get_batch()
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0 and iter_num > 0 and master_process:
        state = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "iter_num": iter_num, "config": config}, f"{out_dir}/ckpt.pt")
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        loss = model(X, Y) / gradient_accumulation_steps
        X, Y = get_batch()  # one ahead
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    time.sleep(step_s)  # noqa: TID251  # a step of real work
    iter_num += 1
    checkpointer.step()  # (+)

if master_process:
    weights = b"".join(one.detach().numpy().tobytes() for one in raw_model.parameters())
    print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}")
if ddp:
    destroy_process_group()

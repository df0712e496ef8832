"""`num_workers=0` under torchrun: its processes are the workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, sys
from pathlib import Path
import spotfit
from spotfit.torch import TorchTrainer, get_device, prepare_model

def train(config):
    import torch
    import torch.distributed as dist

    me = spotfit.get_context()
    total = torch.ones(1) * me.get_world_rank()
    dist.all_reduce(total)
    model = prepare_model(torch.nn.Linear(2, 1))
    spotfit.report({"rank": me.get_world_rank(), "sum": float(total)})
    seed = spotfit.collective.broadcast_from_rank_zero(me.get_world_rank() + 7)
    return [me.get_world_size(), me.get_local_rank(), type(model).__name__, str(get_device()), seed]

result = TorchTrainer(
    train, train_loop_config={}, scaling_config=spotfit.ScalingConfig(num_workers=0)
).fit()
total = {"metrics": result.metrics, "value": result.return_value, "path": result.path}
Path(sys.argv[1], f"rank{result.metrics['rank']}").write_text(json.dumps(total))
"""


def test_processes_of_torchrun_train_like_workers(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = [str(tmp_path / "script.py"), str(tmp_path)]
    subprocess.run([*torchrun, "--nproc-per-node", "2", *script], check=True, timeout=100)

    for rank in (0, 1):
        result = json.loads((tmp_path / f"rank{rank}").read_text())
        assert result["metrics"] == {"rank": rank, "sum": 1.0}
        assert result["value"] == [2, rank, "DistributedDataParallel", "cpu", 7]
        assert result["path"] is None

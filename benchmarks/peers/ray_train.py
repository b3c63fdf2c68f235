"""Ray Train, elastic: `num_workers=(1, 2)`, `FailureConfig(max_failures=-1)` and a reported checkpoint.

After Ray's guides "Elastic training" and "Saving and loading checkpoints". Beyond them, the script keeps the global
batch when the group shrinks and skips the rows of the epoch that the checkpoint has behind it.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import job
import ray
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler

RESIZE_SECONDS = 5.0  # Ray's default, 60 s, is longer than the whole run


def train() -> None:
    world = [time.time_ns()]
    dist.broadcast_object_list(world)
    ledger, share = job.Ledger(world[0], dist.get_world_size()), job.BATCH // dist.get_world_size()
    net = job.make_net()
    optimizer, step = job.make_optimizer(net), 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt")
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    model = ray.train.torch.prepare_model(net, parallel_strategy_kwargs={})

    table = job.open_table()
    sampler = DistributedSampler(table, seed=job.SEED)
    epoch_steps = len(table) // job.BATCH
    while step < epoch_steps * job.EPOCHS:
        sampler.set_epoch(step // epoch_steps)
        rest = list(sampler)[step % epoch_steps * share :]
        for rows, x, y in DataLoader(table, batch_size=share, sampler=rest):
            ledger.begin(step + 1, rows)
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
            step += 1
            ledger.apply(step, rows)
            if step % job.CHECKPOINT_STEPS == 0:
                report(net, optimizer, step)
    if dist.get_rank() == 0:
        job.save_weights(net)


def report(net: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, Path(folder) / "state.pt")
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report({"step": step}, checkpoint=checkpoint)


def main() -> None:
    here = str(Path(__file__).parent)
    variables = {name: os.environ[name] for name in ("HEAD_TO_HEAD", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")}
    ray.init(address=os.environ["RAY_ADDRESS"], runtime_env={"env_vars": {**variables, "PYTHONPATH": here}})
    trainer = ray.train.torch.TorchTrainer(
        train,
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=(1, job.HOSTS), elastic_resize_monitor_interval_s=RESIZE_SECONDS
        ),
        run_config=RunConfig(
            name="run",
            storage_path=str(job.folder() / "storage"),
            failure_config=FailureConfig(max_failures=-1),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()

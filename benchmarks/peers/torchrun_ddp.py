"""torchrun, elastic: DistributedDataParallel, DistributedSampler and a checkpoint file that each restart loads.

After torch's own tutorial "Fault-tolerant Distributed Training with torchrun". Beyond it, the script keeps the global
batch when the world shrinks and skips the rows of the epoch that the checkpoint has behind it.
"""

from __future__ import annotations

import os
import time

import job
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    dist.init_process_group("gloo")
    world = [time.time_ns()]
    dist.broadcast_object_list(world)
    ledger, share = job.Ledger(world[0], dist.get_world_size()), job.BATCH // dist.get_world_size()
    model = DistributedDataParallel(job.make_net())
    optimizer = job.make_optimizer(model)
    checkpoint, step = job.folder() / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]

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
            if step % job.CHECKPOINT_STEPS == 0 and dist.get_rank() == 0:
                state = {
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step,
                }
                torch.save(state, f"{checkpoint}.new")
                os.replace(f"{checkpoint}.new", checkpoint)
    if dist.get_rank() == 0:
        job.save_weights(model.module)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""torchft: a replica group per worker, under its lighthouse; after torchft's own example train_ddp.py.

As its comments advise, each replica group keeps the position of its data loader in a file, every step.
"""

from __future__ import annotations

import os
from datetime import timedelta

import job
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torchdata.stateful_dataloader import StatefulDataLoader
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo
from torchft.checkpointing.pg_transport import PGTransport


def main() -> None:
    replica = int(os.environ["REPLICA_GROUP_ID"])
    table = job.open_table()
    steps = len(table) // job.BATCH * job.EPOCHS
    sampler = DistributedSampler(
        table, replica, num_replica_groups=job.HOSTS, group_rank=0, num_replicas=1, seed=job.SEED
    )
    loader = StatefulDataLoader(table, batch_size=job.BATCH // job.HOSTS, sampler=sampler)
    position, epoch = job.folder() / f"position-{replica}.pt", 0
    if position.exists():
        saved = torch.load(position)
        epoch = saved["epoch"]
        sampler.set_epoch(epoch)
        loader.load_state_dict(saved["loader"])

    net: nn.Module = job.make_net()
    pg = ProcessGroupGloo(timeout=timedelta(seconds=5))
    manager = Manager(
        pg=pg,
        min_replica_size=1,
        load_state_dict=lambda state: (
            model.load_state_dict(state["model"]),
            optimizer.load_state_dict(state["optim"]),
        ),
        state_dict=lambda: {"model": model.state_dict(), "optim": optimizer.state_dict()},
        replica_id=f"head_to_head_{replica}",
        timeout=timedelta(seconds=30),
        checkpoint_transport=PGTransport(pg, timeout=timedelta(seconds=10), device=torch.device("cpu")),
    )
    model = DistributedDataParallel(manager, net)
    inner = job.make_optimizer(model)
    applied: list[int] = []  # the step, once the replicas have agreed to take it
    inner.register_step_post_hook(lambda *_: applied.append(manager.current_step()))
    optimizer = Optimizer(manager, inner)
    ledger = job.Ledger(0, job.HOSTS)
    while manager.current_step() < steps:
        sampler.set_epoch(epoch)
        for rows, x, y in loader:
            ledger.begin(manager.current_step() + 1, rows)
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
            if applied:
                used = rows if manager.is_participating() else rows[:0]
                ledger.apply(applied.pop(), used, manager.num_participants())
            torch.save({"epoch": epoch, "loader": loader.state_dict()}, f"{position}.new")
            os.replace(f"{position}.new", position)
            if manager.current_step() >= steps:
                break
        else:
            epoch += 1
    if manager.participating_rank() == 0:
        job.save_weights(net)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()

"""torchrun, elastic: DistributedDataParallel, DistributedSampler and a checkpoint file that each restart loads.

After torch's own tutorial "Fault-tolerant Distributed Training with torchrun"; `job.take_steps` says what is beyond it.
"""

from __future__ import annotations

import os

import job
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(job.make_net())
    optimizer = job.make_optimizer(model)
    checkpoint, begun = job.folder() / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begun = saved["step"]

    def save(step: int) -> None:
        if dist.get_rank() == 0:
            weights = model.module.state_dict()
            state = {"model": weights, "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, f"{checkpoint}.new")
            os.replace(f"{checkpoint}.new", checkpoint)

    job.take_steps(model, optimizer, begun, save)
    if dist.get_rank() == 0:
        job.save_weights(model.module)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

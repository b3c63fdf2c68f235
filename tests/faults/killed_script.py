"""A script that knows nothing of spark_elastic: DDP, its own checkpoint, and a loop over steps.

killed_script.py FOLDER KILLS STEPS
"""

import os
import sys
import time

import torch
import torch.distributed as dist

FOLDER, KILLS, STEPS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
CHECKPOINT = os.path.join(FOLDER, "checkpoint.pt")


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = torch.nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = 0
    if os.path.exists(CHECKPOINT):
        saved = torch.load(CHECKPOINT)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    note(f"resumed {step}")
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    while step < STEPS:
        batch = torch.randn(12, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        ddp(batch).pow(2).mean().backward()
        optimizer.step()
        step += 1
        if dist.get_rank() == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(saved, CHECKPOINT + ".new")
            os.replace(CHECKPOINT + ".new", CHECKPOINT)
        dist.barrier()
        note(str(step))
        print(f"step {step}", flush=True)  # noqa: T201 - what the test waits for
        while os.path.getsize(os.path.join(FOLDER, "kills")) < min(KILLS, (step - 2) // 2):
            time.sleep(0.02)
    dist.destroy_process_group()


def note(text: str) -> None:
    with open(os.path.join(FOLDER, f"worker-{os.getpid()}"), "a") as file:
        file.write(text + "\n")


if __name__ == "__main__":
    main()

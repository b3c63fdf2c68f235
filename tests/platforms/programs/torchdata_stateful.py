"""torchdata's StatefulDataLoader: checkpoints of a DDP training hold each rank's position, and it resumes there."""

from pathlib import Path

import torch
import torch.distributed as dist
from steps import finish, note
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from toy import make_net, make_rows, weigh

dist.init_process_group()
model = torch.nn.parallel.DistributedDataParallel(make_net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows = TensorDataset(*make_rows())
loader = StatefulDataLoader(rows, 16, sampler=DistributedSampler(rows, shuffle=False), num_workers=1)
step = 0
saved = sorted(Path.cwd().glob("step-*.pt"))
if saved:
    state = torch.load(saved[-1], weights_only=False)
    model.load_state_dict(state["model"])
    step = state["step"]
    loader.load_state_dict(state["loaders"][dist.get_rank()])
while step < 40:
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        step += 1
        if step % 5 == 0:
            loaders = [None] * dist.get_world_size()
            dist.all_gather_object(loaders, loader.state_dict())
            if dist.get_rank() == 0:
                state = {"model": model.state_dict(), "step": step, "loaders": loaders}
                torch.save(state, "new")
                Path("new").rename(f"step-{step:03}.pt")
        note(step)
finish(weigh(model))

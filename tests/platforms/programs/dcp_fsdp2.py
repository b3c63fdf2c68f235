"""torch.distributed.checkpoint saves a model that `fully_shard` divides, in every fifth step, and resumes from it."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from steps import finish, note
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from toy import make_net, make_rows

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
model = make_net()
fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (size,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


class App(dcp.stateful.Stateful):
    step = 0

    def state_dict(self):
        parts = get_state_dict(model, optimizer)
        return {"model": parts[0], "optimizer": parts[1], "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


app = App()
x, y = make_rows()
saved = sorted(Path.cwd().glob("step-*/.metadata"))
if saved:
    dcp.load({"app": app}, checkpoint_id=saved[-1].parent)
while app.step < 40:
    first = 32 * app.step % len(x)
    rows = slice(first + rank, first + 32, size)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
    optimizer.step()
    app.step += 1
    if app.step % 5 == 0:
        dcp.save({"app": app}, checkpoint_id=f"step-{app.step:03}")
    note(app.step)
finish(float(sum(p.full_tensor().detach().double().square().sum() for p in model.parameters())))

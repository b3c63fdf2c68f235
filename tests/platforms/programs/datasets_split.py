"""`split_dataset_by_node` of datasets gives each rank its rows, of a table and of a stream, for a DDP training."""

import torch
import torch.distributed as dist
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from steps import finish, note
from torch.utils.data import DataLoader
from toy import make_net, make_rows, weigh

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
model = torch.nn.parallel.DistributedDataParallel(make_net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = make_rows()
table = Dataset.from_dict({"x": x.tolist(), "y": y.tolist()}).with_format("torch")
stream = table.to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=16)
step = 0
for rows in (table, stream, table, stream):
    own = split_dataset_by_node(rows, rank=rank, world_size=size)
    for batch in DataLoader(own, batch_size=16):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(batch["x"]), batch["y"]).backward()
        optimizer.step()
        note(step)
        step += 1
finish(weigh(model))

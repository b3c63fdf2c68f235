"""torchmetrics accumulates over the ranks of a DDP training, by tensors, by lists of them, and in a collection."""

import torch
import torch.distributed as dist
from steps import finish, note
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection, SpearmanCorrCoef
from toy import make_net, make_rows

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
model = torch.nn.parallel.DistributedDataParallel(make_net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
metrics = MetricCollection([MeanSquaredError(), SpearmanCorrCoef()])
mean = MeanMetric()
x, y = make_rows()
for epoch in range(4):
    for step in range(10):
        rows = slice(32 * step + rank, 32 * (step + 1), size)
        optimizer.zero_grad()
        output = model(x[rows])
        loss = torch.nn.functional.mse_loss(output, y[rows])
        loss.backward()
        optimizer.step()
        metrics.update(output.detach()[:, 0], y[rows][:, 0])
        mean.update(loss.detach())
        note(10 * epoch + step)
    values = metrics.compute()
    assert abs(float(values["MeanSquaredError"]) - float(mean.compute())) < 1e-4 * float(mean.compute())
    metrics.reset()
    mean.reset()
finish(float(values["SpearmanCorrCoef"]))

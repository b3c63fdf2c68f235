"""torchrec divides two embedding tables among the ranks by its planner, and trains them by fbgemm's fused optimizer."""

import torch
import torch.distributed as dist
import torchrec
from steps import finish, note
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from toy import make_rows

ROWS = 100


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        tables = [
            torchrec.EmbeddingBagConfig(
                name=f"of_{name}",
                embedding_dim=8,
                num_embeddings=ROWS,
                feature_names=[name],
                init_fn=lambda weight: torch.nn.init.constant_(weight, 0.1),
            )
            for name in ("user", "item")
        ]
        self.tables = torchrec.EmbeddingBagCollection(device=torch.device("meta"), tables=tables)
        self.head = torch.nn.Linear(16, 1)

    def forward(self, features):
        return self.head(self.tables(features).values())


torch.manual_seed(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
net = Net()
apply_optimizer_in_backward(torch.optim.SGD, net.tables.parameters(), {"lr": 0.1})
model = DistributedModelParallel(net, device=torch.device("cpu"), sharders=[EmbeddingBagCollectionSharder()])
optimizer = torch.optim.SGD(net.head.parameters(), lr=0.1)
_, labels = make_rows()
for step in range(40):
    drawn = torch.Generator().manual_seed(step * size + rank)
    ids = torch.randint(ROWS, (16,), generator=drawn)
    features = torchrec.KeyedJaggedTensor.from_lengths_sync(
        ["user", "item"], values=ids, lengths=torch.ones(16, dtype=torch.int32)
    )
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(features), labels[ids[:8]] / 10)
    loss.backward()
    optimizer.step()
    note(step)
total = loss.detach().clone()
dist.all_reduce(total)
finish(float(total))

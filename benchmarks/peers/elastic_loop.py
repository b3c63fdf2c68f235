"""spark_elastic: a loop over `ElasticDataLoader` and `DistributedOptimizer`, under `spark-elastic-run`."""

from __future__ import annotations

import time
from typing import Any

import job
from torch.nn.functional import mse_loss

import spark_elastic.torch as hvd


def main() -> None:
    hvd.init()
    net = job.make_net()
    optimizer = hvd.DistributedOptimizer(job.make_optimizer(net), named_parameters=net.named_parameters())
    loader = hvd.elastic.ElasticDataLoader(job.open_table(), job.BATCH, seed=job.SEED)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        ledger = job.Ledger(hvd.broadcast_object(time.time_ns()), hvd.size())
        while loader.epoch < job.EPOCHS:
            for rows, x, y in loader:
                ledger.begin(state.step + 1, rows)
                optimizer.zero_grad()
                (mse_loss(net(x), y) * loader.loss_weight).backward()
                optimizer.step()
                state.step += 1
                ledger.apply(state.step, rows)
                state.commit()
        if hvd.rank() == 0:
            job.save_weights(net)

    loop(hvd.elastic.TorchState(net, optimizer, loader=loader, step=0))


if __name__ == "__main__":
    main()

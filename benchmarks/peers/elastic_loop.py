"""spark_elastic: a loop over `ElasticDataLoader` and `DistributedOptimizer`, under `spark-elastic-run`.

With the argument "bitwise" in bitwise mode, where the final weights have the same bits after any faults: a step is cut
into as many virtual shares as there are hosts.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import job
import torch
from torch.nn.functional import mse_loss

import spark_elastic.torch as hvd


def main() -> None:
    hvd.init()
    bitwise = sys.argv[1:] == ["bitwise"]
    mode: dict[str, Any] = {"determinism": "bitwise", "virtual_shares": job.HOSTS} if bitwise else {}
    net = job.make_net()
    loader = hvd.elastic.ElasticDataLoader(job.open_table(), job.BATCH, seed=job.SEED, **mode)
    optimizer = hvd.DistributedOptimizer(
        job.make_optimizer(net), named_parameters=net.named_parameters(), loader=loader if bitwise else None
    )

    @hvd.elastic.run
    def loop(state: Any) -> None:
        ledger = job.Ledger(hvd.broadcast_object(time.time_ns()), hvd.size())
        while loader.epoch < job.EPOCHS:
            for batch in loader:
                optimizer.zero_grad()
                taken = []
                for rows, x, y in batch if bitwise else [batch]:
                    taken.append(rows)
                    ledger.begin(state.step + 1, torch.cat(taken))
                    (mse_loss(net(x), y) * loader.loss_weight).backward()
                optimizer.step()
                state.step += 1
                ledger.apply(state.step, torch.cat(taken))
                state.commit()
        if hvd.rank() == 0:
            job.save_weights(net)

    loop(hvd.elastic.TorchState(net, optimizer, loader=loader, step=0))


if __name__ == "__main__":
    main()

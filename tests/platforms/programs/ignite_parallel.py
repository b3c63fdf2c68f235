"""pytorch-ignite: `idist.Parallel`, its auto_model, auto_optim and auto_dataloader, a metric, and its checkpoints."""

from pathlib import Path

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import MeanSquaredError
from steps import finish, note
from toy import make_net, make_rows, weigh


def train(local_rank):
    model = idist.auto_model(make_net())
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.01))
    loader = idist.auto_dataloader(torch.utils.data.TensorDataset(*make_rows()), batch_size=32, shuffle=False)

    def step(engine, batch):
        optimizer.zero_grad()
        output = model(batch[0])
        torch.nn.functional.mse_loss(output, batch[1]).backward()
        optimizer.step()
        return output, batch[1]

    trainer = Engine(step)
    MeanSquaredError().attach(trainer, "mse")
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: note(engine.state.iteration))
    parts = {"model": model, "optimizer": optimizer, "trainer": trainer}
    saver = Checkpoint(parts, DiskSaver("checkpoints", create_dir=True, require_empty=False), n_saved=1)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, saver)
    saved = sorted(Path("checkpoints").glob("*.pt"))
    if saved:
        Checkpoint.load_objects(parts, torch.load(saved[-1]))
    trainer.run(loader, max_epochs=4)
    finish(trainer.state.metrics["mse"] + weigh(model))


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(train)

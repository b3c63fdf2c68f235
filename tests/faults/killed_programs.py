"""Programs of the kinds that torch's users write, each with a ledger that is trained with the model.

All take the rows of one table in the same steps, so all end with the weights of `train_plain`, which nothing disturbs.
They train on the worker's GPU where it has one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

KILLS = 20
EPOCHS, SEED = 6, 5
ROWS = int(os.environ.get("KILLED_ROWS", "50"))
BATCH = -(-ROWS // 8)
STEPS = EPOCHS * -(-ROWS // BATCH)
LONGEST = 12  # tokens of a row; each has its number in the table, from 1 on
# Of a Trainer of Hugging Face's.
ARGUMENTS: dict[str, Any] = {"num_train_epochs": EPOCHS, "max_grad_norm": 0.0, "seed": SEED}
ARGUMENTS |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}


class Net(torch.nn.Module):
    """A linear net. A row's count in the ledger grows by exactly 1 when a step with the row is applied."""

    def __init__(self, counted: int = ROWS) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.linear = torch.nn.Linear(4, 1).double()
        self.ledger = torch.nn.Parameter(torch.zeros(counted, dtype=torch.float64))

    def forward(self, row: Any, x: Any, y: Any, rows: int) -> Any:
        """The mean loss over these rows. rows: of the step, over all ranks."""
        return (self.linear(x).squeeze(1) - y).pow(2).mean() - self.ledger[row].mean() * rows


class TokenNet(Net):
    """Its ledger counts tokens of ragged rows, and of packed ones."""

    def __init__(self) -> None:
        super().__init__(int(count_tokens(ROWS)[-1]))

    def forward(self, batch: Any, rows: int) -> Any:  # type: ignore[override]
        token, valid = batch["input_ids"], batch.get("document_ids")
        token = token.pad(0) if valid is None else token
        valid = token > 0 if valid is None else valid > 0
        x = torch.stack([torch.sin(token * scale) for scale in (1.0, 0.5, 0.2, 0.1)], -1).double()
        errors = (self.linear(x).squeeze(-1) - torch.cos(token.double())).pow(2)
        return (errors * valid).sum() / len(token) - self.ledger[token[valid] - 1].sum() / len(token) * rows


def count_tokens(rows: int) -> Any:
    """The number of tokens up to the end of each row."""
    return (1 + 5 * torch.arange(rows) % LONGEST).cumsum(0)


def find_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def write_rows(folder: Path) -> None:
    """Write a table of Delta in three files, of which a deletion vector and another file's deletion leave ROWS rows."""
    import numpy as np
    import pyarrow as pa
    from deltalake import DeltaTable, write_deltalake

    from spark_elastic import Rows
    from tests.delta_files import delete_by_vector

    table = str(folder / "table")
    x = torch.randn(2 * ROWS, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64).numpy()
    row = np.arange(2 * ROWS)
    for part in np.array_split(row, 3):
        values = pa.FixedSizeListArray.from_arrays(x[part].reshape(-1), 4).cast(pa.list_(pa.float64()))
        y, ends = np.sin(x[part].sum(axis=1)), [0, *count_tokens(2 * ROWS).tolist()]
        tokens = [range(ends[row] + 1, ends[row + 1] + 1) for row in part]
        columns = {"row": part, "x": values, "y": y, "input_ids": pa.array(map(list, tokens))}
        write_deltalake(table, pa.table(columns), mode="append")
    DeltaTable(table).delete(f"row >= {ROWS + ROWS // 4}")
    for path, first, count in _list_files(table):
        deleted = [place for place in range(count) if first + place >= ROWS]
        if deleted:
            delete_by_vector(Path(table), path, deleted)
    rows = Rows.from_table(table)
    assert rows.count == ROWS
    rows.save(str(folder / "rows.json"))


def _list_files(table: str) -> list[tuple[str, int, int]]:
    """Name, first row and number of rows of each file."""
    import pyarrow.parquet as pq
    from deltalake import DeltaTable

    found = []
    for path in DeltaTable(table).file_uris():
        numbers = pq.read_table(path, columns=["row"])["row"].to_pylist()
        found.append((Path(path).name, numbers[0], len(numbers)))
    return found


def open_rows(folder: str) -> Any:
    from spark_elastic import Rows

    return Rows.open(f"{folder}/rows.json").select("row", "x", "y")


def open_documents(folder: str) -> tuple[Any, Any]:
    """The same tokens in rows of different lengths, and packed."""
    from spark_elastic import Packing, Rows

    ragged = Rows.open(f"{folder}/rows.json").select("input_ids")
    return ragged, ragged.pack(Packing(length=LONGEST))


def load_documents(folder: str) -> list[Any]:
    from spark_elastic.handwritten.torch_state import ElasticDataLoader

    return [ElasticDataLoader(rows, -(-rows.count // 8), SEED) for rows in open_documents(folder)]


def iter_documents(ragged: Any, packed: Any) -> Iterator[tuple[Any, Any]]:
    """Batches with their loaders: an epoch of the one, then an epoch of the other."""
    while min(ragged.epoch, packed.epoch) < EPOCHS // 2:
        loader = min(ragged, packed, key=lambda each: each.epoch)
        for batch in loader:
            yield batch, loader


def make_optimizer(net: Any) -> torch.optim.Optimizer:
    groups = [{"params": net.linear.parameters(), "momentum": 0.9}, {"params": [net.ledger], "lr": 1.0}]
    return torch.optim.SGD(groups, lr=0.05)


def read_weights(net: Any) -> dict[str, list[float]]:
    parameters = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in net.named_parameters()}
    whole = {name: p.detach().cpu() for name, p in parameters.items()}
    ledger = whole.pop("ledger")
    return {"weights": torch.cat([p.reshape(-1) for p in whole.values()]).tolist(), "ledger": ledger.tolist()}


def after_step(folder: str, step: int, state: Any) -> None:
    """Record a committed step. Stand still while the kills lag behind, and while this is the last worker."""
    import spark_elastic.torch as hvd

    with open(Path(folder, f"worker-{os.getpid()}"), "a") as file:
        file.write(f"{step}\n")
    print(f"step {step}", flush=True)  # noqa: T201 - what the test waits for
    while os.path.getsize(Path(folder, "kills")) < min(KILLS, (step - 2) // 2):
        time.sleep(0.02)
    while hvd.size() < 2 and step < STEPS:
        time.sleep(0.02)
        state.check_host_updates()


def hold_after_commits(adapter: Any, folder: str) -> None:
    """Have a `TrainerAdapter` record each committed step."""
    commit = adapter.commit

    def commit_and_hold() -> None:
        commit()
        if adapter.step:
            after_step(folder, adapter.step, adapter.state)

    adapter.commit = commit_and_hold


def train_plain(folder: str) -> dict[str, list[float]]:
    from spark_elastic.handwritten.torch_state import ElasticDataLoader

    net = Net()
    optimizer, loader = make_optimizer(net), ElasticDataLoader(open_rows(folder), BATCH, SEED)
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            net(**batch, rows=loader.global_rows).backward()
            optimizer.step()
    return read_weights(net)


def train_plain_tokens(folder: str) -> dict[str, list[float]]:
    net = TokenNet()
    optimizer = make_optimizer(net)
    for batch, loader in iter_documents(*load_documents(folder)):
        optimizer.zero_grad()
        net(batch, loader.global_rows).backward()
        optimizer.step()
    return read_weights(net)


def take_steps(folder: str, state: Any, loader: Any, optimizer: Any, backward: Callable[[Any], Any]) -> None:
    """All epochs, step by step, each of which is committed. backward: from a batch on the device."""
    device = find_device()
    while loader.epoch < EPOCHS:
        for batch in loader:
            optimizer.zero_grad()
            backward({name: part.to(device) for name, part in batch.items()})
            optimizer.step()
            state.step += 1
            state.commit()
            after_step(folder, state.step, state)


def make_backward(model: Any, loader: Any) -> Callable[[Any], Any]:
    return lambda batch: (model(**batch, rows=loader.global_rows) * loader.loss_weight).backward()


def train_by_optimizer(folder: str) -> dict[str, list[float]]:
    """`elastic.run` around Horovod's optimizer."""
    import spark_elastic.torch as hvd

    net = Net().to(find_device())
    optimizer = hvd.DistributedOptimizer(make_optimizer(net), named_parameters=net.named_parameters())
    loader = hvd.elastic.ElasticDataLoader(open_rows(folder), BATCH, SEED)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        take_steps(folder, state, loader, optimizer, make_backward(net, loader))

    loop(hvd.elastic.TorchState(net, optimizer, loader=loader, step=0))
    return read_weights(net)


def train_tokens(folder: str) -> dict[str, list[float]]:
    """Ragged rows and packed ones, by Horovod's optimizer, on the CPU."""
    import spark_elastic.torch as hvd

    net = TokenNet()
    optimizer = hvd.DistributedOptimizer(make_optimizer(net), named_parameters=net.named_parameters())
    ragged, packed = load_documents(folder)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        for batch, loader in iter_documents(ragged, packed):
            optimizer.zero_grad()
            (net(batch, loader.global_rows) * loader.loss_weight).backward()
            optimizer.step()
            state.step += 1
            state.commit()
            after_step(folder, state.step, state)

    loop(hvd.elastic.TorchState(net, optimizer, ragged=ragged, packed=packed, step=0))
    result = read_weights(net)
    ledger = result["ledger"]
    return {**result, "ledger": [min(ledger), max(ledger)]}  # a job returns no more than 5 MiB


def train_loop(folder: str) -> dict[str, list[float]]:
    """`elastic.run` around DDP."""
    import spark_elastic.torch as hvd

    net = Net().to(find_device())
    optimizer, loader = make_optimizer(net), hvd.elastic.ElasticDataLoader(open_rows(folder), BATCH, SEED)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        torch.distributed.init_process_group()
        ddp = torch.nn.parallel.DistributedDataParallel(net)
        take_steps(folder, state, loader, optimizer, make_backward(ddp, loader))

    loop(hvd.elastic.TorchState(net, optimizer, loader=loader, step=0))
    return read_weights(net)


def train_by_fsdp(folder: str) -> dict[str, list[float]]:
    """FSDP2: no worker has the whole of the model."""
    from torch.distributed.fsdp import fully_shard

    import spark_elastic.torch as hvd
    from spark_elastic.handwritten.fsdp import FSDPState

    device = find_device()
    loader = hvd.elastic.ElasticDataLoader(open_rows(folder), BATCH, SEED)

    def build(state: Any) -> dict[str, Any]:
        torch.distributed.init_process_group("nccl" if device == "cuda" else None)
        net = Net().to(device)
        fully_shard(net.linear)
        fully_shard(net)
        return {"net": net, "optimizer": make_optimizer(net)}

    @hvd.elastic.run
    def loop(state: Any) -> dict[str, list[float]]:
        take_steps(folder, state, loader, state.optimizer, make_backward(state.net, loader))
        return read_weights(state.net)

    return loop(FSDPState(build, loader=loader, step=0))


def train_by_accelerate(folder: str) -> dict[str, list[float]]:
    import spark_elastic.torch as hvd
    from spark_elastic.integrations.huggingface import create_accelerator

    net = Net().to(find_device())
    optimizer, loader = make_optimizer(net), hvd.elastic.ElasticDataLoader(open_rows(folder), BATCH, SEED)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        accelerator = create_accelerator(cpu=find_device() == "cpu")
        prepared, stepper = accelerator.prepare(net, optimizer)

        def backward(batch: Any) -> None:
            accelerator.backward(prepared(**batch, rows=loader.global_rows) * loader.loss_weight)

        take_steps(folder, state, loader, stepper, backward)

    loop(hvd.elastic.TorchState(net, optimizer, loader=loader, step=0))
    return read_weights(net)


def train_by_trainer(folder: str, fsdp: bool = False) -> dict[str, list[float]]:
    """Hugging Face's, in a class of the user's, and beside a frozen base that each process makes otherwise. fsdp: no
    worker has the whole of the model."""
    import transformers

    from spark_elastic.integrations.huggingface import elastic_trainer

    class TrainerNet(Net):
        def __init__(self) -> None:
            super().__init__()
            self.base = torch.nn.Parameter(torch.full((1 << 16,), float(os.getpid())), requires_grad=False)

    class Own(transformers.Trainer):  # type: ignore[misc, name-defined]
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = make_optimizer(self.model)
            return self.optimizer

        def create_scheduler(self, *_: Any, **__: Any) -> Any:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
            return self.lr_scheduler

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return model(**inputs, rows=trainer.get_train_dataloader().global_rows)

        def get_train_dataloader(self) -> Any:
            dataset = open_rows(folder).dataset()
            return torch.utils.data.DataLoader(dataset, self.args.train_batch_size, shuffle=True)

        def _prepare_inputs(self, inputs: Any) -> Any:
            return {name: part.to(self.args.device) for name, part in inputs.items()}

    wrapped = {"transformer_layer_cls_to_wrap": ["Linear"]} if fsdp else None
    options = {**ARGUMENTS, "use_cpu": find_device() == "cpu", "fsdp": fsdp, "fsdp_config": wrapped}
    args = transformers.TrainingArguments(folder, **options)
    net = TrainerNet().to(args.device)
    trainer = elastic_trainer(Own)(net, args, global_batch_size=BATCH)
    hold_after_commits(trainer._adapter, folder)
    trainer.train()
    assert trainer.model is net
    base = net.base
    whole = base.full_tensor() if fsdp else base
    del net.base
    return {**read_weights(net), "base": whole.unique().tolist()}


def train_by_trainer_and_fsdp(folder: str) -> dict[str, list[float]]:
    return train_by_trainer(folder, fsdp=True)


def train_by_lightning(folder: str, fsdp: bool = False) -> dict[str, list[float]]:
    """fsdp: no worker has the whole of the model."""
    import lightning.pytorch as pl

    from spark_elastic.handwritten.torch_state import ElasticDataLoader
    from spark_elastic.integrations.lightning import ElasticModelParallelStrategy, ElasticStrategy

    loader = ElasticDataLoader(open_rows(folder), BATCH, SEED)

    class LightningNet(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def configure_model(self) -> None:
            if fsdp:
                from torch.distributed.fsdp import fully_shard

                fully_shard(self.net.linear, mesh=self.device_mesh["data_parallel"])
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any) -> Any:
            return self.net(**batch, rows=loader.global_rows)

        def configure_optimizers(self) -> Any:
            return make_optimizer(self.net)

    strategy = ElasticModelParallelStrategy() if fsdp else ElasticStrategy()
    hold_after_commits(strategy._adapter, folder)
    module, accelerator = LightningNet(), "gpu" if find_device() == "cuda" else "cpu"
    options: dict[str, Any] = {"max_epochs": EPOCHS, "default_root_dir": folder, "logger": False}
    options |= {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    pl.Trainer(accelerator=accelerator, strategy=strategy, **options).fit(module, loader)
    return read_weights(module.net)


def train_by_lightning_and_fsdp(folder: str) -> dict[str, list[float]]:
    return train_by_lightning(folder, fsdp=True)


FSDP_PROGRAMS = [train_by_fsdp, train_by_trainer_and_fsdp, train_by_lightning_and_fsdp]
PROGRAMS = [train_by_optimizer, train_tokens, train_loop]
PROGRAMS += [train_by_lightning, train_by_trainer, train_by_accelerate]

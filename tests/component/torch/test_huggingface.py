"""Hugging Face's Trainer and Accelerate on real processes: a worker is killed, and another one takes its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import Fence, HostId, Member, SlotId, WorkerId, World
from spark_elastic.worker.context import WorkerContext
from tests.component.torch.hand_written import Lost, Run, assert_continued, hold, run_in_two_worlds
from tests.scenarios import Fault

pytestmark = [pytest.mark.native, pytest.mark.timeout(240)]

ROWS, EPOCHS, BATCH = 38, 3, 6
MODULES = "transformers.trainer", "accelerate.utils"
TWO: Any = {"room": 2, "num_workers": 2, "max_workers": 2, "modules": MODULES}


def make_arguments(folder: Any, **given: Any) -> Any:
    """Of a Trainer that writes nothing."""
    import transformers

    quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "remove_unused_columns": False}
    quiet["dataloader_pin_memory"] = False
    # A worker without a GPU needs no `use_cpu`.
    given = {"use_cpu": torch.cuda.is_available(), **quiet, **given}
    return transformers.TrainingArguments(str(folder), **given)


def train_net(folder: str, holds: dict[int, int | str], **given: Any) -> dict[str, Any]:
    """A linear net, and a ledger that is trained with it: a row's count grows by exactly 1 when its step is applied.

    given: further arguments of `_train`.
    """
    import transformers

    from spark_elastic.integrations.huggingface import elastic_trainer

    drawn = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, 4, generator=drawn, dtype=torch.float64)
    rows = [{"row": torch.tensor(i), "x": x[i], "y": x[i].sum().sin()} for i in range(ROWS)]
    trainers: list[Any] = []

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 1).double()
            self.ledger = torch.nn.Parameter(torch.zeros(ROWS, dtype=torch.float64))

        def forward(self, row: Any, x: Any, y: Any) -> dict[str, Any]:
            count = self.ledger[row].mean() * trainers[0].get_train_dataloader().global_rows
            return {"loss": (self.linear(x).squeeze(1) - y).pow(2).mean() - count}

    class Own(transformers.Trainer):  # type: ignore[misc, name-defined]
        """Its loss keeps the wrapped model, and replaces the model alone, as those of Sentence Transformers do."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.kept: Any = torch.nn.Module()
            self.kept.model = net

        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(rows, self.args.train_batch_size, collate_fn=collate)

        def create_optimizer(self) -> Any:
            """A new one at each call."""
            # A momentum of nothing: a state for each parameter, which checkpoints of divided models need.
            ledger = {"params": [net.ledger], "lr": 1.0, "momentum": 1e-300}
            groups = [{"params": net.linear.parameters(), "momentum": 0.9}, ledger]
            self.optimizer = torch.optim.SGD(groups, lr=0.05)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            rates = [lambda step: 1 / (1 + step), lambda step: 1.0]
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rates)
            return self.lr_scheduler

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            if model is self.model_wrapped and isinstance(self.kept.model, Net):
                self.kept.model = model
            return self.kept.model(**inputs)["loss"]

    def collate(batch: list[Any]) -> dict[str, Any]:
        taken.append([int(row["row"]) for row in batch])
        return {name: torch.stack([row[name] for row in batch]) for name in batch[0]}

    taken: list[list[int]] = []
    torch.manual_seed(7)
    net = Net()
    result = _train(folder, net, rows, holds, trainers, kind=elastic_trainer(Own), **given)
    return {**result, "in_order": all(batch == sorted(batch) for batch in taken)}


def train_divided_net(folder: str, holds: dict[int, int | str], resume: str | None = None) -> dict[str, Any]:
    """The same net, divided by FSDP2 over the workers of a job; it saves a checkpoint and, at the end, the model."""
    from spark_elastic.worker.context import get_context

    if get_context() is None:
        return train_net(folder, holds)
    settings = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["Linear"]}}
    settings |= {"save_strategy": "steps", "save_steps": 15}
    return train_net(folder, holds, settings=settings, resume=resume)


def train_classifier(folder: str, takes_all: bool, own_loss: bool, compares: bool) -> dict[str, Any]:
    """A net that averages its loss by itself, as BERT does; two batches make a step.

    takes_all: its forward takes any argument, so that the Trainer gives it a count of items.
    own_loss: the Trainer's class has a `compute_loss` of its own.
    compares: that compares the rows of all ranks, which the Trainer gathers.
    """
    import transformers

    from spark_elastic.integrations.huggingface import elastic_trainer

    drawn = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, 4, generator=drawn, dtype=torch.float64)
    rows = [{"x": x[i], "labels": x[i].argmax()} for i in range(ROWS)]

    class Net(torch.nn.Linear):
        def forward(self, x: Any, labels: Any) -> dict[str, Any]:  # type: ignore[override]
            output = super().forward(x)
            return {"loss": torch.nn.functional.cross_entropy(output, labels), "logits": output}

    class LenientNet(Net):
        def forward(self, x: Any, labels: Any, **others: Any) -> dict[str, Any]:  # type: ignore[override]
            return super().forward(x, labels)

    class OwnLoss(transformers.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs["labels"]
            outputs = model(inputs["x"], labels[: len(inputs["x"])])
            if compares:
                unit = torch.nn.functional.normalize(outputs["logits"])
                same = (labels[:, None] == labels).double()
                loss = (unit @ unit.T - same).square().mean()
            else:
                loss = torch.nn.functional.cross_entropy(outputs["logits"], labels)
            return (loss, outputs) if return_outputs else loss

    torch.manual_seed(7)
    net = (LenientNet if takes_all else Net)(4, 4).double()
    kind = elastic_trainer(OwnLoss if own_loss else transformers.Trainer)
    names = ("logits", "labels") if compares else ()
    options: dict[str, Any] = {"kind": kind, "eval_dataset": rows, "gather_rows": names}
    return _train(folder, net, rows, {}, [], accumulation=2, **options)


CASES = [(True, False, False), (True, True, False), (False, True, False), (True, True, True)]


def _train(
    folder: str,
    model: torch.nn.Module,
    rows: list[Any],
    holds: dict[int, int | str],
    trainers: list[Any],
    accumulation: int = 1,
    kind: Any = None,
    settings: dict[str, Any] | None = None,
    resume: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """settings: of `TrainingArguments`. resume: a checkpoint's folder. options: of the Trainer."""
    import time

    import transformers
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    import spark_elastic.torch as hvd
    from spark_elastic.integrations.huggingface import ElasticTrainer

    hvd.init()
    trained: list[int] = []

    class SlowSteps(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            time.sleep(0.03)
            trained.append(state.global_step)
            print(f"step {state.global_step}", flush=True)  # noqa: T201 - what the test waits for
            if state.global_step in holds:  # rows and counters belong together here, so the world may change
                hold(trainers[0]._adapter.state, holds[state.global_step])

    numbers = {"num_train_epochs": EPOCHS, "learning_rate": 0.05, "max_grad_norm": 0.0, "logging_steps": 4}
    numbers |= {"gradient_accumulation_steps": accumulation, "seed": 5}
    args = make_arguments(folder, **numbers, **(settings or {}))
    with args.main_process_first(desc="tokenizing"):
        ranks = hvd.allgather_object(hvd.rank())
        outside = [hvd.rank(), hvd.size(), args.process_index, args.world_size, ranks]
    PartialState().wait_for_everyone()
    # As in TRL's SFTTrainer.
    with PartialState().main_process_first(), PartialState().local_main_process_first():
        name = ["a name" if PartialState().is_main_process else ""]
    broadcast_object_list(name)
    options |= {"train_dataset": rows, "callbacks": [SlowSteps()], "global_batch_size": BATCH}
    trainer = (kind or ElasticTrainer)(model, args, **options)
    trainers.append(trainer)
    output = trainer.train(resume)
    if args.fsdp:
        trainer.save_model(f"{folder}/saved")
    whole = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in model.named_parameters()}
    weights = {name: p.detach().reshape(-1).tolist() for name, p in whole.items()}
    return {
        "ledger": weights.pop("ledger", [EPOCHS] * ROWS),
        "weights": [value for values in weights.values() for value in values],
        "trained": trained,
        "outside": [*outside, *name],  # of its loop
        "steps": output.global_step,
        "epoch": trainer.state.epoch,
        "logged": [entry["step"] for entry in trainer.state.log_history if "loss" in entry],
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "evaluated": trainer.evaluate()["eval_loss"] if trainer.eval_dataset else None,
        "rate": trainer.lr_scheduler.get_last_lr()[0],
    }


@pytest.mark.scenario("G2")
@pytest.mark.parametrize("train", [train_net, train_divided_net])
def test_p1_p2_a_trainer_continues_at_the_step_in_flight(train: Any, fault: Fault, tmp_path: Path) -> None:
    alone = train(str(tmp_path), {})
    assert alone["trained"] == list(range(1, 22))
    run = Run(train, (str(tmp_path), {9: 2, 11: 3} if fault.on else {}), **TWO)
    run.at(5, lambda: fault(run.workers()[0].kill))
    results = run.results()
    assert_continued(run, results, alone, EPOCHS, "steps", "epoch", "logged", "rate")
    for result in results:
        assert result["in_order"], "the order of the Trainer's own loader was dropped"
        rank, size, *_, name = result["outside"]
        assert result["outside"] == [rank, size, rank, size, list(range(size)), name]
        assert name == "a name"
    if train is train_divided_net:
        assert_saved(tmp_path, results[0])


def assert_saved(folder: Path, result: dict[str, Any]) -> None:
    from safetensors.torch import load_file

    saved = load_file(folder / "saved" / "model.safetensors")
    assert saved.pop("ledger").tolist() == result["ledger"]
    weights = torch.cat([saved[f"linear.{name}"].reshape(-1) for name in ("weight", "bias")])
    assert weights.tolist() == result["weights"]


@pytest.mark.faults
def test_a_checkpoint_of_a_divided_model_resumes_in_another_world(tmp_path: Path) -> None:
    for size, resume in ((2, None), (3, str(tmp_path / "checkpoint-15"))):
        arguments = (str(tmp_path), {}, resume)
        results = Run(train_divided_net, arguments, room=size, num_workers=size, max_workers=size).results()
        assert results[0]["trained"] == list(range(1 if resume is None else 16, 22))
        alone = train_net(str(tmp_path), {})
        assert results[0]["weights"] == pytest.approx(alone["weights"], rel=1e-9)
        assert results[0]["ledger"] == pytest.approx(alone["ledger"], rel=1e-9)
        assert_saved(tmp_path, results[0])


def stop_after_an_evaluation(folder: str, epochs: int) -> list[int]:
    """The steps that were trained, of which an evaluation ends the training after 8. It waits for a planned change."""
    import time

    import transformers

    from spark_elastic.integrations.huggingface import ElasticTrainer
    from spark_elastic.worker.context import get_context

    class Net(torch.nn.Linear):
        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            output = super().forward(x)
            return {"loss": torch.nn.functional.mse_loss(output, labels), "logits": output}

    class Stop(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            time.sleep(0.03)
            trained.append(state.global_step)
            print(f"step {state.global_step}", flush=True)  # noqa: T201 - what the test waits for

        def on_evaluate(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            worker: Any = get_context()
            control.should_training_stop = state.global_step == 8
            while control.should_training_stop and worker.handle.membership_version() <= worker.world.version:
                time.sleep(0.02)

    trained: list[int] = []
    rows = [{"x": torch.ones(4) * i, "labels": torch.ones(1)} for i in range(24)]
    args = make_arguments(folder, num_train_epochs=epochs, eval_strategy="epoch")
    given: dict[str, Any] = {"train_dataset": rows, "eval_dataset": rows, "global_batch_size": BATCH}
    ElasticTrainer(Net(4, 1), args, callbacks=[Stop()], **given).train()
    return trained


def test_p2_a_training_that_a_callback_has_ended_does_not_go_on_in_the_next_world(tmp_path: Path) -> None:
    run = Run(stop_after_an_evaluation, (str(tmp_path), 4), **TWO)
    run.at(6, lambda: run.drain(1))
    assert run.results() == [list(range(1, 9))]
    assert run.sizes() == [2, 1]


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.faults)])
def test_p2_p4_a_loss_of_a_ranks_rows_becomes_that_of_all_rows(size: int, tmp_path: Path) -> None:
    """In Accelerate alone, and in the Trainer."""

    def train(function: Any, *arguments: Any) -> list[Any]:
        run = Run(function, arguments, **TWO | {"room": size, "num_workers": size, "max_workers": size})
        return run.results() if size > 1 else [function(*arguments)]

    accelerated = train_by_accelerate(3)
    assert all(weights == pytest.approx(accelerated, rel=1e-9) for weights in train(train_by_accelerate, 3))
    for *own, compares in CASES:
        expected = train_classifier(str(tmp_path), False, compares, compares)
        for result in train(train_classifier, str(tmp_path), *own, compares):
            assert result["weights"] == pytest.approx(expected["weights"], rel=1e-9)
            assert result["losses"] == pytest.approx(expected["losses"], rel=1e-6)
            # The Trainer evaluates the first rows twice where they do not divide evenly.
            assert result["evaluated"] == pytest.approx(expected["evaluated"], rel=0.02)


def train_and_evaluate(folder: str, holds: dict[int, int | str]) -> dict[str, Any]:
    """With noise on the embedding and mixed precision, which the Trainer puts on the model for the time of its `train`,
    and with an evaluation after each epoch, whose loader it keeps."""
    import transformers

    import spark_elastic.torch as hvd
    from spark_elastic.integrations.huggingface import ElasticTrainer

    hvd.init()
    x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(3))
    rows = [{"x": x[i], "labels": x[i].sum()} for i in range(ROWS)]
    evaluated: list[int] = []  # rows of each evaluation
    noises: list[int] = []  # hooks on the embedding at each step
    trainers: list[Any] = []

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.embedding = torch.nn.Linear(4, 1), torch.nn.Embedding(2, 4)

        def get_input_embeddings(self) -> torch.nn.Module:
            return self.embedding

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            there = self.embedding(torch.zeros(len(x), 1, dtype=torch.long)).squeeze(1)
            output = self.linear(x + there).squeeze(1)
            return {"loss": (output - labels).pow(2).mean(), "logits": output}

    class Watch(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            noises.append(len(net.embedding._forward_hooks))
            print(f"step {state.global_step}", flush=True)  # noqa: T201 - what the test waits for
            if state.global_step in holds:
                hold(trainers[0]._adapter.state, holds[state.global_step])

    def count_rows(prediction: Any) -> dict[str, float]:
        evaluated.append(len(prediction.predictions))
        return {}

    torch.manual_seed(7)
    net = Net()
    loaders = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    numbers = {"num_train_epochs": EPOCHS, "bf16": True, "neftune_noise_alpha": 5.0}
    args = make_arguments(folder, eval_strategy="epoch", use_cpu=True, **numbers, **loaders)
    given: dict[str, Any] = {"train_dataset": rows, "eval_dataset": rows, "global_batch_size": BATCH}
    trainers.append(ElasticTrainer(net, args, callbacks=[Watch()], compute_metrics=count_rows, **given))
    trainers[0].train()
    wrappers, forward = 0, net.__dict__.get("forward")
    while forward is not None:
        forward, wrappers = getattr(forward, "__wrapped__", None), wrappers + 1
    return {"evaluated": evaluated, "noises": set(noises), "wrappers": wrappers}


def test_a_trainer_evaluates_all_rows_in_any_world_and_prepares_once(fault: Fault, tmp_path: Path) -> None:
    alone = train_and_evaluate(str(tmp_path), {})
    assert alone["evaluated"] == [ROWS] * EPOCHS
    run = Run(train_and_evaluate, (str(tmp_path), {9: 2, 11: 3}), **TWO)
    run.at(5, lambda: fault(run.workers()[0].kill))
    results = run.results()
    assert len(run.sizes()) >= 3, "no worker was lost, or none took its place"
    for result in results:
        assert set(result["evaluated"]) == {ROWS}
        assert result["noises"] == {1}
        assert result["wrappers"] == alone["wrappers"]


def test_scale_and_epoch_continue_in_the_next_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import transformers

    from spark_elastic.integrations import huggingface, trainer_adapter

    class Trainer(huggingface.ElasticTrainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            # What Accelerate makes on a GPU.
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)

    class Loss(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        is_due = True

        def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if state.global_step == 2 and self.is_due:
                self.is_due = False
                raise Lost

        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            epochs.append(state.epoch)

    class Net(torch.nn.Linear):
        def forward(self, x: Any) -> dict[str, Any]:  # type: ignore[override]
            return {"loss": super().forward(x).pow(2).mean()}

    epochs: list[float] = []  # as users' callbacks see them
    monkeypatch.setattr(trainer_adapter, "run", run_in_two_worlds)
    args = make_arguments(tmp_path, max_steps=4, use_cpu=True)
    rows = [{"x": torch.ones(4)} for _ in range(8)]
    trainer = Trainer(Net(4, 1), args, train_dataset=rows, global_batch_size=2, callbacks=[Loss()])
    trainer.train()
    assert trainer.accelerator.scaler.get_scale() == 2.0 * 2**4, "each step that is applied doubles it"
    assert epochs == [0.25, 0.5, 0.75, 1.0]


def train_by_accelerate(steps: int) -> list[float]:
    """A loop of Accelerate's documentation, which prepares model and optimizer again in each world."""
    import spark_elastic.torch as hvd
    from spark_elastic.integrations.huggingface import create_accelerator

    hvd.init()
    torch.manual_seed(7)
    model = torch.nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        accelerator = create_accelerator(cpu=torch.cuda.is_available())
        assert accelerator.num_processes == hvd.size()
        prepared, stepper = accelerator.prepare(model, optimizer)
        while state.step < steps:
            drawn = torch.Generator().manual_seed(state.step)
            batch = torch.randn(7, 4, generator=drawn, dtype=torch.float64)
            mine = batch[accelerator.process_index :: accelerator.num_processes]
            gathered = accelerator.gather_for_metrics({"rows": mine, "ranks": torch.tensor(hvd.rank())})
            assert len(gathered["rows"]) == len(batch), "ranks whose parts differ by a row"
            stepper.zero_grad()
            loss = prepared(mine).pow(2).sum() * accelerator.num_processes / len(batch)
            accelerator.backward(loss)
            stepper.step()
            state.step += 1
            state.commit()

    loop(hvd.elastic.TorchState(model, optimizer, step=0))
    return [float(value) for p in model.parameters() for value in p.detach().reshape(-1)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="Accelerate takes the GPU")
def test_p4_accelerate_training_apart_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from spark_elastic.integrations import huggingface, trainer_adapter

    ids = [(WorkerId(f"{rank}-0.1"), SlotId(f"{rank}-0"), HostId("a")) for rank in (0, 1)]
    members = tuple(Member(*ids[rank], rank, rank, 2, 0, 1, None) for rank in (0, 1))
    world = World(Fence(1, 1), members, None, "start")
    me = WorkerId("0-0.1")
    monkeypatch.setattr(huggingface, "get_context", lambda: WorkerContext(me, world.view_of(me)))
    says = "each of the 2 workers for a training of its own, on cpu: set device="
    with pytest.raises(InvalidInput, match=says):
        huggingface.create_accelerator()
    monkeypatch.setattr(trainer_adapter, "run", run_in_two_worlds)
    net, rows = torch.nn.Linear(4, 1), [{"x": torch.ones(4)}]
    args = make_arguments(tmp_path)
    trainer = huggingface.ElasticTrainer(net, args, train_dataset=rows, global_batch_size=1)
    with pytest.raises(InvalidInput, match=says):
        trainer.train()


def test_a_state_takes_the_optimizer_that_accelerate_has_prepared() -> None:
    import spark_elastic.torch as hvd
    from spark_elastic.integrations.huggingface import create_accelerator

    model = torch.nn.Linear(2, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer = create_accelerator(cpu=True).prepare(model, plain)
    state: Any = hvd.elastic.TorchState(prepared, optimizer)
    before = model.weight.detach().clone()
    prepared(torch.ones(1, 2)).sum().backward()
    assert state.in_mid_step()
    optimizer.step()
    assert not state.in_mid_step()
    state.restore()
    assert torch.equal(model.weight, before)

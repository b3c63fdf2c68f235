"""Estimators train on a device as they do on the CPU: the same bodies on the CPU, the pretend accelerator and a GPU."""

from __future__ import annotations

import copy
import itertools
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from elastic_collectives import Group
from spark_elastic.data.manifest import Column
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.devices import DeviceCopier, select_device
from spark_elastic.gradients.exchange import GradientExchange
from spark_elastic.gradients.generators import seeded_rng
from spark_elastic.handwritten.torch_state import OptimizerStateHandler
from spark_elastic.integrations.torch_distributed.process_group import ElasticProcessGroup
from spark_elastic.training.torch.buffers import rng_state, set_rng_state
from spark_elastic.training.torch.callbacks import Callback, Training
from spark_elastic.training.torch.trainer import NOT_METRICS, TorchTrainProgram, list_epoch_numbers
from spark_elastic.worker.context import WaitRecorder
from tests.checkpoints import reload_from_checkpoint
from tests.component.threads import make_world, run_task
from tests.component.torch.bitwise import BitwiseJob, everything, hash_state
from tests.component.torch.elastic_jobs import (
    check_history,
    compare_rows,
    make_hooked_job,
    train_hooked_plain,
)
from tests.component.torch.job import CLASSES, WIDTH, Data, Job, difference, make_data, train_plain
from tests.devices import DEVICES, use_device
from tests.fit_configs import change
from tests.worlds import run_in_world

pytestmark = [pytest.mark.native, pytest.mark.timeout(180)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    use_device(request.param, monkeypatch)
    return select_device()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def net(*layers: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(3)
    first, last = torch.nn.Linear(WIDTH, 20), torch.nn.Linear(20, CLASSES)
    return torch.nn.Sequential(first, *layers, torch.nn.Tanh(), last).double()


def train(
    task: TorchTrainProgram,
    group: Group,
    then: Callable[[TorchTrainProgram], None] = lambda task: None,
    **reports: Callable[..., object],
) -> tuple[dict[str, torch.Tensor], Any]:
    """The weights that a rank has at the end, on the CPU, and the training's outcome. Leaves out checkpoints."""
    outcome = run_task(task, group, then, **reports)
    return {name: value.cpu() for name, value in task._trainer.state.model.state_dict().items()}, outcome


def test_p2_losses_metrics_schedules_callbacks_and_validation(device: torch.device, data: Data) -> None:
    job, told = make_hooked_job(), list[Any]()

    def work(group: Group) -> tuple[dict[str, torch.Tensor], Any]:
        task = job.task(*data)
        reports = {"report_metrics": told.append} if group.rank == 0 else {}

        def check(task: TorchTrainProgram) -> None:
            assert {tensor.device for tensor in task._trainer.state.model.state_dict().values()} == {device}
            reload_from_checkpoint(task._state)  # all of it goes into a checkpoint and back

        return train(task, group, check, **reports)

    (ours, outcome), *_ = run_in_world(2, work)
    theirs, history = train_hooked_plain(job, *data)
    assert difference(ours, theirs) < 1e-9
    check_history(SimpleNamespace(results=[outcome.result]), history)
    entries = json.loads(outcome.result)["history"]
    check_reports(told, entries)
    numbers = {name for name, value in entries[0].items() if isinstance(value, int | float)}
    known = list_epoch_numbers(job.task(*data)._trainer._objects, ["y", "w"])
    assert {name.removeprefix("val_") for name in numbers} <= {*known, *NOT_METRICS}


def check_reports(told: list[Any], history: list[Any]) -> None:
    """Each report has the numbers of the last closed epoch, for the progress line, the status page and /metrics."""
    names = {name for name, value in history[0].items() if isinstance(value, float)} - {"seconds", "loss"}
    steps = history[0]["steps"]
    assert {"val_loss", "learning_rate"} < names
    assert not names & told[0].keys()
    for entry in history:
        closing = told[(entry["epoch"] + 1) * (steps + 1) - 1]
        assert (closing["epoch"], closing["step"]) == (entry["epoch"], steps)
        assert all(closing[name] == entry[name] for name in (*names, "loss"))
    assert told[steps + 1]["val_loss"] == history[0]["val_loss"], "stays until the next epoch's is known"
    assert told[-1] == closing


@pytest.mark.parametrize(
    "job",
    [
        Job(net(), adam, torch.nn.CrossEntropyLoss(), gradient_clip_norm=0.05, batch_size=8, workers=2),
        Job(net(), sgd, torch.nn.CrossEntropyLoss(ignore_index=1), batch_size=24, workers=1),
        Job(net(), sgd, torch.nn.CrossEntropyLoss(), weight="w", batch_size=8, workers=2),
        Job(net(), adam, compare_rows, batch_size=12, workers=2, epochs=1, loss_scope="step"),
    ],
    ids=["clipped", "ignored class, one worker", "row weights", "rows compared"],
)
def test_p2_weights_equal_a_plain_loop_of_the_cpu(device: torch.device, data: Data, job: Job) -> None:
    replicas = run_in_world(job.workers, lambda group: train(job.task(*data), group)[0])
    assert len({hash_state(weights) for weights in replicas}) == 1, "replicas differ (P4)"
    expected = train_plain(replace(job, weight=job.weight), *data)
    assert difference(replicas[0], expected) < 1e-9


class SeenBuffers(Callback):
    """Logs what it sees of a buffer at the ends of steps."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, training: Training, logs: Any) -> None:
        self.seen.append(float(training.model.get_buffer("1.running_mean").sum()))

    def on_epoch_end(self, training: Training, logs: Any) -> None:
        logs.update(seen=self.seen)


def test_p4_all_ranks_and_callbacks_see_the_same_statistics(device: torch.device, data: Data) -> None:
    job = Job(net(torch.nn.BatchNorm1d(20)), sgd, torch.nn.CrossEntropyLoss(), workers=2, epochs=1)

    def work(group: Group) -> tuple[str, list[float]]:
        objects = replace(job.objects(), callbacks=(SeenBuffers(),))
        weights, outcome = train(TorchTrainProgram(job.task(*data)._spec, objects), group)
        return hash_state(weights), json.loads(outcome.result)["history"][0]["seen"]

    with pytest.warns(UserWarning, match="BatchNorm1d: statistics of each worker's own rows"):
        first, second = run_in_world(2, work)
    assert first == second
    assert len(set(first[1])) == job.plan(data[1]).steps


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_forward_passes_under_autocast(device: torch.device, data: Data, precision: str) -> None:
    class Recording(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net().float()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.net(x)
            seen.add((output.device, output.dtype))
            return output

    seen: set[tuple[torch.device, torch.dtype]] = set()
    job = Job(Recording(), sgd, torch.nn.CrossEntropyLoss(), workers=2, epochs=1)

    def work(group: Group) -> dict[str, torch.Tensor]:
        task = job.task(*data)
        spec = replace(task._spec, config=change(task._spec.config, precision=precision))
        return train(TorchTrainProgram(spec, job.objects()), group)[0]

    assert len({hash_state(weights) for weights in run_in_world(2, work)}) == 1
    assert seen == {(device, {"bf16": torch.bfloat16, "fp16": torch.float16}[precision])}


def test_bitwise_mode_gives_equal_bits_for_one_and_two_workers(device: torch.device, tmp_path: Path) -> None:
    store, manifest = make_data(tmp_path)
    model = without_dropout(everything())
    job = BitwiseJob(model, sgd, torch.nn.CrossEntropyLoss(), shape=(1, 6, 6), epochs=1)
    threads = torch.get_num_threads()
    try:
        work = lambda group: train(job.task(store, manifest), group)[0]  # noqa: E731
        hashes = {hash_state(weights) for size in (1, 2) for weights in run_in_world(size, work)}
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    assert len(hashes) == 1


def without_dropout(model: torch.nn.Module) -> torch.nn.Module:
    """Ranks are threads here, which share torch's generators; processes have their own."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def test_a_newcomer_takes_over_the_state_and_the_generator(device: torch.device, data: Data) -> None:
    job = Job(net(torch.nn.Dropout(0.5)), adam, torch.nn.CrossEntropyLoss(), workers=1, epochs=1)
    world = make_world(receives=True)

    def train_first(group: Group) -> Any:
        task = job.task(*data)
        train(task, group)
        return task

    (trained,) = run_in_world(1, train_first)

    def work(group: Group) -> tuple[str, torch.Tensor]:
        task: Any = trained if group.rank == 0 else job.task(*data)
        if group.rank == 1:
            task.prepare()
        task.sync(world, group)
        return task._state.digest(), torch.rand(3, device=device) if device.type != "cpu" else torch.zeros(3)

    (first, _), (second, _) = run_in_world(2, work)
    assert first == second


def test_the_next_batch_is_on_its_way_while_the_device_computes(
    device: torch.device, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    record = DeviceCopier.record

    def note(copier: DeviceCopier) -> Any:
        events.append("copy")
        return record(copier)

    monkeypatch.setattr(DeviceCopier, "record", note)
    job = Job(net(), sgd, torch.nn.CrossEntropyLoss(), workers=1, batch_size=24, epochs=1)
    task = job.task(*data)
    finish = task._trainer.train_step

    def step(*arguments: Any) -> Any:
        events.append("begin")
        decision = finish(*arguments)
        events.append("end")
        return decision

    monkeypatch.setattr(task._trainer, "train_step", step)
    run_in_world(1, lambda group: train(task, group))
    steps = events.count("begin")
    if device.type == "cpu":
        assert "copy" not in events
    else:
        assert events.count("copy") == steps, "each batch is copied once"
        ahead = sum(pair == ("copy", "end") for pair in itertools.pairwise(events))
        assert ahead > steps / 2


def test_exhausted_memory_is_one_sentence(device: torch.device, data: Data) -> None:
    class Greedy(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.device.type == "cuda":
                torch.empty(1 << 50, dtype=torch.uint8, device=x.device)
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 PiB. More.")

    job = Job(Greedy(WIDTH, CLASSES).double(), sgd, torch.nn.CrossEntropyLoss(), workers=1, epochs=1)
    says = r"memory of the GPU is exhausted \(CUDA out of memory\): lower batch_size=8"
    with pytest.raises(InvalidInput, match=says):
        run_in_world(1, lambda group: train(job.task(*data), group))


@pytest.mark.parametrize("weight", [None, "w"])
def test_a_step_does_not_wait_for_the_device(device: torch.device, data: Data, weight: str | None) -> None:
    """But once, where the ranks exchange. On a GPU torch itself raises at any other wait."""
    if device.type == "cpu":
        pytest.skip("nothing is waited for")
    job = Job(net(), sgd, torch.nn.CrossEntropyLoss(), weight=weight, workers=1, batch_size=24, epochs=1)
    task = job.task(*data)
    step = task._trainer.train_step
    waits: list[int] = []

    def watched(*arguments: Any) -> Any:
        with forbid_waits(device) as counted:
            decision = step(*arguments)
        waits.extend(counted)
        return decision

    task._trainer.train_step = watched  # type: ignore[method-assign]
    run_in_world(1, lambda group: train(task, group))
    assert set(waits) == {1}


@contextmanager
def forbid_waits(device: torch.device) -> Iterator[list[int]]:
    """Yields a list that has the number of waits at the end; on a GPU, where torch raises at most of them, 1."""
    counted: list[int] = []
    if device.type == "pretend":
        from tests.pretend_device import count_waits

        before = count_waits()
        yield counted
        counted.append(count_waits() - before)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype, it says
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield counted
    finally:
        torch.cuda.set_sync_debug_mode("default")
    counted.append(1)


def test_results_are_loaded_without_the_device(device: torch.device, data: Data) -> None:
    job = Job(net(), sgd, torch.nn.CrossEntropyLoss(), workers=1, epochs=1)
    store, _ = data
    weights, outcome = run_in_world(1, lambda group: train(job.task(*data), group))[0]
    left = torch.load(store.path(json.loads(outcome.result)["model"]), weights_only=True)
    saved = {**left["parameters"], **left["buffers"]}
    assert {tensor.device.type for tensor in saved.values()} == {"cpu"}
    assert all(torch.equal(saved[name], weights[name]) for name in weights)
    copy.deepcopy(job.model).load_state_dict(saved)


def test_predictions_are_those_of_the_cpu(device: torch.device) -> None:
    """A task of `transform` predicts on the GPU that Spark gave it."""
    predictors = pytest.importorskip("spark_elastic.estimators.predictor")
    from spark_elastic.estimators.saving import pack

    model = net(torch.nn.BatchNorm1d(20), torch.nn.Dropout(0.5)).eval()
    predictor = predictors.TorchPredictor(pack(model), (Column("x", "float64", (WIDTH,)),))
    x = np.random.default_rng(0).normal(size=(1100, WIDTH))
    (found,) = predictor.predict([list(x)], ("0",) if device.type == "cuda" else ())
    assert next(predictor._loaded[0].parameters()).device.type == ("cuda" if device.type == "cuda" else "cpu")
    np.testing.assert_allclose(found, model(torch.from_numpy(x)).detach().numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own
def test_a_compiled_model_trains_the_same_weights(device: torch.device, data: Data) -> None:
    if device.type == "pretend":
        pytest.skip("the compiler knows no such device")
    model = net(torch.nn.BatchNorm1d(20))
    job = Job(model, sgd, torch.nn.CrossEntropyLoss(), workers=1, batch_size=24, epochs=1)

    def work(group: Group, compiles: bool) -> dict[str, torch.Tensor]:
        task = job.task(*data)
        spec = replace(task._spec, config=change(task._spec.config, compile_model=compiles))
        return train(TorchTrainProgram(spec, job.objects()), group)[0]

    (compiled,) = run_in_world(1, lambda group: work(group, True))
    (plain,) = run_in_world(1, lambda group: work(group, False))
    assert difference(compiled, plain) < 1e-9


def test_generators_of_the_device_are_put_back(device: torch.device) -> None:
    state = rng_state()
    drawn = torch.rand(3, device=device).tolist()
    with seeded_rng(1, 2):
        seeded = torch.rand(3, device=device).tolist()
    following = torch.rand(3, device=device).tolist()
    set_rng_state(state)
    assert torch.rand(3, device=device).tolist() == drawn
    assert torch.rand(3, device=device).tolist() == following, "what was drawn inside does not count"
    with seeded_rng(1, 2):
        assert torch.rand(3, device=device).tolist() == seeded
    assert seeded not in (drawn, following)


def test_an_optimizers_state_arrives_at_a_newcomer_where_it_was(device: torch.device) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
        model = torch.nn.Linear(4, 1).to(device)
        optimizer = adam(model.parameters())
        return model, optimizer, OptimizerStateHandler(optimizer)

    model, optimizer, handler = make()
    model(torch.ones(2, 4, device=device)).sum().backward()
    optimizer.step()
    handler.save()
    snapshot = handler._snapshots.wait_for_newest()
    assert snapshot is not None
    other, newcomer, its_handler = make()
    its_handler.load(snapshot.values, snapshot.memory)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        for name, value in optimizer.state[theirs].items():
            assert newcomer.state[mine][name].device == value.device, name
            assert torch.equal(newcomer.state[mine][name].cpu(), value.cpu()), name
    newcomer.step()


def test_collectives_of_torch_distributed(device: torch.device) -> None:
    """Of a process group of the backend `elastic`: tensors of a device go through the host."""

    def work(group: Group) -> list[Any]:
        def connect_pair(source: int, target: int) -> Group:
            return group.subgroup(10 + 2 * source + target, sorted((source, target)))

        pg: Any = ElasticProcessGroup(group.subgroup(1), timedelta(seconds=20), connect_pair, WaitRecorder())
        rank, one = group.rank, torch.full((4,), group.rank + 1.0, device=device)
        pg.allreduce([one]).wait()
        whole = torch.zeros(4, device=device)
        pg.all_gather_single(whole, torch.full((2,), float(rank), device=device)).wait()
        part = torch.zeros(2, device=device)
        pg.reduce_scatter_single(part, torch.arange(4.0, device=device)).wait()
        sent = torch.full((3,), 5.0 + rank, device=device).t()
        pg.broadcast([sent], 1).wait()
        message = torch.full((2,), 7.0, device=device)
        (pg.send([message], 1, 0) if rank == 0 else pg.recv([message.zero_()], 0, 0)).wait()
        pg.shutdown()
        assert {tensor.device for tensor in (one, whole, part, sent, message)} == {device}
        return [tensor.tolist() for tensor in (one, whole, part, sent, message)]

    found = run_in_world(2, work)
    for rank, lists in enumerate(found):
        scattered = [[0.0, 2.0], [4.0, 6.0]][rank]
        assert lists == [[3.0] * 4, [0.0, 0.0, 1.0, 1.0], scattered, [6.0] * 3, [7.0] * 2]


class TwofoldPlane:
    """A bulk plane of two ranks whose gradients are equal."""

    is_active = is_settled = True
    seconds = None

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group, self.device = group, device
        self.summed: list[torch.device] = []

    @property
    def process_group(self) -> TwofoldPlane:
        return self

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        self.summed.append(tensors[0].device)
        tensors[0].mul_(2.0)
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: True)


@pytest.mark.parametrize("has_plane", [False, True])
def test_each_bucket_is_summed_where_it_is(
    device: torch.device, has_plane: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer of the model is on the host: shared memory holds its gradients, and those of no device."""
    make = (lambda group, device, options: TwofoldPlane(group, device)) if has_plane else lambda *_: None
    monkeypatch.setattr("spark_elastic.gradients.exchange.get_or_start_bulk_plane", make)

    def work(group: Group) -> tuple[int, list[torch.device], list[list[float]]]:
        first, second = torch.nn.Linear(16, 4, bias=False), torch.nn.Linear(4, 4, bias=False).to(device)
        torch.nn.init.ones_(second.weight)
        allocated: list[int] = []
        allocate = group.buffer
        group.buffer = lambda nbytes: allocated.append(nbytes) or allocate(nbytes)  # type: ignore[method-assign,func-returns-value]
        with closing(GradientExchange(torch.nn.Sequential(first, second).named_parameters())) as exchange:
            exchange.clear_and_begin(group, 1)
            second(first(torch.ones(1, 16)).to(device)).sum().backward()
            exchange.finish()
            mode: Any = exchange.mode
            gradients = [parameter.grad for parameter in exchange.parameters]
            assert [grad.device for grad in gradients if grad is not None] == [torch.device("cpu"), device]
            values = [grad.flatten().tolist() for grad in gradients[:1] if grad is not None]
        return sum(allocated), mode.plane.summed if has_plane else [], values

    for allocated, summed, values in run_in_world(2, work):
        assert allocated == 4 * (64 if device.type != "cpu" else 64 + 16)
        assert summed == ([device] if has_plane else [])
        assert values == [[8.0] * 64]

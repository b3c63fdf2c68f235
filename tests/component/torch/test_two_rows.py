"""A model or loss that cannot work is refused by the driver, which runs copies of them on two rows of the data."""

from __future__ import annotations

import copy
import os
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.data.loader import StepRows
from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.reading.decoding import read_footers
from spark_elastic.data.reading.readers import read_sample_rows
from spark_elastic.data.store import Store
from spark_elastic.errors import ElasticError, InvalidInput, StoreError
from spark_elastic.estimators import validation
from spark_elastic.estimators.torch_objects import check_on_two_rows
from spark_elastic.gradients.generators import get_generators
from spark_elastic.torch import progress
from spark_elastic.training.torch.callbacks import Callback, EarlyStopping, Training
from spark_elastic.training.torch.spec import TorchUserObjects
from tests.component.torch.job import CLASSES, WIDTH, Data, Job, make_data
from tests.fit_configs import change, make_config


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return make_data(tmp_path_factory.mktemp("data"))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def check(
    data: Data, model: torch.nn.Module, loss: Any, settings: Mapping[str, Any] | None = None, **changes: Any
) -> None:
    """settings: of the fit; changes: other objects of the user's."""
    in_16_bits = (settings or {}).get("precision") is not None
    spec = Job(model if in_16_bits else model.double(), sgd, loss).task(*data)._spec
    spec = replace(spec, config=change(spec.config, **(settings or {})))
    check_on_two_rows(replace(TorchUserObjects(model, sgd, (loss,)), **changes), spec)


def fail(error: Exception) -> Callable[..., Any]:
    def raise_error(*_: Any) -> None:
        raise error

    return raise_error


class Calls(torch.nn.Module):
    """A net whose forward also calls a function with its input, and itself."""

    def __init__(self, function: Callable[[torch.Tensor, Calls], object], returns: bool = True) -> None:
        super().__init__()
        self.function, self.returns = function, returns
        self.layer = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        self.function(x, self)
        return self.layer(x) if self.returns else None


CROSS_ENTROPY, MSE = torch.nn.CrossEntropyLoss(), torch.nn.MSELoss()


def leave(name: str, values: Callable[[int], Any]) -> dict[str, Any]:
    """With a transformation that makes these values, given their number, of a column."""
    return {"transformation": lambda columns: {**columns, name: values(len(columns["y"]))}}


@dataclass(frozen=True)
class Case:
    """What is tried. settings: of the fit; changes: other objects of the user's."""

    make: Callable[[], torch.nn.Module] = lambda: torch.nn.Linear(WIDTH, CLASSES)
    loss: Any = CROSS_ENTROPY
    settings: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)

    def check(self, data: Data) -> None:
        check(data, self.make(), self.loss, self.settings, **self.changes)


LINEAR, NUMBER = torch.nn.Linear(WIDTH, CLASSES), torch.nn.Linear(WIDTH, 1)
FAR = torch.nn.Linear(WIDTH + 1, CLASSES)
OUT_OF_RANGE = torch.nn.Sequential(NUMBER, torch.nn.Threshold(9.0, 2.0))
TWO_LABELS = {"label_cols": ("y", "w")}
REFUSED: list[tuple[Case, str]] = [
    (Case(lambda: FAR), rf"'x' of float64 \(2, {WIDTH}\), 'y' of int64 \(2,\), with RuntimeError: mat1 and"),
    (Case(lambda: OUT_OF_RANGE, torch.nn.BCELoss()), "RuntimeError: all elements of input should be between"),
    (Case(lambda: Calls(fail(AttributeError("no attribute 'fc'")))), "AttributeError: no attribute 'fc'"),
    (Case(lambda: torch.nn.Embedding(3, 2)), r"'x' of float64 .*following scalar types: Long"),
    (Case(lambda: Calls(lambda x, model: None, returns=False)), "the model returned None: end its forward"),
    (Case(torch.nn.Module), 'is missing the required "forward" function'),
    (Case(changes={"transformation": lambda columns: {"x": columns["z"]}}), "with KeyError: 'z'"),
    (
        Case(changes=leave("y", lambda rows: np.array(["a"] * rows, object))),
        "'y' as str.*: return numbers for it",
    ),
    (Case(changes=leave("x", lambda rows: np.zeros(rows, "M8[D]"))), "'x' as datetime64.*: return numbers"),
    (
        Case(settings=TWO_LABELS, changes={"losses": (CROSS_ENTROPY, MSE), "loss_weights": (0.5, 0.5)}),
        "loss has 2 losses, but the model returned 1",
    ),
    (
        Case(lambda: NUMBER, lambda output, label: (output - label).square().mean()),
        r"^the loss made \(2, 2\) out of the model's output \(2, 1\)",
    ),
    (Case(lambda: Calls(fail(ValueError("wrong"))), settings={"batch_size": 1}), "on one row of the data"),
    (Case(lambda: Calls(fail(ValueError("wrong"))), settings={"batch_size": 5}), "on two rows of the data"),
    (
        Case(lambda: NUMBER, torch.nn.BCEWithLogitsLoss()),
        "^column 'y' has .* two classes takes labels from 0",
    ),
]


@pytest.mark.parametrize(("case", "sentence"), REFUSED)
def test_a_model_or_loss_that_fails_is_refused_in_one_sentence(data: Data, case: Case, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence) as caught:
        case.check(data)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_a_model_that_takes_single_numbers_as_a_matrix_is_refused_with_the_shapes_to_set(data: Data) -> None:
    model, number = torch.nn.Linear(1, CLASSES).double(), Column("w", "float64")
    spec = Job(torch.nn.Linear(1, 1), sgd, CROSS_ENTROPY).task(*data)._spec
    spec = replace(spec, config=change(spec.config, feature_cols=("w",)), features=(number,))
    objects = TorchUserObjects(model, sgd, (CROSS_ENTROPY,))
    with pytest.raises(InvalidInput, match=r"columns of single numbers \(w\).*set input_shapes=\[\[1\]\]"):
        check_on_two_rows(objects, spec)
    check_on_two_rows(objects, replace(spec, features=(replace(number, shape=(1,)),)))


def check_metrics(data: Data, metric: Any, model: torch.nn.Module | None = None) -> None:
    check(data, model or torch.nn.Linear(WIDTH, 1), MSE, metrics={"far": metric})


def test_a_metric_that_makes_a_matrix_of_output_and_label_is_refused(data: Data) -> None:
    sentence = (
        r"^the metric 'far' made \((\d+), \1\) out of the model's output \(\1, 1\) and labels \(\1,\): give output and "
        "label the same shape"
    )
    for metric in (
        lambda output, label: ((output > 0) == label).float().mean(),
        lambda output, label: torch.nn.functional.mse_loss(output, label.double()),
    ):
        with pytest.raises(InvalidInput, match=sentence):
            check_metrics(data, metric)
    for metric in (
        lambda output, label: (output[:, 0] - label).abs().mean(),
        lambda output, label: ((output - output[:, 0]) * (label[:, None] - label)).sign().mean(),  # of pairs
        torch.nn.functional.l1_loss,
    ):
        check_metrics(data, metric)


class Counts:
    """A metric object that counts calls."""

    def __init__(self) -> None:
        self.calls = 0

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        self.calls += 1
        assert output.shape == label.shape, "shapes differ"

    def compute(self) -> float:
        return float(self.calls)

    def reset(self) -> None:
        self.calls = 0


def test_metrics_are_tried_on_as_many_rows_as_a_step_has(data: Data) -> None:
    def count(output: torch.Tensor, label: torch.Tensor) -> float:
        raise InvalidInput(f"{len(output)} and {len(label)} rows")

    settings = {"batch_size": 1, "num_workers": 4}
    with pytest.raises(InvalidInput, match="4 and 4 rows"):
        check(data, torch.nn.Linear(WIDTH, 1), MSE, settings, metrics={"n": count})


def test_a_metric_object_is_tried_without_leaving_state_in_it(data: Data) -> None:
    metric = Counts()
    with pytest.raises(InvalidInput, match=r"a metric fails on two rows .* AssertionError: shapes differ"):
        check_metrics(data, metric)
    check_metrics(data, metric, torch.nn.Sequential(torch.nn.Linear(WIDTH, 1), torch.nn.Flatten(0)))
    assert metric.calls == 0


# ---- a training that works is not refused


def refuse_training(x: torch.Tensor, part: torch.nn.Module) -> None:
    assert not part.training


def make_evaluated() -> torch.nn.Module:
    """A part of it is in evaluation mode, and stays in it."""
    model = torch.nn.Sequential(Calls(refuse_training), torch.nn.Linear(CLASSES, CLASSES))
    model[0].eval()
    return model


# The failures may come from what only workers have.
ACCEPTED = [
    Case(lambda: NUMBER, lambda output, label: (output[:, 0] - label).square().mean()),
    Case(lambda: Calls(lambda x, model: progress().step)),  # type: ignore[union-attr]
    Case(lambda: Calls(lambda x, model: os.environ["SET_ON_EXECUTORS"])),
    Case(lambda: torch.nn.Sequential(hvd.SyncBatchNorm(WIDTH), hvd.RowDropout(), LINEAR)),
    Case(make_evaluated),
    # The driver would compile it, too.
    Case(lambda: torch.compile(torch.nn.Linear(WIDTH + 1, CLASSES))),  # type: ignore[arg-type, return-value]
    *(
        Case(lambda error=error: Calls(fail(error)))  # type: ignore[misc]
        for error in (
            RuntimeError("Found no NVIDIA driver on your system"),
            ValueError("Default process group has not been initialized"),
            FileNotFoundError("vocabulary.txt"),
            ImportError("no module of workers"),
            RuntimeError("[Errno 2] No such file or directory: '/data/1.png'"),
            StoreError("it is not for the driver"),
        )
    ),
    # A score fails on a few rows of one class.
    *(
        Case(lambda: NUMBER, MSE, changes={"metrics": {"score": fail(error)}})
        for error in (
            ValueError("Only one class present in y_true"),
            RuntimeError("selected index k out of range"),
        )
    ),
]


@pytest.mark.filterwarnings("ignore")  # those of torch's compiler
@pytest.mark.parametrize("case", ACCEPTED)
def test_what_may_work_is_not_refused(data: Data, case: Case) -> None:
    case.check(data)


def take_one(x: torch.Tensor, model: torch.nn.Module) -> None:
    (_,) = x


class AddsLayer(Callback):
    """Completes the model before the first step."""

    def on_fit_begin(self, training: Training) -> None:
        """It would add a layer here."""


@pytest.mark.parametrize(
    ("call", "works", "fails", "sentence"),
    [
        # On as many rows as a step has, more than two where the model compares several.
        (lambda x, model: x.topk(5, dim=0), {}, {"batch_size": 4}, "selected index k out of range"),
        (take_one, {"batch_size": 1}, {}, "too many values to unpack"),
        # Not at all where a callback completes the model.
        (lambda x, model: model.head, {"callbacks": AddsLayer()}, {"callbacks": EarlyStopping()}, "'head'"),
    ],
)
def test_a_model_is_tried_as_it_is_trained(
    data: Data, call: Any, works: dict[str, Any], fails: dict[str, Any], sentence: str
) -> None:
    def try_model(batch_size: int = 8, callbacks: Callback | None = None) -> None:
        changes = {} if callbacks is None else {"callbacks": (callbacks,)}
        check(data, Calls(call), CROSS_ENTROPY, {"batch_size": batch_size}, **changes)

    try_model(**works)
    with pytest.raises(InvalidInput, match=sentence):
        try_model(**fails)


def test_the_forward_pass_of_several_losses_is_under_autocast(data: Data) -> None:
    class Casts(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return (super().forward(x.bfloat16()),) * 2

    settings = {"label_cols": ("y", "w"), "precision": "bf16"}
    check(data, Casts(WIDTH, 1), MSE, settings, losses=(MSE, MSE), loss_weights=(0.5, 0.5))


def test_rows_that_cannot_be_read_or_are_large_are_not_tried(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check((Store.open(str(tmp_path)), data[1]), FAR, CROSS_ENTROPY)
    for limit in ("MAX_BYTES", "MAX_ROW_BYTES"):
        with monkeypatch.context() as patch:
            patch.setattr(validation, limit, 100)
            check(data, FAR, CROSS_ENTROPY)


def test_a_transformation_that_fails_on_strings_may_lack_files() -> None:
    def read(columns: Mapping[str, Any]) -> Mapping[str, Any]:
        raise TypeError("cannot be read")

    spec: Any = SimpleNamespace(config=make_config(label_cols=("x",)))
    for value, error in (("one.png", ElasticError), (b"one", InvalidInput)):
        rows = StepRows(0, 0, 1, np.arange(1), {"x": np.array([value], object)})
        with pytest.raises(error):
            validation.transform_rows(spec, read, rows)


# ---- a loss that compares rows is refused


def compare_pairs(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """A contrastive loss: each row is to be nearest to itself."""
    unit = torch.nn.functional.normalize(output)
    return torch.nn.functional.cross_entropy(unit @ unit.T / 0.1, torch.arange(len(unit)))


def compare_triplets(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    far, same = torch.cdist(output, output), label[:, None] == label
    near = far.masked_fill(same, 1e9).min(1).values
    chosen = near < 1e8
    return (far.masked_fill(~same, 0.0).max(1).values - near + 1).relu()[chosen].mean()


def compare_views(model: torch.nn.Module, features: Any, labels: Any) -> torch.Tensor:
    outputs = [model(features[0] + torch.rand_like(features[0]) / 10) for _ in "ab"]
    views = [torch.nn.functional.normalize(output) for output in outputs]
    return torch.nn.functional.cross_entropy(views[0] @ views[1].T / 0.2, torch.arange(len(views[0])))


class Zeros(torch.nn.Linear):
    """A last layer that begins with zeros: its outputs are alike for all rows."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 16)
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)


def compute_variance(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    assert len(output) > 1
    return -output.var(0).mean()


class Centered(torch.nn.Module):
    """A loss that keeps a center of the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(CLASSES, dtype=torch.float64))

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        self.center = 0.9 * self.center + 0.1 * output.detach().mean(0)
        return (output - self.center).square().mean(1)


class Steps(torch.nn.Linear):
    """A module with a step of its own, as Lightning's have one."""

    def __init__(self, loss: Any) -> None:
        super().__init__(WIDTH, CLASSES)
        self.loss = loss

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        assert self.training
        loss: torch.Tensor = self.loss(self(batch[0]), batch[1])
        return loss

    def configure_optimizers(self) -> Any:
        return sgd(self.parameters())


class Centers(torch.nn.Module):
    """A layer whose output for a row depends on the other rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


class Sums(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(0)


class Noise(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


def check_scope(data: Data, loss: Any, model: Any = None, **settings: Any) -> None:
    """loss: a loss, or a function of three parameters for `train_minibatch_fn`; None: the model has it."""
    torch.manual_seed(0)
    net = model or torch.nn.Linear(WIDTH, 16)
    own = getattr(getattr(loss, "__code__", None), "co_argcount", 2) == 3
    changes = {"losses": () if own or loss is None else (loss,), "train_minibatch_fn": loss if own else None}
    check(data, net, loss, {"max_workers": 3, **settings}, **changes)


RANDOM = torch.nn.Linear(WIDTH, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(), torch.nn.Linear(8, 16)


def make_random() -> torch.nn.Module:
    return torch.nn.Sequential(*copy.deepcopy(RANDOM))


def by_own(loss: Any) -> Any:
    """That loss as a `train_minibatch_fn`."""
    return lambda model, features, labels: loss(model(*features), *labels)


@pytest.mark.parametrize(
    ("loss", "make", "what", "settings"),
    [
        *(
            (compare_pairs, lambda: torch.nn.Linear(WIDTH, 16), "loss", {"batch_size": rows})
            for rows in (2, 3, 8)
        ),
        (compare_pairs, make_random, "loss", {}),
        (by_own(compare_pairs), make_random, "train_minibatch_fn", {}),
        (None, lambda: Steps(compare_pairs), "the training_step of the model", {}),
        # Two rows do not show these.
        (compare_triplets, lambda: None, "loss", {}),
        (compare_views, lambda: None, "train_minibatch_fn", {}),
        # Outputs that are alike hide nothing.
        (compute_variance, Zeros, "loss", {}),
        (compute_variance, Zeros, "loss", {"precision": "bf16"}),
        (by_own(compute_variance), Zeros, "train_minibatch_fn", {}),
    ],
)
def test_a_loss_that_compares_rows_is_refused_by_name(
    data: Data, loss: Any, make: Callable[[], Any], what: str, settings: dict[str, Any]
) -> None:
    says = rf"^{what} compares the rows .* \(of \d rows .*loss_scope='step' .*loss_scope='worker'"
    with pytest.raises(InvalidInput, match=says):
        check_scope(data, loss, make(), **settings)


def test_rows_of_a_worker_or_of_a_share_may_be_compared(data: Data, caplog: pytest.LogCaptureFixture) -> None:
    check_scope(data, compare_pairs, determinism="bitwise")
    check_scope(data, compare_pairs, max_workers=1)
    check_scope(data, compare_pairs, batch_size=1)
    for loss in (compare_pairs, compare_triplets):
        check_scope(data, loss, loss_scope="step")
    assert not caplog.messages
    check_scope(data, compare_pairs, loss_scope="worker")
    (message,) = caplog.messages
    assert "depend on the number of workers through loss, which compares the rows of a batch" in message


def test_the_scope_of_a_step_says_what_it_cannot_join_and_where_it_is_of_no_use(
    data: Data, caplog: pytest.LogCaptureFixture
) -> None:
    sums = torch.nn.Sequential(torch.nn.Linear(WIDTH, 16), Sums())
    says = r"^loss_scope='step' joins .* shape \(16,\) for 2 rows and \(16,\) for 8 rows"
    with pytest.raises(InvalidInput, match=says):
        check_scope(data, lambda output, label: output.sum(), sums, loss_scope="step")
    assert not caplog.messages
    check_scope(data, CROSS_ENTROPY, loss_scope="step")
    (message,) = caplog.messages
    assert message.startswith("loss_scope='step' is for a loss that compares rows, and loss does not")


WEIGHTS = torch.tensor([0.2, 1.0, 3.0])
SMALL = torch.nn.functional


@pytest.mark.parametrize(
    ("loss", "make"),
    [
        (torch.nn.CrossEntropyLoss(weight=WEIGHTS.double(), ignore_index=0, label_smoothing=0.1), None),
        (partial(SMALL.cross_entropy, weight=WEIGHTS.double()), None),
        (lambda output, label: SMALL.cross_entropy(output, label, reduction="none"), None),
        (lambda output, label: SMALL.cross_entropy(output + torch.randn_like(output), label), None),
        (lambda output, label: SMALL.mse_loss(output[:, 0], label.float()), None),
        (lambda output, label: 0 * output.sum(), None),
        (lambda output, label: output.mean() * float("nan"), None),
        (CROSS_ENTROPY, make_random),
        (CROSS_ENTROPY, lambda: torch.nn.Sequential(torch.nn.Linear(WIDTH, CLASSES), Noise())),
        (None, lambda: Steps(CROSS_ENTROPY)),
        (lambda model, features, labels: (model(*features) * torch.rand(len(labels[0]), 1)).mean(), None),
    ],
)
def test_a_loss_that_is_a_mean_or_a_sum_over_rows_is_not_refused(
    data: Data, caplog: pytest.LogCaptureFixture, loss: Any, make: Any
) -> None:
    check_scope(data, loss, make() if make else torch.nn.Linear(WIDTH, CLASSES))
    assert not caplog.messages


@pytest.mark.parametrize(
    "loss", [SMALL.cross_entropy, lambda output, label: (output[:, 0] - label.float()).square().mean()]
)
def test_rounding_to_16_bits_is_no_comparison_of_rows(data: Data, loss: Any) -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        net = torch.nn.Sequential(torch.nn.Linear(WIDTH, 64), torch.nn.ReLU(), torch.nn.Linear(64, CLASSES))
        check_scope(data, loss, net, precision="bf16")


def test_rows_of_all_classes_are_tried(tmp_path: Path) -> None:
    columns = {"x": pa.array(np.arange(90.0)), "y": pa.array(np.arange(90) == 47)}
    pq.write_table(pa.table(columns), tmp_path / "part.parquet")
    store = Store.open(str(tmp_path))
    kinds = Column("x", "float64"), Column("y", "bool")
    manifest = Manifest(kinds, *read_footers(store, ["part.parquet"]), "made for a test", "made for a test")
    assert read_sample_rows(store, manifest, ["x", "y"], "y")["x"].tolist() == [0, 47, 0, 89]
    assert read_sample_rows(store, manifest, ["x", "y"])["x"].tolist() == [0, 89, 29, 59]


def test_a_loss_with_buffers_of_its_own_is_refused(data: Data) -> None:
    net = torch.nn.Linear(WIDTH, CLASSES)
    says = r"^loss Centered writes to its buffer 'center', .*train_minibatch_fn"
    with pytest.raises(InvalidInput, match=says):
        check_scope(data, Centered(), net)
    check_scope(data, Centered(), net, max_workers=1)
    check_scope(data, Centered(), net, loss_scope="worker")


class CountsCalls(torch.nn.Module):
    calls = 0

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.calls * output.square().mean()


def weigh(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return SMALL.cross_entropy(output, label, weight=WEIGHTS.double())


IS_NO_MEAN = "which is neither the mean of the rows' losses nor one for each"
MIXES = "number of workers through 1 (it mixes the rows of a batch)"


@pytest.mark.parametrize(
    ("loss", "mixes", "says"),
    [
        (CountsCalls(), False, "is another one when the same rows are given again"),
        (weigh, False, IS_NO_MEAN),
        (lambda output, label: SMALL.cross_entropy(output, label, reduction="sum"), False, IS_NO_MEAN),
        (by_own(weigh), False, IS_NO_MEAN),
        (CROSS_ENTROPY, True, MIXES),
        (by_own(CROSS_ENTROPY), True, MIXES),
    ],
)
def test_what_may_depend_on_the_world_and_is_no_comparison_is_warned_of(
    data: Data, caplog: pytest.LogCaptureFixture, loss: Any, mixes: bool, says: str
) -> None:
    layers = torch.nn.Linear(WIDTH, 8), *([Centers()] * mixes), torch.nn.Linear(8, CLASSES)
    check_scope(data, loss, torch.nn.Sequential(*layers))
    (message,) = caplog.messages
    assert says in message


# ---- nothing is changed


def test_neither_the_model_nor_the_random_numbers_of_the_driver_change(data: Data) -> None:
    layers = torch.nn.BatchNorm1d(WIDTH), torch.nn.Dropout(), torch.nn.Linear(WIDTH, CLASSES)
    model = torch.nn.Sequential(*layers).double().eval()
    before, drawn = copy.deepcopy(model.state_dict()), get_generators()

    def draw(columns: Mapping[str, Any]) -> Mapping[str, Any]:
        np.random.uniform()
        random.random()
        return columns

    check(data, model, CROSS_ENTROPY, transformation=draw)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert repr(get_generators()) == repr(drawn)
    assert not model.training
    assert all(each.grad is None for each in model.parameters())


class Loads:
    """A transformation that opens something in its first call, which cannot be pickled."""

    opened: Any = None

    def __call__(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        self.opened = threading.Lock()
        return columns


LOADS = """
import threading
opened = None
def open_once():
    global opened
    opened = opened or threading.Lock()
def transform(columns):
    open_once()
    return columns
"""


def test_what_a_transformation_opens_on_the_driver_does_not_travel_to_the_workers(data: Data) -> None:
    loads, script = Loads(), {"__name__": "__main__"}
    exec(LOADS, script)
    for transformation in (loads, script["transform"], partial(script["transform"])):
        check(data, torch.nn.Linear(WIDTH, CLASSES), CROSS_ENTROPY, transformation=transformation)
    assert loads.opened is None
    assert script["opened"] is None

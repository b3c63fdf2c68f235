"""Parameters of the estimators behave as Params of Spark ML do; each mistake in them is one sentence."""

from __future__ import annotations

import contextlib
import inspect
import json
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml.tuning import ParamGridBuilder
from pyspark.ml.util import DefaultParamsWriter

from spark_elastic.config import ElasticConfig
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators import torch_objects
from spark_elastic.estimators.keras_estimator import ElasticKerasEstimator
from spark_elastic.estimators.params import TorchParams, to_names
from spark_elastic.estimators.torch_estimator import ElasticTorchEstimator
from spark_elastic.estimators.torch_objects import check_torch_objects
from spark_elastic.estimators.validation import FitRequest, build_request
from spark_elastic.training.spec import LossConfig
from spark_elastic.training.torch.callbacks import BestWeights, Callback, EarlyStopping, LearningRateSchedule
from spark_elastic.training.torch.spec import build_optimizer
from tests.unit.estimators.requests import net, values


class ParamsHolder(TorchParams):
    def __init__(self) -> None:
        super().__init__()
        self._setDefault(batch_size=32)


def test_setters_and_getters_exist_for_every_param() -> None:
    holder = ParamsHolder()
    for param in holder.params:
        camel = "".join(part.capitalize() for part in param.name.split("_"))
        assert callable(getattr(holder, f"set{camel}"))
        assert callable(getattr(holder, f"get{camel}"))


def test_one_column_may_be_given_by_its_name() -> None:
    assert ParamsHolder().setFeatureCols("x").getFeatureCols() == ["x"]
    assert ParamsHolder().setOutputCols("p").getOutputCols() == ["p"]
    holder = ParamsHolder()
    assert holder.copy({holder.label_cols: "label"}).getLabelCols() == ["label"]


def test_each_param_may_be_none_as_it_is_loaded() -> None:
    """Spark ML converts the values of what it loads, None too."""
    holder = ParamsHolder()
    for param in holder.params:
        holder.set(param, None)
        assert holder.getOrDefault(param) is None


def test_paths_of_files_may_be_paths() -> None:
    assert to_names(Path("/a/b")) == to_names([Path("/a/b")]) == to_names("/a/b") == ["/a/b"]


def test_numbers_of_numpy_are_pythons_own_in_grids_too() -> None:
    assert type(ElasticTorchEstimator(epochs=np.int64(3)).getEpochs()) is int
    rate = ElasticTorchEstimator.learning_rate
    grid = ParamGridBuilder().addGrid(rate, np.float32([0.5, 0.25])).build()
    assert [type(point[rate]) for point in grid] == [float, float]
    shaped = ElasticTorchEstimator(input_shapes=[(np.int64(2),)], label_shapes=((np.int64(1), 3),))
    shaped.setLossWeights(list(np.float32([0.5, 1])))
    found = shaped.getInputShapes(), shaped.getLabelShapes(), shaped.getLossWeights()
    assert json.dumps(found) == "[[[2]], [[1, 3]], [0.5, 1.0]]"


def test_a_subclass_may_change_some_defaults() -> None:
    class OwnEstimator(ElasticTorchEstimator):
        def __init__(self, *, epochs: int = 7, team: str = "", **rest: Any) -> None:
            super().__init__(epochs=epochs, **rest)

    ours = OwnEstimator(batch_size=8)
    assert (ours.getEpochs(), ours.getBatchSize(), ours.getMinWorkers(), ours.getStore()) == (7, 8, 1, None)


def test_a_keyword_that_a_subclass_demands_keeps_its_default() -> None:
    class EstimatorWithRequiredParam(ElasticTorchEstimator):
        def __init__(self, *, epochs: int, **rest: Any) -> None:
            super().__init__(epochs=epochs, **rest)

    demands = EstimatorWithRequiredParam(epochs=3)
    metadata = DefaultParamsWriter._get_metadata_to_save(demands, SimpleNamespace(version="3.5"))
    assert json.loads(metadata)["paramMap"]["epochs"] == 3
    demands.clear(demands.getParam("epochs"))
    assert demands.getEpochs() == ElasticTorchEstimator().getEpochs()


def test_options_of_the_store_are_not_shown() -> None:
    estimator = ElasticTorchEstimator(storage_options={"secret": "abc"})
    assert estimator.getStorageOptions()["secret"] == "abc"
    assert "'secret': ..." in estimator.explainParams()
    assert "abc" not in estimator.explainParams()


@pytest.mark.parametrize("given", [3, [None], [3, "a"]])
def test_names_that_are_none_are_refused_at_once(given: Any) -> None:
    for name in ("feature_cols", "label_cols", "output_cols"):
        with pytest.raises(InvalidInput, match=r"^columns are given by name, .*; got (3|None)\.$"):
            ElasticTorchEstimator(**{name: given})


@pytest.mark.parametrize(
    ("given", "says"),
    [("secret=abc", "must map .*; got str: give a dict"), ({"url": "abc"}, "has 'url', .*: give the url")],
)
def test_options_that_are_none_are_refused_at_once_and_not_shown(given: Any, says: str) -> None:
    with pytest.raises(InvalidInput, match=f"^storage_options {says}") as raised:
        ElasticTorchEstimator(storage_options=given)
    assert "abc" not in str(raised.value)


def test_each_keyword_is_a_param_of_one_of_the_estimators_and_each_param_a_keyword() -> None:
    keywords = inspect.signature(ElasticTorchEstimator.__init__).parameters.values()
    names = {each.name for each in keywords if each.kind is each.KEYWORD_ONLY}
    params = {param.name for param in (*ElasticTorchEstimator().params, *ElasticKerasEstimator().params)}
    assert params - {"settings"} == names


def test_a_keyword_of_another_frameworks_estimator_is_refused() -> None:
    estimator: Any
    for estimator, name in (ElasticTorchEstimator, "class_weight"), (ElasticKerasEstimator, "precision"):
        with pytest.raises(InvalidInput, match=f"^'{name}' is neither a parameter of {estimator.__name__}"):
            estimator(**{name: {0: 1.0}})


# ---- each mistake is one sentence that names what to change


PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau


def ask(**changes: Any) -> FitRequest:
    return build_request(values(**changes), check_torch_objects)


def test_good_values_become_a_request() -> None:
    request = ask(
        store=Path("/mnt/jobs"),
        model=torch.nn.Bilinear(2, 2, 1),
        optimizer=sgd,
        feature_cols=["x", "z"],
        label_cols=["x"],  # a column may be feature and label
        input_shapes=[[-1, 1, 2], (2,)],  # as Horovod's
        label_shapes=[(-1, 1)],
        batch_size=16,
        num_workers=3,
        min_workers=2,
    )
    data, world = request.config.data, request.config.world
    assert (request.config.global_batch, world.min_workers, world.max_workers) == (48, 2, 3)
    assert (data.feature_cols, data.label_cols) == (("x", "z"), ("x",))
    assert (data.input_shapes, data.label_shapes) == (((1, 2), (2,)), ((1,),))
    assert request.store == "/mnt/jobs"


def test_a_class_of_optimizers_that_takes_parameters_alone_is_the_function_that_makes_one() -> None:
    objects = ask(optimizer=torch.optim.Adam).objects
    assert type(build_optimizer(objects.model, objects.optimizer, None)[0]) is torch.optim.Adam


def test_metrics_that_callbacks_watch_are_known() -> None:
    plateau = LearningRateSchedule(PLATEAU)
    callbacks = [EarlyStopping(), plateau, BestWeights("loss")]
    assert ask(callbacks=callbacks).objects.watched == ("val_loss", "val_loss", "loss")
    assert plateau._scheduler is None  # the user's own stays as it is


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class SharpnessAwareSGD(torch.optim.SGD):
    """Asks for its closure only once it is called, as SAM does."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert closure is not None, "Sharpness Aware Minimization requires closure"
        return super().step(closure)


class NeedsRate(torch.optim.SGD):
    """Has no default for its rate, as torch's SGD had none."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)


class BatchCounter(Callback):
    def on_batch_end(self, batch: int) -> None: ...


class Queues(Callback):
    def __init__(self) -> None:
        self.seen = deque([1])


OWN_STEP: dict[str, Any] = {"loss": None, "train_minibatch_fn": lambda model, x, y: x}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": {"a": 1}}, "model must be a torch.nn.Module or a function that makes one; got {'a': 1}."),
    ({"model": torch.nn.Linear}, "model is the class Linear"),
    ({"model": torch.nn.ReLU(), "optimizer": sgd}, "nothing to train"),
    ({"model": lambda rows: net()}, "given as model fails, with TypeError: .* 'rows'"),
    ({"optimizer": lambda params: 1 // 0}, "given as optimizer fails, with ZeroDivisionError"),
    ({"loss": "mse"}, r"loss must be a function or module of \(output, label\); got 'mse'"),
    ({"loss": torch.nn.Bilinear(1, 1, 1)}, "loss Bilinear has parameters that require a gradient"),
    ({"loss": torch.nn.MSELoss}, r"loss=MSELoss\(\)"),
    ({"callbacks": [LearningRateSchedule(PLATEAU, every="step")]}, "looks at a number of each epoch: use"),
    ({"optimizer": "sgd"}, "optimizer must be a torch optimizer"),
    ({"optimizer": NeedsRate}, "given as optimizer fails, with TypeError: .* 'lr'"),
    ({"optimizer": list}, "optimizer must return a torch optimizer .* returned list"),
    ({"optimizer": lambda params: 3}, "returned int"),
    ({"store": object()}, "store must be a path or url; got object: for a Store of Horovod's give what that"),
    ({"store": b"/mnt"}, "store must be a path or url; got bytes"),
    ({"shuffle": "false"}, "shuffle must be True or False; got 'false'"),
    ({"loss_scope": "all"}, "loss_scope must be one of 'step', 'worker', or None; got 'all'"),
    ({"loss_scope": "step", **OWN_STEP}, "loss_scope='step' gathers the outputs .* give the comparison as"),
    ({"callbacks": [Queues()]}, "a checkpoint cannot hold the deque of callback Queues, at 'seen'"),
    ({"metrics": [torch.nn.L1Loss()], **OWN_STEP}, "leave metrics out"),
    ({"feature_cols": []}, "feature_cols is empty"),
    ({"label_cols": None}, "label_cols is empty"),
    ({"label_cols": ["y", "y"]}, "'y' is named twice in label_cols"),
    ({"feature_cols": ["x", "y", "x"]}, "'x' is named twice in feature_cols"),
    ({"sample_weight_col": 3}, "sample_weight_col must be the name of a column, or None; got 3"),
    ({"batch_size": 0}, "batch_size must be a whole number of 1 or more; got 0"),
    ({"num_workers": None}, "num_workers must be a whole number of 1 or more; got None"),
    ({"num_workers": 2, "min_workers": 3}, "min_workers <= num_workers .*; got 3, 2, 2"),
    ({"seed": -1}, "seed must be a whole number from 0"),
    ({"seed": 2**64}, r"seed must be a whole number from 0, below 2\*\*64; got 1844"),
    ({"gradient_clip_norm": 0}, "gradient_clip_norm must be a number above 0"),
    ({"input_shapes": [(2,), (3,)]}, "input_shapes has 2 shapes for 1 feature columns"),
    ({"input_shapes": [28]}, "input_shapes must be one shape per column"),
    ({"input_shapes": [(0, 2)]}, "sizes of 1 or more"),
    ({"label_shapes": [(1,), (1,)]}, "label_shapes has 2 shapes for 1 label columns"),
    ({"loss": [torch.nn.MSELoss()] * 2}, "loss has 2 losses for 1 label columns"),
    ({"loss_weights": [1.0]}, "loss_weights needs several losses"),
    ({"loss_weights": [1.0, 2.0]}, "loss_weights has 2 weights for 1 losses"),
    ({"loss_weights": 3}, "loss_weights must be a list of numbers; got 3"),
    ({"loss_weights": [float("nan")]}, "loss_weights must be a list of numbers"),
    ({"metrics": [3]}, "metrics must be functions"),
    ({"metrics": 3}, "metrics must be functions"),
    ({"callbacks": [print]}, "callbacks must be instances of spark_elastic.torch.callbacks.Callback"),
    ({"callbacks": [BatchCounter()]}, "BatchCounter has on_batch_end, which nothing calls: the hooks are"),
    ({"train_minibatch_fn": lambda model, features, labels: 0}, "leave loss out"),
    ({"train_minibatch_fn": 3, "loss": None}, "train_minibatch_fn must be a function"),
    ({"transformation_fn": 3}, "transformation_fn must be a function"),
    ({"transformation_workers": 2}, "transformation_workers apply transformation_fn, which is missing"),
    ({"transformation_pool": "fork"}, "transformation_pool must be one of 'process', 'thread'"),
    ({"learning_rate": -1}, "learning_rate must be a number of 0 or more"),
    ({"validation": 1.0}, "validation must be a fraction"),
    ({"reader": "csv"}, "There is no reader 'csv'"),
    ({"missing": {"nan": "drop"}}, "missing must be 'refuse', 'drop', or a dict of nulls and nans"),
    ({"materialize": None}, "materialize must be one of 'auto', 'always', 'never'; got None"),
    ({"row_order": "seed"}, "row_order must be one of 'hash', 'table', or None; got 'seed'"),
    ({"precision": "int8"}, "precision must be one of 'bf16', 'fp16', or None"),
    ({"determinism": "exact"}, "determinism must be 'bitwise', or None"),
    ({"determinism": "bitwise", "max_workers": 9}, "8 workers at most, and max_workers is 9: raise virtual_"),
    ({"determinism": "bitwise", "batch_size": 2}, "cannot be cut into virtual_shares=8: raise batch_size"),
    ({"determinism": "bitwise", "gradient_compression": "fp16"}, "leave gradient_compression out"),
    (
        {"determinism": "bitwise", "model": torch.nn.Sequential(net(), torch.nn.SyncBatchNorm(3))},
        "layer '1', SyncBatchNorm, which computes statistics of all workers' rows: use torch.nn.BatchNorm1d",
    ),
    ({"optimizer": torch.optim.LBFGS}, "optimizer is LBFGS, whose step"),
    ({"optimizer": lambda p: SharpnessAwareSGD(p, lr=0.1)}, "SharpnessAwareSGD, whose step evaluates the"),
    ({"model": net}, "since model is a function"),
    ({"run_id": "a/b"}, "run_id must be a name without slashes"),
    ({"run_id": "."}, "run_id must be a name without slashes, other than '.'"),  # the folder of all runs
    ({"on_progress": 3}, "on_progress must be a function"),
    ({"config": {"lease": 3}}, "config must be an ElasticConfig; got {'lease'"),
    ({"settings": {"leese": 3}}, "'leese' is no field of ElasticConfig .did you mean 'lease'"),
    ({"settings": {"lease": -1.0}}, "lease must be a number of seconds above 0"),
]


@pytest.mark.parametrize(("changes", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
def test_a_mistake_is_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence) as caught:
        ask(**changes)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_an_optimizer_has_all_parameters_of_the_model_and_no_others() -> None:
    with pytest.raises(InvalidInput, match="holds 4 of 4 parameters that are not the model's"):
        ask(optimizer=torch.optim.SGD(net().parameters(), lr=0.1))
    model = net()
    part = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(InvalidInput, match=r"lacks 2 of the model's 4 trainable .* \(2.weight, 2.bias\)"):
        ask(model=model, optimizer=part)
    model[2].requires_grad_(False)  # frozen ones may be left out
    assert ask(model=model, optimizer=part).objects.model is model


def test_factories_of_fits_in_parallel_draw_the_same_weights() -> None:
    """Folds that a CrossValidator trains at once: one that began between the draws of another changed its weights."""
    there = threading.Barrier(3)

    def factory() -> torch.nn.Module:
        first = torch.nn.Linear(2, 2)
        with contextlib.suppress(threading.BrokenBarrierError):
            there.wait(0.2)  # for others that are in the midst of theirs
        return torch.nn.Sequential(first, torch.nn.Linear(2, 1))

    def draw_weights() -> list[float]:
        return torch.cat([p.flatten() for p in torch_objects._check_model(factory, 7).parameters()]).tolist()

    with ThreadPoolExecutor(3) as pool:
        found = [each.result() for each in [pool.submit(draw_weights) for _ in range(3)]]
    assert found == [draw_weights()] * 3


def test_an_optimizer_factory_is_tried_on_a_copy() -> None:
    model, seen = net(), []

    def factory(parameters: Any) -> torch.optim.Optimizer:
        seen.extend(parameters)
        return torch.optim.SGD(seen, lr=0.1)

    assert ask(model=model, optimizer=factory).objects.optimizer is factory
    assert len(seen) == 4
    assert not {id(p) for p in seen} & {id(p) for p in model.parameters()}


def test_single_settings_go_before_the_config() -> None:
    whole = ElasticConfig(lease=9.0, failure_budget=2)
    config = ask(config=whole, settings={"lease": 3.0, "ledger": None}).elastic
    assert (config.lease, config.failure_budget, config.ledger) == (3.0, 2, False)


def test_the_environment_fills_in_where_no_config_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_ELASTIC_LEASE", "7.5")
    config = ask(settings={"ledger": True}).elastic
    assert (config.lease, config.ledger, config.stall_after) == (7.5, True, ElasticConfig().stall_after)


class Computed(torch.nn.Linear):
    """As the older weight_norm leaves a layer."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.scaled = self.weight * 2


class LinearWithFrozenBias(torch.nn.Linear):
    """Whose bias stays as it is."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.bias.register_hook(torch.zeros_like)


class LinearWithLock(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)
        self.lock = threading.Lock()


class LinearThatLeavesItsLockBehind(LinearWithLock):
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}


class LinearWithManualOptimization(torch.nn.Linear):
    """What a LightningModule has."""

    automatic_optimization = True

    def training_step(self, batch: Any, number: int) -> Any:
        return self(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_lightning_module_that_steps_its_optimizer_itself_is_refused() -> None:
    module = LinearWithManualOptimization(3, 1)
    ask(model=module, optimizer=None, loss=None)
    module.automatic_optimization = False
    with pytest.raises(InvalidInput, match="has automatic_optimization = False: gradients are summed"):
        ask(model=module, optimizer=None, loss=None)


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (lambda: torch.nn.LazyLinear(1), "layer '0' of the model is lazy, without weights yet: call the mo"),
        (Computed, "the model cannot be copied .Only Tensors created explicitly"),
        (LinearWithFrozenBias, "layer '0' of the model has a hook on the gradient of bias"),
        (LinearWithLock, "'lock' of layer '0' of the model cannot be pickled"),
    ],
)
@pytest.mark.parametrize("made", [False, True])
def test_a_layer_that_cannot_be_pickled_is_named(layer: Callable[[], Any], says: str, made: bool) -> None:
    model = torch.nn.Sequential(layer())
    with pytest.raises(InvalidInput, match=says):
        ask(model=(lambda: model) if made else model, optimizer=sgd)
    ask(model=torch.nn.Sequential(LinearThatLeavesItsLockBehind()), optimizer=sgd)


class LinearWithParts(torch.nn.Linear):
    """A layer that holds something beside its weights."""

    def __init__(self, **parts: torch.Tensor) -> None:
        super().__init__(3, 1)
        for name, part in parts.items():
            if part.requires_grad:
                self.register_parameter(name, torch.nn.Parameter(part))
            else:
                self.register_buffer(name, part)


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (LinearWithParts(turn=torch.zeros(2, dtype=torch.complex64, requires_grad=True)), "'0.turn' is tor"),
        (LinearWithParts(edges=torch.eye(3).to_sparse()), "buffer '0.edges' of the model is sparse"),
        (torch.nn.Embedding(3, 2, sparse=True), "layer '0' of the model has sparse gradients: use sparse="),
    ],
)
def test_tensors_that_cannot_be_exchanged_are_refused(layer: torch.nn.Module, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        ask(model=torch.nn.Sequential(layer))


def test_nan_is_refused_and_ends_a_training_unless_the_user_wants_it() -> None:
    refused, dropped, kept = (ask(missing=each).missing for each in ("refuse", "drop", {"nans": "keep"}))
    assert (refused.nulls, refused.nans) == ("refuse", "refuse")
    assert (dropped.nulls, dropped.nans) == ("drop", "drop")
    assert (kept.nulls, kept.nans) == ("refuse", "keep")
    assert LossConfig().terminate_on_nan
    assert TorchParams().getOrDefault("terminate_on_nan")


def test_an_unknown_keyword_is_refused_with_the_nearest_one() -> None:
    for wrong, right in ("lr", "learning_rate"), ("colective_timeout", "collective_timeout"):
        with pytest.raises(InvalidInput, match=rf"did you mean '{right}'"):
            TorchParams(**{wrong: 1})
    with pytest.raises(InvalidInput, match=r"nor a field of ElasticConfig: docs"):
        TorchParams(zzzzzz=1)

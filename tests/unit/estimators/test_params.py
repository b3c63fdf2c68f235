"""The estimator's parameters behave as Params of Spark ML do; each of Horovod's is taken or refused."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pyspark")

from pyspark.ml.tuning import ParamGridBuilder
from pyspark.ml.util import DefaultParamsWriter

from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.elastic_estimator import ElasticEstimator
from spark_elastic.estimators.keras_estimator import ElasticKerasEstimator
from spark_elastic.estimators.params import (
    ALIASES,
    GPU_NAMES,
    REFUSED,
    TorchParams,
    to_names,
    translate_names,
)
from spark_elastic.estimators.torch_estimator import ElasticTorchEstimator

FRAMEWORKS_OWN = {"model", "optimizer", "loss", "metrics", "callbacks"}  # objects of the framework


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


def test_set_returns_the_estimator_and_overrides_the_default() -> None:
    holder = ParamsHolder()
    assert holder.getBatchSize() == 32
    assert holder.setBatchSize(8) is holder
    assert holder.getBatchSize() == 8


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


def test_a_copy_with_other_values_leaves_the_original() -> None:
    holder = ParamsHolder().setBatchSize(8)
    assert holder.copy({holder.batch_size: 16}).getBatchSize() == 16
    assert holder.getBatchSize() == 8


def test_two_estimators_share_no_params() -> None:
    one, two = ParamsHolder(), ParamsHolder()
    assert one.batch_size.parent == one.uid != two.uid
    assert "rows per worker" in one.explainParam("batch_size")


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
    [
        ("secret=abc", "must map .*; got str: give a dict"),
        ({"url": "abc"}, "has 'url', .*: give the url as store"),
    ],
)
def test_options_that_are_none_are_refused_at_once_and_not_shown(given: Any, says: str) -> None:
    with pytest.raises(InvalidInput, match=f"^storage_options {says}") as raised:
        ElasticTorchEstimator(storage_options=given)
    assert "abc" not in str(raised.value)


def _keywords(estimator: type[ElasticEstimator]) -> dict[str, inspect.Parameter]:
    found = inspect.signature(estimator.__init__).parameters.values()
    return {each.name: each for each in found if each.kind is each.KEYWORD_ONLY}


def test_both_estimators_spell_the_same_keywords_in_the_same_way() -> None:
    of_torch, of_keras = _keywords(ElasticTorchEstimator), _keywords(ElasticKerasEstimator)

    def describe_parameters(
        own: dict[str, inspect.Parameter], others: dict[str, inspect.Parameter]
    ) -> list[tuple[Any, ...]]:
        """In order; an annotation of the framework's own objects may be another."""
        return [
            (name, each.default, None if name in FRAMEWORKS_OWN else each.annotation)
            for name, each in own.items()
            if name in others
        ]

    assert describe_parameters(of_torch, of_keras) == describe_parameters(of_keras, of_torch)
    assert of_torch.keys() >= FRAMEWORKS_OWN <= of_keras.keys()


@pytest.mark.parametrize("estimator", [ElasticTorchEstimator, ElasticKerasEstimator])
def test_each_keyword_is_a_param_and_each_param_a_keyword(estimator: type[Any]) -> None:
    params = {param.name for param in estimator().params}
    assert params - {"settings"} == _keywords(estimator).keys()


HOROVOD = """
    num_proc model backend store optimizer loss loss_weights metrics sample_weight_col feature_cols
    label_cols continuous_cols categorical_cols validation gradient_compression compress_sparse_cols
    callbacks label_shapes use_gpu backward_passes_per_step batch_size val_batch_size epochs
    train_steps_per_epoch validation_steps_per_epoch random_seed shuffle_buffer_size shuffle verbose
    partitions_per_process run_id transformation_fn transformation_edit_fields
    transformation_removed_fields train_reader_num_workers val_reader_num_workers reader_pool_type
    inmemory_cache_all mp_start_method tensorflow_dataset_prefetch_buffer_size data_module
    input_shapes loss_constructors train_minibatch_fn custom_objects checkpoint_callback backend_env
    num_gpus logger log_every_n_steps loader_num_epochs terminate_on_nan profiler trainer_args
    debug_data_loader train_async_data_loader_queue_size val_async_data_loader_queue_size
"""


def test_a_refused_name_is_answered_with_what_to_set() -> None:
    for name, says in (
        ("trainer_args", "set epochs for its max_epochs"),
        ("mp_start_method", "leave it out, since"),
        ("train_async_data_loader_queue_size", "leave it out, since"),
    ):
        with pytest.raises(InvalidInput, match=f"^{name} has no meaning here: .*{says}"):
            ElasticTorchEstimator(**{name: 3})


@pytest.mark.parametrize("name", HOROVOD.split())
def test_no_name_of_horovod_is_ignored(name: str) -> None:
    estimator = ElasticTorchEstimator()
    setter = getattr(estimator, "set" + "".join(part.capitalize() for part in name.split("_")))
    if name in REFUSED:
        with pytest.raises(InvalidInput, match=f"^{name} has no meaning here: .*[.]$"):
            setter("something")
        assert ElasticTorchEstimator(**{name: None}).extractParamMap()
    else:
        values = {"use_gpu": True, "num_gpus": 1, "feature_cols": ["x"], "label_cols": ["x"]}
        assert setter(values.get(name, 3)) is estimator
        assert name in GPU_NAMES or estimator.hasParam(ALIASES.get(name, name))


def test_a_mapped_name_is_the_same_parameter() -> None:
    estimator = ElasticTorchEstimator(num_proc=3, random_seed=5)
    assert (estimator.getNumWorkers(), estimator.getNumProc(), estimator.getSeed()) == (3, 3, 5)
    with pytest.raises(InvalidInput, match="num_proc and num_workers are the same"):
        translate_names({"num_proc": 2, "num_workers": 3})


def test_arguments_of_horovod_without_effect_are_accepted() -> None:
    assert translate_names({"num_gpus": None, "train_steps_per_epoch": None}) == {}


@pytest.mark.parametrize(
    ("given", "device"), [({"use_gpu": True}, "auto"), ({"use_gpu": False}, "cpu"), ({"num_gpus": 1}, "auto")]
)
def test_names_of_gpus_choose_the_device(given: dict[str, object], device: str) -> None:
    assert translate_names(given) == {"device": device}
    assert ElasticTorchEstimator(**given).getSettings() == {"device": device}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"num_gpus": 2},
            "num_gpus must be 0 or 1: a worker trains on one GPU, and num_workers on several; got 2",
        ),
        ({"use_gpu": "yes"}, "use_gpu must be True or False; got 'yes'"),
        ({"use_gpu": True, "num_gpus": 0}, "use_gpu, num_gpus and device say the same: give one of them"),
        ({"use_gpu": True, "device": "cpu"}, "use_gpu, num_gpus and device say the same: give one of them"),
    ],
)
def test_names_of_gpus_that_say_nothing_clear_are_refused(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        translate_names(given)


def test_a_copy_trains_the_same_objects() -> None:
    model = torch.nn.Linear(2, 1)
    estimator = ElasticTorchEstimator(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    copied = estimator.copy({estimator.learning_rate: 0.5})
    assert copied.getModel() is model
    assert copied.getOptimizer().param_groups[0]["params"][0] is model.weight
    assert (copied.getLearningRate(), estimator.getLearningRate()) == (0.5, None)
    assert "learning rate of all parameter groups" in estimator.explainParams()

"""The estimator's parameters behave as Params of Spark ML do."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pyspark.ml.tuning import ParamGridBuilder
from pyspark.ml.util import DefaultParamsWriter

from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.keras_estimator import ElasticKerasEstimator
from spark_elastic.estimators.params import TorchParams, to_names
from spark_elastic.estimators.torch_estimator import ElasticTorchEstimator


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

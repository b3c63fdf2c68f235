"""Every parameter of Horovod's estimators is one of ours, mapped to one, or refused in a sentence; none is ignored."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("pyspark")

from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.params import ALIASES, GPU_NAMES, REFUSED, translate_names
from spark_elastic.estimators.torch_estimator import ElasticTorchEstimator

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

"""Which classes of Hugging Face's Trainer become elastic, and what of their own they keep; the rest is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from spark_elastic.errors import InvalidInput

pytestmark = [pytest.mark.native, pytest.mark.timeout(240)]


def make_arguments(folder: Path, **given: Any) -> Any:
    import transformers

    return transformers.TrainingArguments(folder, use_cpu=True, report_to="none", disable_tqdm=True, **given)


@pytest.mark.parametrize(
    ("options", "call", "advice"),
    [
        ({"commit_every": 0}, {}, "at least 1"),
        ({}, {}, "requires a train_dataset"),
        ({"train_dataset": [1]}, {"trial": object()}, "one training for each trial"),
        ({"determinism": "bitwise"}, {}, "rows"),
        ({"fsdp": True}, {}, "over the workers of a job: call it in a function of spark_elastic.run"),
        ({"fsdp": True, "fsdp_config": {"version": 1}}, {}, r"not with FSDP1 \(version=1\): leave it out"),
        ({"fsdp": True, "fsdp_config": {"cpu_offload": True}}, {}, "not with cpu_offload: leave it out"),
    ],
)
@pytest.mark.filterwarnings("ignore:FSDP1 .* is deprecated")
def test_a_trainer_that_cannot_be_elastic_is_refused(
    options: dict[str, Any], call: dict[str, Any], advice: str, tmp_path: Path
) -> None:
    from spark_elastic.integrations.huggingface import ElasticTrainer

    given = {name: options.pop(name) for name in ("fsdp", "fsdp_config") if name in options}
    args = make_arguments(tmp_path, **given)
    with pytest.raises(ValueError, match=advice):
        ElasticTrainer(torch.nn.Linear(2, 1), args, global_batch_size=2, **options).train(**call)


def test_a_loss_that_compares_rows_warns_or_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from spark_elastic.integrations.huggingface import ElasticTrainer

    def prepare(names: tuple[str, ...], **attributes: Any) -> Any:
        net, args = torch.nn.Linear(2, 1), make_arguments(tmp_path)
        trainer = ElasticTrainer(net, args, global_batch_size=2, gather_rows=names)
        trainer.loss = type("Ranking", (torch.nn.Module,), attributes)()
        return trainer._adapter

    prepare(("embedding",), gather_across_devices=False).loss.check_kinds()
    prepare((), gather_across_devices=True).loss.check_kinds()
    prepare((), mini_batch_size=2).loss.check_kinds()
    assert not caplog.messages
    advices = ({}, "give the trainer gather_rows"), ({"mini_batch_size": 2}, "give it gather_across")
    for more, remedy in advices:
        prepare((), gather_across_devices=False, **more).loss.check_kinds()
        assert "Ranking compares the rows of one rank alone" in caplog.messages[-1]
        assert remedy in caplog.messages[-1]
    for attributes in ({}, {"mini_batch_size": 2}):
        with pytest.raises(InvalidInput, match="Ranking gathers rows itself, or goes through them in parts"):
            prepare(("embedding",), gather_across_devices=not attributes, **attributes).loss.check_kinds()


class Pairs(torch.utils.data.BatchSampler):
    """Rows 0 and 1, then 2 and 3 ..., in another order of the pairs in each epoch."""

    def __init__(self, rows: int, size: int, again: bool) -> None:
        super().__init__(torch.utils.data.SequentialSampler(range(rows)), size, False)
        self.again = again

    def set_epoch(self, epoch: int) -> None:
        if self.again:
            torch.manual_seed(epoch)

    def __iter__(self) -> Any:
        self.drawn = getattr(self, "drawn", 0) + 1
        pairs = list(super().__iter__())
        return iter(pairs[:: -1 if not self.again and self.drawn % 2 else 1])


def load_batches(sampler: Any, rows: int = 4) -> Any:
    return torch.utils.data.DataLoader(range(rows), batch_sampler=sampler)


class Unseeded(torch.utils.data.BatchSampler):
    def __iter__(self) -> Any:
        return iter([[0, 1], [2, 3]])


class Packed(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(range(4))


def sample(sampler: Any) -> Any:
    return torch.utils.data.DataLoader(range(4), sampler=sampler)


@pytest.mark.parametrize(
    ("load", "name"),
    [
        (
            lambda: sample(torch.utils.data.WeightedRandomSampler([1.0, 2.0, 1.0, 1.0], 4)),
            "loader has a WeightedRandomSampler: leave samplers",
        ),
        (
            lambda: sample(torch.utils.data.RandomSampler(range(3))),
            "RandomSampler that does not take each of",
        ),
        (lambda: load_batches(Unseeded(range(4), 2, False)), "loader has a Unseeded"),
        (lambda: load_batches(Pairs(4, 2, again=False)), "Pairs gives other batches each time"),
        (lambda: torch.utils.data.DataLoader(range(4), batch_size=None), "loader has a NoneType"),
        (lambda: [[0, 1], [2, 3]], "returns a list, which"),
        (lambda: torch.utils.data.DataLoader(Packed(), 2), "which Packed does not offer"),
    ],
)
@pytest.mark.parametrize("below", [True, False], ids=["subclass", "elastic_trainer"])
def test_a_sampler_that_is_not_elastic_is_named(load: Any, name: str, below: bool, tmp_path: Path) -> None:
    import transformers

    from spark_elastic.integrations.huggingface import ElasticTrainer, elastic_trainer

    class Sampling(ElasticTrainer if below else transformers.Trainer):  # type: ignore[misc, name-defined]
        def get_train_dataloader(self) -> Any:
            loader = load()
            return loader if isinstance(loader, list) else self.accelerator.prepare(loader)

    net, args = torch.nn.Linear(4, 1), make_arguments(tmp_path)
    trainer = elastic_trainer(Sampling)(net, args, train_dataset=[1, 2, 3, 4], global_batch_size=2)
    with pytest.raises(InvalidInput, match=name):
        trainer.train()


def test_rows_that_a_batch_sampler_puts_behind_its_length_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from spark_elastic.integrations.huggingface_adapter import make_elastic_loader

    class Longer(Pairs):
        def __len__(self) -> int:
            return 2

    for kind in (Pairs, Longer):
        make_elastic_loader(load_batches(kind(6, 2, again=True), 6), 2, 5, None)
    (told,) = caplog.messages
    assert "Longer makes 3 batches of an epoch, of which the Trainer takes 2" in told


def test_a_batch_sampler_decides_the_rows_of_each_step_in_any_world(monkeypatch: pytest.MonkeyPatch) -> None:
    from spark_elastic.handwritten import data_loader
    from spark_elastic.integrations.huggingface_adapter import make_elastic_loader

    class Shuffled(Pairs):
        def __iter__(self) -> Any:
            return iter([rows for number in torch.randperm(4) for rows in [[2 * number, 2 * number + 1]]])

    def take(ranks: int, epochs: int, stop: int = -1) -> list[list[int]]:
        """The rows of each step, over all ranks; loader by loader, as workers have them."""
        steps: list[list[int]] = []
        for number in range(ranks):
            monkeypatch.setattr(data_loader, "rank", lambda number=number: number)
            monkeypatch.setattr(data_loader, "size", lambda: ranks)
            loader = make_elastic_loader(load_batches(Shuffled(8, 2, again=True), 8), 2, 5, None)
            loader.load_state_dict({**loader.state_dict(), "epoch": epochs - 1, "step": max(stop, 0)})
            mine = [batch.tolist() for batch in loader]
            steps = [left + right for left, right in zip(steps or [[] for _ in mine], mine, strict=True)]
        return steps

    first, second = take(1, 1), take(1, 2)
    assert sorted(row for step in first for row in step) == list(range(8))
    assert first != second
    assert (take(2, 1), take(2, 2)) == (first, second)
    assert take(2, 2, stop=3) == second[3:]


def test_p1_a_sampler_that_gives_each_rank_other_batches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from spark_elastic.integrations import huggingface_adapter

    apart = 0  # the digests of the ranks
    group = SimpleNamespace(size=2, allgather=lambda digest: np.stack([digest, digest + apart]))
    session = SimpleNamespace(group=group, wait_until_idle=lambda: None)
    monkeypatch.setattr(huggingface_adapter, "get_session", lambda: session)
    theirs = load_batches(Pairs(4, 2, again=True))
    iter(huggingface_adapter.make_elastic_loader(theirs, 2, 5, None))
    apart = 1
    with pytest.raises(InvalidInput, match="Pairs gives each rank other batches"):
        iter(huggingface_adapter.make_elastic_loader(theirs, 2, 5, None))


@pytest.mark.parametrize("name", ["train", "_inner_training_loop", "_run_epoch"])
def test_a_trainer_with_a_loop_of_its_own_is_refused_by_name(name: str) -> None:
    import transformers

    from spark_elastic.integrations.huggingface import ElasticTrainer, elastic_trainer

    def loop(self: Any, *args: Any, **options: Any) -> None:
        self.model.train()

    own = type("PpoTrainer", (transformers.Trainer,), {name: loop})
    with pytest.raises(InvalidInput, match=rf"PpoTrainer has a training loop of its own, {name}\(\)"):
        elastic_trainer(own)
    with pytest.raises(InvalidInput, match="PpoTrainer has a training loop of its own"):
        type("E", (ElasticTrainer, own), {})


@pytest.mark.parametrize("given", [dict, torch.nn.Linear(1, 1), "SFTTrainer", None, {}])
def test_what_is_no_trainers_class_is_refused(given: Any) -> None:
    from spark_elastic.integrations.huggingface import elastic_trainer

    says = r"takes a subclass of transformers.Trainer; got (dict|Linear|str|NoneType)"
    with pytest.raises(InvalidInput, match=says):
        elastic_trainer(given)


def test_the_elastic_class_of_a_trainer_is_one_class() -> None:
    import transformers

    from spark_elastic.integrations.huggingface import ElasticTrainer, _OwnLoss, elastic_trainer

    below = type("Below", (transformers.Seq2SeqTrainer,), {})  # as those of TRL and Sentence Transformers
    kind = elastic_trainer(below)
    assert kind is elastic_trainer(below) is elastic_trainer(kind)
    assert issubclass(kind, ElasticTrainer)
    assert kind.__name__ == "ElasticBelow"
    assert elastic_trainer(transformers.Trainer) is ElasticTrainer
    # Written by hand it has the same order, in which a compute_loss that calls super() reaches ours before Trainer's.
    written = type("Written", (ElasticTrainer, below), {})
    assert written.__mro__[1:] == kind.__mro__[1:]
    assert kind.__mro__.index(_OwnLoss) == kind.__mro__.index(transformers.Trainer) - 1


def test_a_training_step_with_a_loss_of_its_own_is_refused(tmp_path: Path) -> None:
    import transformers

    from spark_elastic.integrations.huggingface import elastic_trainer

    class Direct(transformers.Trainer):  # type: ignore[misc, name-defined]
        def training_step(self, model: Any, inputs: Any, *_: Any) -> Any:
            loss = model(inputs["x"]).mean()
            loss.backward()
            return loss.detach()

    args = make_arguments(tmp_path, remove_unused_columns=False)
    rows = [{"x": torch.ones(4)} for _ in range(4)]
    trainer = elastic_trainer(Direct)(torch.nn.Linear(4, 1), args, train_dataset=rows, global_batch_size=2)
    with pytest.raises(InvalidInput, match=r"ElasticDirect does not call self\.compute_loss"):
        trainer.train()

"""`ElasticDataLoader`: exact over any worlds, in virtual shares, and by torch's worker processes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import spark_elastic.torch as hvd
from elastic_collectives import Group
from spark_elastic.data.plan import DataPlan
from spark_elastic.errors import InvalidInput
from spark_elastic.handwritten import data_loader
from spark_elastic.handwritten.torch_state import ElasticDataLoader
from spark_elastic.worker.session import ENTERED, STATE
from tests.planned_rows import list_row_ids
from tests.unit.handwritten.loaders import Exchange, be_each_rank, enter_world, list_shares
from tests.unit.handwritten.loaders import LoaderWorld as World
from tests.worlds import Runner


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    enter_world(monkeypatch)


def take(loader: ElasticDataLoader, steps: int, rank: int = 0, size: int = 1) -> list[list[int]]:
    """The rows of that many batches as that rank, then the loop over them is left."""
    World.rank, World.size = rank, size
    taken: list[list[int]] = []
    if steps:
        for batch in loader:
            taken.append(batch.tolist())
            if len(taken) == steps:
                break
    return taken


@pytest.mark.scenario("U2")
@given(
    rows=st.integers(1, 200),
    batch=st.integers(1, 40),
    worlds=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=5),
    shuffle=st.booleans(),
)
@settings(max_examples=150)
def test_p1_p2_each_row_once_in_the_steps_of_one_process_over_any_worlds(
    rows: int, batch: int, worlds: list[tuple[int, int]], shuffle: bool
) -> None:
    """Each world takes some steps; the next one, of another size, has new loaders and one rank's position."""
    plan = DataPlan((rows,), batch, 5, lanes=1, shuffle=shuffle)
    expected = [set(list_row_ids(plan, 2, step).tolist()) for step in range(plan.steps)]
    position = {**ElasticDataLoader(range(rows), batch, 5, shuffle).state_dict(), "epoch": 2}
    seen: list[set[int]] = []
    for size, steps in [*worlds, (1, rows)]:
        ranks = min(size, plan.base_rows)
        positions, batches = [], []
        for rank in range(ranks):
            loader = ElasticDataLoader(range(rows), batch, 5, shuffle)
            loader.load_state_dict(position)
            batches.append(take(loader, min(steps, plan.steps - loader.step), rank, ranks))
            positions.append(loader.state_dict())
        assert all(each == positions[0] for each in positions)
        position = positions[0]
        for parts in zip(*batches, strict=True):
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
            seen.append({row for part in parts for row in part})
            assert sum(map(len, parts)) == len(seen[-1])
    assert seen == expected
    assert sorted(row for step in seen for row in step) == list(range(rows))


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 3))
@settings(max_examples=50)
def test_drop_last_gives_whole_batches_of_rows_that_come_once(rows: int, batch: int, epoch: int) -> None:
    if rows < batch:
        with pytest.raises(InvalidInput, match="drop_last leaves nothing"):
            ElasticDataLoader(range(rows), batch, drop_last=True)
        return
    loader = ElasticDataLoader(range(rows), batch, drop_last=True)
    loader.set_epoch(epoch)
    batches = take(loader, rows)
    assert [len(each) for each in batches] == [batch] * (rows // batch) == [batch] * len(loader)
    seen = [row for each in batches for row in each]
    assert len(set(seen)) == len(seen)


def test_p2_weighted_mean_losses_average_to_the_mean_of_the_step() -> None:
    values = torch.randn(23, dtype=torch.float64)
    expected = [batch.mean() for batch in ElasticDataLoader(values, 8)]
    for size in (1, 2, 3, 5):
        averages = torch.zeros(3, dtype=torch.float64)
        for _ in be_each_rank(size):
            loader = ElasticDataLoader(values, 8)
            for step, batch in enumerate(loader):
                averages[step] += loader.loss_weight * batch.mean() / size
        torch.testing.assert_close(averages, torch.stack(expected), rtol=1e-12, atol=0)


def test_global_rows_are_those_of_the_step_over_all_ranks() -> None:
    World.size = 2
    loader = ElasticDataLoader(range(5), 3, shuffle=False)
    assert len(loader) == 2
    rows = [(batch.tolist(), loader.global_rows, loader.loss_weight) for batch in loader]
    assert rows == [([0], 3, 2 / 3), ([2], 2, 1.0)]


def test_a_loader_that_would_give_each_process_all_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")  # as torchrun sets it
    says = r"none of the 3 processes that torchrun, .*: call .*init_process_group"
    with pytest.raises(InvalidInput, match=says):
        next(iter(ElasticDataLoader(range(12), 4)))


def test_epochs_follow_each_other_by_themselves_or_by_set_epoch() -> None:
    loader, other = ElasticDataLoader(range(20), 4), ElasticDataLoader(range(20), 4)
    for epoch in range(3):
        other.set_epoch(epoch)  # torch's habit: at the beginning of each
        assert (loader.epoch, loader.step) == (epoch, 0)
        mine, theirs = ([batch.tolist() for batch in each] for each in (loader, other))
        assert mine == theirs
    first, second = take(ElasticDataLoader(range(20), 4), 5), take(ElasticDataLoader(range(20), 4, seed=1), 5)
    assert first != second


def test_a_position_after_the_last_batch_begins_the_next_epoch() -> None:
    """The last commit of an epoch is made inside its loop, and a new world begins from it."""
    loader = ElasticDataLoader(range(8), 4)
    take(loader, 2)
    again = ElasticDataLoader(range(8), 4)
    again.load_state_dict(loader.state_dict())
    again.set_epoch(0)
    assert list(again) == []
    assert (again.epoch, again.step) == (1, 0)
    assert len(list(again)) == 2


def test_set_epoch_keeps_the_position_inside_an_epoch_and_never_goes_back() -> None:
    loader = ElasticDataLoader(range(8), 2)
    take(loader, 3)
    loader.set_epoch(0)
    assert (loader.epoch, loader.step) == (0, 3)
    loader.set_epoch(2)
    assert (loader.epoch, loader.step) == (2, 0)
    with pytest.raises(InvalidInput, match="keep the epoch in the state"):
        loader.set_epoch(1)


def test_a_state_puts_the_position_back_and_rejects_other_settings() -> None:
    loader = ElasticDataLoader(range(12), 3)
    state: Any = hvd.elastic.TorchState(loader=loader)
    first = take(loader, 2)
    state.commit()
    second = take(loader, 2)
    state.restore()
    assert loader.step == 2
    assert take(loader, 2) == second != first
    for other, named in (
        (ElasticDataLoader(range(13), 3), "rows=12"),
        (ElasticDataLoader(range(12), 4), "global_batch_size=3"),
        (ElasticDataLoader(range(12), 3, seed=1), "seed=0"),
        (ElasticDataLoader(range(12), 3, shuffle=False), "shuffle=True"),
        (ElasticDataLoader(range(12), 3, drop_last=True), "drop_last=False"),
    ):
        with pytest.raises(InvalidInput, match=f"{named}.*make the same loader"):
            other.load_state_dict(loader.state_dict())
    with pytest.raises(InvalidInput, match="what state_dict"):
        loader.load_state_dict({"epoch": 1})


def test_a_newcomers_loop_ends_once_it_takes_over_the_position(world: Runner) -> None:
    def work(group: Group) -> int:
        loader = ElasticDataLoader(range(12), 3)
        state: Any = hvd.elastic.TorchState(loader=loader)
        batches = iter(loader)
        if group.rank == 0:
            next(batches), next(batches)
        state.sync()
        with pytest.raises(InvalidInput, match="begin another loop"):
            next(batches)
        return loader.step

    assert world(2, work) == [2, 2]


def test_a_loop_whose_position_was_put_back_does_not_end_as_if_the_epoch_had() -> None:
    loader = ElasticDataLoader(range(12), 3)
    state: Any = hvd.elastic.TorchState(loader=loader)
    batches = iter(loader)
    next(batches)
    state.restore()
    with pytest.raises(InvalidInput, match="begin another loop"):
        next(batches)
    assert len(list(loader)) == 4


def test_getitems_fetches_the_rows_of_a_batch_at_once() -> None:
    """As those of Hugging Face do, whose rows are dicts."""

    class Table:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, row: int) -> None:
            raise AssertionError("one by one")

        def __getitems__(self, rows: list[int]) -> list[dict[str, int]]:
            return [{"x": row} for row in rows]

    loader = ElasticDataLoader(Table(), 3, shuffle=False)
    assert [batch["x"].tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5]]


class NoisyRows:
    """Rows with numbers that are drawn when they are read."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, row: int) -> tuple[int, list[float]]:
        return row, [float(torch.rand(())), float(np.random.random()), random.random()]


@pytest.mark.parametrize("processes", [0, 1])
def test_p2_what_is_drawn_for_a_row_depends_on_seed_and_epoch_but_not_on_the_world(processes: int) -> None:
    def draw(size: int, seed: int = 3, **options: Any) -> list[dict[int, list[float]]]:
        """By epoch, for each row."""
        epochs: list[dict[int, list[float]]] = [{}, {}]
        for _ in be_each_rank(size):
            loader = ElasticDataLoader(NoisyRows(), 8, seed, determinism="rows", collate_fn=list, **options)
            for epoch in epochs:
                epoch |= {row: drawn for batch in loader for row, drawn in batch}
        return epochs

    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    alone = draw(1)
    assert draw(2, num_workers=processes, persistent_workers=processes > 0) == draw(3) == alone
    others = [*alone, *draw(1, seed=4)]
    numbers = [number for epoch in others for drawn in epoch.values() for number in drawn]
    assert len(set(numbers)) == 4 * 23 * 3, "two rows, epochs or seeds draw the same"
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())


def with_process(rows: list[torch.Tensor]) -> tuple[list[int], int]:
    return [int(row) for row in rows], os.getpid()


@pytest.mark.parametrize("persistent", [False, True])
def test_worker_processes_end_with_their_world_unless_persistent(persistent: bool) -> None:
    me = psutil.Process()
    others = {child.pid for child in me.children()}  # of earlier tests: a cluster's server, a pool
    options: Any = {"num_workers": 1, "persistent_workers": persistent}
    loader = ElasticDataLoader(torch.arange(48), 4, collate_fn=with_process, **options)
    expected = take(ElasticDataLoader(range(48), 4), 12)
    random_state = torch.get_rng_state()
    batches = iter(loader)
    assert next(batches)[0] == expected[0]  # the process has read ahead by then
    first = {child.pid for child in me.children()} - others
    assert len(first) == 1
    loader.reset()  # as a new world does
    assert {child.pid for child in me.children()} - others == (first if persistent else set())
    World.rank, World.size = 1, 2
    rows = []
    for mine, pid in loader:
        rows.append(mine)
        assert (pid in first) == persistent
    assert rows == [step[2:] for step in expected[1:]]
    assert torch.equal(torch.get_rng_state(), random_state), "worker processes cost the loop random numbers"


def enter_loop(state: hvd.elastic.TorchState, monkeypatch: pytest.MonkeyPatch) -> None:
    session = SimpleNamespace(process_values={ENTERED: True, STATE: state})
    monkeypatch.setattr(data_loader, "get_session", lambda: session)


def test_a_loader_outside_of_the_state_is_refused_in_an_elastic_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, outside = ElasticDataLoader(range(4), 2), ElasticDataLoader(range(4), 2)
    enter_loop(hvd.elastic.TorchState(rows=inside), monkeypatch)
    assert len(list(inside)) == 2
    with pytest.raises(InvalidInput, match="not in the state"):
        iter(outside)


def test_wrong_arguments_are_refused() -> None:
    for dataset in (torch.utils.data.ChainDataset([]), iter([1])):
        with pytest.raises(InvalidInput, match="map-style"):
            ElasticDataLoader(dataset, 2)
    for batch in (0, 2.0, "8", True):
        with pytest.raises(InvalidInput, match="global_batch_size must be the rows of a step"):
            ElasticDataLoader(range(4), batch)  # type: ignore[arg-type]
    for seed in (None, 0.5, "1"):
        with pytest.raises(InvalidInput, match="seed must be a whole number"):
            ElasticDataLoader(range(9), 3, seed=seed)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="the data set is empty"):
        ElasticDataLoader([], 2)
    for name in ("batch_size", "sampler", "batch_sampler"):
        with pytest.raises(InvalidInput, match=f"takes no {name}: use"):
            ElasticDataLoader(range(4), 2, **{name: 1})
    with pytest.raises(InvalidInput, match="in_order"):
        ElasticDataLoader(range(4), 2, in_order=False)
    with pytest.raises(InvalidInput, match="no batch yet"):
        _ = ElasticDataLoader(range(4), 2).loss_weight
    World.size = 3
    with pytest.raises(InvalidInput, match="a step of 2 rows cannot be divided over 3 workers"):
        iter(ElasticDataLoader(range(4), 2))


SHARES, COUNT, BATCH = 5, 23, 8


class NumberedRows:
    """Rows with a number that is drawn when they are read."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, row: int) -> tuple[int, float]:
        return row, random.random()


def make(told: Exchange | None = None, dataset: Any = None, **options: Any) -> ElasticDataLoader:
    options = {"virtual_shares": SHARES, **options}
    loader = ElasticDataLoader(dataset or NumberedRows(), BATCH, seed=3, determinism="bitwise", **options)
    if told is not None:
        loader.attach_sync(told)
    return loader


def describe(share: Any, weight: float) -> list[Any]:
    """Its rows, the numbers drawn with them, its weight, and what a model draws."""
    rows, noise = share
    return [rows.tolist(), noise.tolist(), weight, float(torch.rand(()))]


def test_shares_do_not_depend_on_the_world() -> None:
    before = torch.get_rng_state(), random.getstate()
    alone = list_shares(make, 1, describe)
    assert torch.equal(before[0], torch.get_rng_state())
    assert random.getstate() == before[1]
    assert sorted(row for step in alone for share in step for row in share[0]) == list(range(COUNT))
    assert all(sum(share[2] for share in step) == pytest.approx(1.0) for step in alone)
    assert len({share[3] for step in alone for share in step}) == 3 * SHARES, "shares draw the same"
    for size in range(2, SHARES + 1):
        assert list_shares(make, size, describe) == alone


def test_a_position_continues_at_its_step() -> None:
    told = Exchange()
    loader, other = make(told), make(told)
    for _ in next(iter(loader)):
        pass
    other.load_state_dict(loader.state_dict())
    left = [[rows.tolist() for rows, _ in shares] for shares in other]
    assert left == [[share[0] for share in step] for step in list_shares(make, 1, describe)[1:]]
    assert (other.epoch, other.step) == (1, 0)
    with pytest.raises(InvalidInput, match="belongs to virtual_shares=4"):
        loader.load_state_dict({**loader.state_dict(), "virtual_shares": 4})


def go_on_in_mid_step(loader: ElasticDataLoader) -> None:
    for shares in loader:
        next(iter(shares))


def take_twice(loader: ElasticDataLoader) -> None:
    for shares in loader:
        list(shares)
        list(shares)


def ask_outside(loader: ElasticDataLoader) -> None:
    for _ in loader:
        _ = loader.loss_weight


@pytest.mark.parametrize(
    ("loop", "sentence"),
    [
        (go_on_in_mid_step, "went on before the last virtual share of a step"),
        (take_twice, "were taken already"),
        (ask_outside, "over a step's shares"),
    ],
)
def test_what_a_loop_must_not_do(loop: Callable[[ElasticDataLoader], None], sentence: str) -> None:
    exchange = Exchange()
    with pytest.raises(InvalidInput, match=sentence):
        loop(make(exchange))


def test_what_cannot_be_cut_or_trained_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no optimizer knows of the virtual shares"):
        list(next(iter(make())))
    with pytest.raises(InvalidInput, match="7 rows cannot be cut into virtual_shares=8"):
        make(virtual_shares=8)
    with pytest.raises(InvalidInput, match="determinism must be one of 'rows', 'bitwise'"):
        ElasticDataLoader(range(9), 3, determinism="exact")
    World.size = SHARES + 1
    with pytest.raises(InvalidInput, match="5 virtual shares cannot be divided over 6 workers"):
        iter(make())


def test_layers_with_statistics_of_a_worker_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = make(Exchange())
    enter_loop(
        hvd.elastic.TorchState(torch.nn.Sequential(torch.nn.BatchNorm1d(3)), loader=loader), monkeypatch
    )
    with pytest.raises(InvalidInput, match=r"layer '0', BatchNorm1d, which keeps statistics .* GroupNorm"):
        iter(loader)

"""`ElasticDataLoader` in bitwise mode: shares that no world changes, and loops that it refuses."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.handwritten import data_loader
from spark_elastic.handwritten.torch_state import ElasticDataLoader, TorchState
from spark_elastic.worker.session import ENTERED, STATE
from tests.unit.torch.loops import Exchange
from tests.unit.torch.loops import LoaderWorld as World

SHARES, ROWS, BATCH = 5, 23, 8


class NoisyRows:
    """Rows with a number that is drawn when they are read."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[int, float]:
        return row, random.random()


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> None:
    World.rank, World.size = 0, 1
    monkeypatch.setattr(data_loader, "rank", lambda: World.rank)
    monkeypatch.setattr(data_loader, "size", lambda: World.size)
    monkeypatch.setattr(data_loader, "use_deterministic_arithmetic", lambda: None)


def make(told: Exchange | None = None, dataset: Any = None, **options: Any) -> ElasticDataLoader:
    options = {"virtual_shares": SHARES, **options}
    loader = ElasticDataLoader(dataset or NoisyRows(), BATCH, seed=3, determinism="bitwise", **options)
    if told is not None:
        loader.attach_sync(told)
    return loader


def list_shares(size: int) -> list[list[list[Any]]]:
    """By step and share: rows, the numbers drawn with them, weight, and what a model draws."""
    steps: list[list[list[Any]]] = []
    World.size = size
    for World.rank in range(size):
        told = Exchange()
        loader = make(told)
        for number, shares in enumerate(loader):
            if World.rank == 0:
                steps.append([])
            for rows, noise in shares:
                steps[number].append(
                    [rows.tolist(), noise.tolist(), loader.loss_weight, float(torch.rand(()))]
                )
        assert told.shares == ["begin", "end"] * sum(map(len, steps)) or size > 1
    return steps


def test_shares_do_not_depend_on_the_world() -> None:
    before = torch.get_rng_state(), random.getstate()
    alone = list_shares(1)
    assert torch.equal(before[0], torch.get_rng_state())
    assert random.getstate() == before[1]
    assert sorted(row for step in alone for share in step for row in share[0]) == list(range(ROWS))
    assert all(sum(share[2] for share in step) == pytest.approx(1.0) for step in alone)
    assert len({share[3] for step in alone for share in step}) == 3 * SHARES, "shares draw the same"
    for size in range(2, SHARES + 1):
        assert list_shares(size) == alone


def test_a_position_continues_at_its_step() -> None:
    told = Exchange()
    loader, other = make(told), make(told)
    for _ in next(iter(loader)):
        pass
    other.load_state_dict(loader.state_dict())
    left = [[rows.tolist() for rows, _ in shares] for shares in other]
    assert left == [[share[0] for share in step] for step in list_shares(1)[1:]]
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
    told = Exchange()
    with pytest.raises(InvalidInput, match=sentence):
        loop(make(told))


def test_what_cannot_be_cut_or_trained_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
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
    state = TorchState(torch.nn.Sequential(torch.nn.BatchNorm1d(3)), loader=loader)
    session = SimpleNamespace(process_values={ENTERED: True, STATE: state})
    monkeypatch.setattr(data_loader, "get_session", lambda: session)
    with pytest.raises(InvalidInput, match=r"layer '0', BatchNorm1d, which keeps statistics .* GroupNorm"):
        iter(loader)

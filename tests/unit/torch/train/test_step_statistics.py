"""A step of a net with SyncBatchNorm equals that of one process with the whole batch, on ranks without rows as well."""

from __future__ import annotations

import pytest
from torch import nn

from elastic_collectives import Group
from spark_elastic.torch import SyncBatchNorm
from tests.unit.ops.workers import run_in_fake_world, use_context_per_thread
from tests.unit.torch.train.trainees import ROWS, TrainedModel, have_equal_values, train_plain


@pytest.fixture(autouse=True)
def workers(monkeypatch: pytest.MonkeyPatch) -> None:
    use_context_per_thread(monkeypatch)


@pytest.mark.parametrize(("size", "one_bucket"), [(1, False), (3, False), (3, True)])
def test_r09_statistics_are_those_of_all_rows_of_the_step(size: int, one_bucket: bool) -> None:
    """Shares of 4, 0 and 6 rows, and micro-batches of 3, which such a net is not cut into."""
    net = nn.Sequential(nn.Linear(5, 6), SyncBatchNorm(6), nn.Linear(6, 3)).double()
    shares = [range(ROWS)] if size == 1 else [range(4), range(4, 4), range(4, ROWS)]

    def work(group: Group) -> tuple[nn.Module, str]:
        trainee = TrainedModel(net, one_bucket=one_bucket)
        for _ in range(2):
            trainee.take(group, shares[group.rank])
        trainee.exchange.close()
        return trainee.model, trainee.state.digest()

    replicas = run_in_fake_world(size, work)
    assert len({digest for _, digest in replicas}) == 1
    assert have_equal_values(replicas[0][0], train_plain(net, steps=2))

"""Whom gradients wait for: what the log says of it, and when they are given up."""

from __future__ import annotations

import logging
from contextlib import closing

import pytest
import torch
from torch import nn

from elastic_collectives import CollectiveTimeout, Group
from spark_elastic.clock import SystemClock
from spark_elastic.gradients.exchange import GradientExchange
from spark_elastic.gradients.reduction import ExchangeOptions, options_from_env
from tests.unit.torch.worlds import run_in_world

CLOCK = SystemClock()


def step(group: Group, terms: ExchangeOptions, delays: tuple[float, ...] = (0.0, 0.0)) -> None:
    """Steps of two layers; rank 1 comes so many seconds late to each of them."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    with closing(GradientExchange(model.named_parameters(), terms)) as exchange:
        for delay in delays:
            exchange.clear_and_begin(group, 1)
            model(torch.ones(1, 2)).sum().backward()
            if group.rank == 1:
                CLOCK.sleep(delay)
            exchange.finish()


def test_the_stall_check_names_parameters_and_missing_ranks_as_the_worlds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(group: Group) -> None:
        if group.rank in (1, 3):
            step(group.subgroup(1, [1, 3]), ExchangeOptions(warn_after=2.5), (0.0, 3.5))
        group.barrier()

    with caplog.at_level(logging.WARNING, "spark_elastic.gradients.step_reducer"):
        run_in_world(4, work)
    (line,) = caplog.messages
    assert line.startswith("gradients of '1.bias', '1.weight', '0.bias' and 1 more have been waiting for 3 s")
    assert line.endswith("for rank(s) 3, which have not sent theirs.")


def test_gradients_fail_after_wait_at_most_and_later_collectives_have_the_usual_timeout(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(group: Group) -> None:
        step(group, ExchangeOptions(wait_at_most=0.5))
        if group.rank == 1:
            CLOCK.sleep(1.0)
        group.barrier()  # the group's timeout holds again
        with pytest.raises(CollectiveTimeout) as raised:
            step(group, ExchangeOptions(wait_at_most=0.5), (0.0, 1.5))
        assert raised.value.ranks == (1,)

    run_in_world(2, work)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, (10.0, None)),
        ({"CHECK_TIME_SECONDS": "30", "SHUTDOWN_TIME_SECONDS": "90"}, (30.0, 90.0)),
        ({"CHECK_DISABLE": "1"}, (float("inf"), None)),
    ],
)
def test_horovods_settings_hold_for_gradients(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], found: tuple[float, float | None]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"HOROVOD_STALL_{name}", value)
    terms = options_from_env()
    assert (terms.warn_after, terms.wait_at_most) == found

"""Random numbers of forward passes, and the process's generators beside them."""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from spark_elastic.gradients.generators import (
    StepGenerators,
    get_generators,
    give_back_generators,
    seeded_rng,
    set_generators,
)
from spark_elastic.training.torch.buffers import rng_state

Draws = list[tuple[float, float, float]]
STEPS = 6


@pytest.fixture(autouse=True)
def generators_as_before() -> Iterator[None]:
    states = get_generators()
    yield
    give_back_generators()
    set_generators(states)


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def take_steps(
    make_context: Callable[..., Any], rank: int = 0, drawing: Container[int] = range(STEPS)
) -> Draws:
    drawn = []
    for step in range(STEPS):
        with make_context(7, 0, 1, step, rank):
            drawn += [draw()] if step in drawing else []
    return drawn


def make_kept() -> StepGenerators:
    generators = StepGenerators()
    generators.keeps = True
    return generators


def test_what_draws_in_each_step_draws_the_same_if_generators_stay_between_steps() -> None:
    wanted = take_steps(seeded_rng)
    assert len(set(wanted)) == STEPS
    assert take_steps(StepGenerators()) == wanted
    assert take_steps(make_kept()) == wanted
    assert take_steps(make_kept(), rank=1) == take_steps(seeded_rng, rank=1) != wanted


def test_what_draws_in_some_steps_draws_by_step_and_rank_alone() -> None:
    """Whatever drew before: a member that came later, or a run that resumes, draws the same."""
    for rank in (0, 1):
        wanted = take_steps(seeded_rng, rank, drawing=(1, 4))
        assert take_steps(make_kept(), rank, drawing=(1, 4)) == wanted
        assert take_steps(make_kept(), rank, drawing=(4,)) == wanted[1:]


@pytest.mark.parametrize("give_back", [give_back_generators, rng_state, get_generators])
def test_generators_that_stay_between_steps_are_given_back(give_back: Callable[[], object]) -> None:
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    states = get_generators()
    wanted = [draw() for _ in range(2)]
    set_generators(states)
    generators = make_kept()
    take_steps(generators)
    give_back()
    assert draw() == wanted[0]
    take_steps(generators)
    give_back()
    assert draw() == wanted[1]


def test_a_block_inside_of_a_step_leaves_the_numbers_of_the_step() -> None:
    for make_context in (seeded_rng, make_kept()):
        with make_context(1, 2):
            wanted = draw(), draw()
        with make_context(1, 2):
            first = draw()
            with seeded_rng(3):
                draw()
            assert (first, draw()) == wanted


def test_random_numbers_outside_of_steps_are_those_of_the_process() -> None:
    random.seed(5)
    np.random.seed(5)
    wanted = [(random.random(), np.random.random()) for _ in range(2)]
    random.seed(5)
    np.random.seed(5)
    found = []
    for step in range(2):
        with StepGenerators()(1, step):
            draw()
        found.append((random.random(), np.random.random()))
    assert found == wanted

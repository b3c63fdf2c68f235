"""Objects, batches, meshes, functional collectives, DTensor and wrappers of torch over the backend `elastic`."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pytest

from tests.component.torch import distributed_programs
from tests.component.torch.distributed_programs import PROGRAMS, SIZE, run_programs
from tests.component.torch.hand_written import CARRIERS, run_over

pytestmark = [pytest.mark.native, pytest.mark.timeout(300)]

for module in (__name__, distributed_programs.__name__):
    cloudpickle.register_pickle_by_value(sys.modules[module])


@pytest.fixture(scope="module", params=CARRIERS)
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Of all programs, by rank: one world runs them all."""
    return run_over(request.param, run_programs, SIZE)[0]


@pytest.mark.parametrize("program", [program.__name__ for program in PROGRAMS])
def test_it_works_as_torch_documents_it(results: list[dict[str, Any]], program: str) -> None:
    for of_rank in results:
        found = of_rank[program]
        if found == "absent":
            pytest.skip("this version of torch lacks it")
        assert not isinstance(found, str), found
        for got, expected in found:
            assert got == expected

"""What every `DistributedOptimizer` refuses, by whatever it exchanges."""

from __future__ import annotations

from typing import Any, NoReturn, SupportsIndex

import torch

from spark_elastic.errors import InvalidInput


class Wrapped(torch.optim.Optimizer):
    """The first of the classes that are added to the optimizer's own. Never instantiated by itself."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise InvalidInput("DistributedOptimizer takes no further parameters: add the group before wrapping.")

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise InvalidInput(
            "a DistributedOptimizer cannot be copied or pickled, since its exchange belongs to this process: take its "
            "state_dict(), and wrap the other optimizer itself."
        )

"""An optimizer of Keras with a further class, which exchanges: what all backends of it have in common.

It is the optimizer itself: variables, learning rate and schedules are the same objects. Imports no framework.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spark_elastic.errors import InvalidInput
from spark_elastic.ops.process_sets import world

_OWN = "_spark_elastic"


class WrappedOptimizer:
    """To be put before the optimizer's own class."""

    _make_exchange: Callable[[], Any]  # of the class that `wrapped` makes

    def __init__(self, *args: Any, **settings: Any) -> None:
        """By `from_config`: another optimizer, which exchanges in the same way."""
        super().__init__(*args, **settings)
        vars(self)[_OWN] = self._make_exchange()

    def __setattr__(self, name: str, value: Any) -> None:
        # What a LossScaleOptimizer does to the optimizer that it is put around.
        if name == "loss_scale_factor" and value is None and _OWN in vars(self):
            raise InvalidInput(
                "a LossScaleOptimizer around a DistributedOptimizer would let a rank skip a step that the others take "
                "(compile() puts one there where the policy is mixed_float16): use "
                "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))."
            )
        super().__setattr__(name, value)


def wrap_optimizer(optimizer: Any, kind: type[WrappedOptimizer], made: Callable[[], Any], utils: Any) -> Any:
    """`optimizer` with `kind` before its own class, saved as the plain one.

    made: what an optimizer of that class has of its own, `exchange_of`. utils: Keras's module of that name.
    """
    own = type(optimizer)
    # Under the name of its own class: what is saved is loaded as the plain optimizer.
    known = type(own.__name__, (kind, own), {"__module__": own.__module__, "_made": staticmethod(made)})
    package, _, name = utils.get_registered_name(own).rpartition(">")
    if package:
        for each in (known, own):  # the last one is what the name stands for
            utils.register_keras_serializable(package, name)(each)
    found: Any = object.__new__(known)
    object.__setattr__(found, "__dict__", optimizer.__dict__)  # past Keras's own way to set attributes
    vars(found)[_OWN] = made()  # unseen by Keras's tracking of attributes
    return found


def get_exchange(optimizer: WrappedOptimizer) -> Any:
    """What `made` gave to it."""
    return vars(optimizer)[_OWN]


# How many backward passes make a step. Written by whoever runs the optimizer, one at a time.


def validate_backward_passes(count: int) -> int:
    """The same number.

    Raises:
        InvalidInput: it is below 1.
    """
    if count < 1:
        raise InvalidInput(f"backward_passes_per_step must be at least 1; got {count}.")
    return count


class PassCounter:
    """Counts the backward passes of a step. An unfinished count is dropped when the world changes."""

    def __init__(self, count: int) -> None:
        self.count = validate_backward_passes(count)
        self._taken = 0
        self._fence = (0, 0)  # the world in which they were counted

    def begin_pass(self) -> bool:
        """Called before a pass is added. Returns whether it is the first of a step."""
        fence = world().fence
        if fence != self._fence:
            self._fence, self._taken = fence, 0
        return self._taken == 0

    def complete_pass(self) -> bool:
        """Called after a pass was added. Returns whether that completes a step."""
        self._taken = (self._taken + 1) % self.count
        return self._taken == 0

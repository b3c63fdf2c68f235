"""What the `DistributedOptimizer`s of all frameworks share: accumulated backward passes, and the wrapping of Keras's.

Imports no framework. The thread that runs the optimizer owns everything here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import world

T = TypeVar("T")
_EXCHANGE = "_spark_elastic"  # the attribute of an optimizer that holds its exchange


def validate_backward_passes(count: int) -> int:
    """Return `backward_passes_per_step` as it is.

    Raises:
        InvalidInput: it is below 1.
    """
    if count < 1:
        raise InvalidInput(f"backward_passes_per_step must be at least 1; got {count}.")
    return count


class GradientAccumulator(Generic[T]):
    """Sums the gradients of `backward_passes_per_step` backward passes.

    A new world starts a new step: it drops what the former world left unfinished.
    """

    def __init__(self, passes: int, average: bool, copy: Callable[[Sequence[T]], list[T]]) -> None:
        """
        Args:
            average: divide the sums by the number of passes.
            copy: makes arrays or tensors that the accumulator may write to.
        """
        self.passes = validate_backward_passes(passes)
        self._average = average
        self._copy = copy
        self._sums: list[T | None] = []
        self._done = 0  # passes of the present step
        self._fence = (0, 0)  # the world in which they were counted

    def add(self, gradients: Sequence[T | None]) -> list[T | None] | None:
        """Add one pass. Returns the sums if that completes the step, else None."""
        fence = world().fence
        if fence != self._fence:
            self._fence, self._done = fence, 0
        if self._done == 0:
            self._sums = [None] * len(gradients)
        new = {i: g for i, g in enumerate(gradients) if g is not None and self._sums[i] is None}
        for i, gradient in enumerate(gradients):
            if gradient is not None and i not in new:
                self._sums[i] += gradient  # type: ignore[operator]
        if new:
            for i, copied in zip(new, self._copy(list(new.values())), strict=True):
                self._sums[i] = copied
        self._done = (self._done + 1) % self.passes
        if self._done:
            return None
        sums, self._sums = self._sums, []
        if self._average:
            for i, total in enumerate(sums):
                if total is not None:
                    sums[i] /= self.passes  # type: ignore[operator, assignment]
        return sums


class WrappedOptimizer:
    """Stands before the optimizer's own class among the bases of a wrapped Keras optimizer."""

    _make_exchange: Callable[[], Any]  # set on the class that `wrap_optimizer` makes

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Called by `from_config`, which makes another optimizer that exchanges in the same way."""
        super().__init__(*args, **settings)
        vars(self)[_EXCHANGE] = self._make_exchange()

    def __setattr__(self, name: str, value: Any) -> None:
        # A LossScaleOptimizer sets this attribute of the optimizer that it wraps.
        if name == "loss_scale_factor" and value is None and _EXCHANGE in vars(self):
            raise InvalidInput(
                "a LossScaleOptimizer around a DistributedOptimizer would let a rank skip a step that the others take "
                "(compile() puts one there where the policy is mixed_float16): use "
                "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))."
            )
        super().__setattr__(name, value)


def wrap_optimizer(
    optimizer: Any, kind: type[WrappedOptimizer], make_exchange: Callable[[], Any], utils: Any
) -> Any:
    """Return `optimizer` with `kind` before its own class; Keras saves it as the plain optimizer.

    The result is the optimizer itself: variables, learning rate and schedules are the same objects.

    Args:
        make_exchange: makes what an optimizer of that class has of its own; `get_exchange` returns it.
        utils: the module `utils` of Keras.

    Raises:
        InvalidInput: it is no optimizer of Keras 3, or wrapped already.
    """
    if isinstance(optimizer, WrappedOptimizer) or not all(
        callable(getattr(optimizer, method, None)) for method in ("apply", "apply_gradients", "build")
    ):
        raise InvalidInput(
            f"DistributedOptimizer wraps an optimizer of Keras 3 once; got a {type(optimizer).__name__}."
        )
    own = type(optimizer)
    # The class keeps the name of the plain one, so that a saved optimizer is loaded as the plain one.
    distributed = type(
        own.__name__,
        (kind, own),
        {"__module__": own.__module__, "_make_exchange": staticmethod(make_exchange)},
    )
    package, _, name = utils.get_registered_name(own).rpartition(">")
    if package:
        for each in (distributed, own):  # the name stands for the class that was registered last
            utils.register_keras_serializable(package, name)(each)
    result: Any = object.__new__(distributed)
    object.__setattr__(result, "__dict__", optimizer.__dict__)  # bypasses the __setattr__ of Keras
    vars(result)[_EXCHANGE] = make_exchange()  # Keras does not track this attribute
    return result


def get_exchange(optimizer: WrappedOptimizer) -> Any:
    """Return what `make_exchange` made for this optimizer."""
    return vars(optimizer)[_EXCHANGE]

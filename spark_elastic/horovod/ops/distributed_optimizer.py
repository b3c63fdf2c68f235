"""What the `DistributedOptimizer`s of all frameworks share: accumulated backward passes, and the wrapped optimizer of
Keras, to which each of Keras's backends adds an `OptimizerExchange`.

Imports no framework. The thread that runs the optimizer owns everything here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import world
from spark_elastic.gradients.reduction import ReduceOptions
from spark_elastic.runs.handlers import list_trainable_weights

T = TypeVar("T")
Plain = TypeVar("Plain")
_EXCHANGE = "_spark_elastic"  # the attribute of an optimizer that holds its exchange


def validate_backward_passes(count: int) -> int:
    if count < 1:
        raise InvalidInput(f"backward_passes_per_step must be at least 1; got {count}.")
    return count


class GradientAccumulator(Generic[T]):
    """Sums the gradients of `backward_passes_per_step` backward passes. A new world starts a new step: it drops what
    the former world left unfinished."""

    def __init__(self, passes: int, average: bool, copy: Callable[[Sequence[T]], list[T]]) -> None:
        """average: divide by the number of passes. copy: makes tensors that the accumulator may write to."""
        self.passes = validate_backward_passes(passes)
        self._average = average
        self._copy = copy
        self._sums: list[T | None] = []
        self._done = 0  # passes of the present step
        self._fence = (0, 0)  # the world in which they were counted

    def add(self, gradients: Sequence[T | None]) -> list[T | None] | None:
        """Returns the sums if this pass completes the step, else None."""
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


@dataclass(frozen=True)
class GradientOptions:
    """How the gradients of a Keras optimizer or of a tape are exchanged: Horovod's arguments after all checks."""

    reduce: ReduceOptions  # the same for all variables that are not local
    sparse_as_dense: bool  # gradients with missing rows become dense
    groups: int | Sequence[Sequence[Any]]  # a number of groups to make, or lists of variables
    scale_local: bool  # divide local gradients by the size of the process set

    def __post_init__(self) -> None:
        if isinstance(self.groups, int) and self.groups < 0:
            raise InvalidInput(f"groups must be lists of variables, or a number; got {self.groups}.")


class OptimizerExchange(ABC, Generic[T]):
    """The exchange of one Keras optimizer's gradients, of which each backend has a class."""

    kind: type[WrappedOptimizer]  # of the optimizer that exchanges so

    def __init__(self, options: GradientOptions, passes: int, average: bool) -> None:
        self.options = options
        self.accumulator: GradientAccumulator[T] = GradientAccumulator(passes, average, self.copy)
        self.local: list[Any] = []  # variables whose gradients are not exchanged

    @staticmethod
    @abstractmethod
    def copy(gradients: Sequence[T]) -> list[T]:
        """Return copies that the accumulator may write to."""

    @abstractmethod
    def exchange(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients of all ranks, in the order of `variables`."""

    @abstractmethod
    def add_pass(self, gradients: list[Any], step: Callable[[list[Any]], None]) -> None:
        """Add one of several backward passes; call `step` with the sums if it completes the step."""


class WrappedOptimizer:
    """The methods that `DistributedOptimizer` puts before those of the own class of a Keras optimizer."""

    _make_exchange: Callable[[], OptimizerExchange[Any]]  # set on the class that `wrap_optimizer` makes

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Called by `from_config`, which makes another optimizer that exchanges in the same way."""
        super().__init__(*args, **settings)
        vars(self)[_EXCHANGE] = self._make_exchange()

    def register_local_var(self, var: Any) -> None:
        """Do not exchange the gradient of that variable."""
        vars(self)[_EXCHANGE].local.append(var)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Exchange the gradients and apply them. Raises CollectiveError if the exchange broke; no variable was changed.
        In a graph of TensorFlow: see `elastic.run`."""
        own: Any = super()
        this: Any = self
        exchange: OptimizerExchange[Any] = vars(self)[_EXCHANGE]
        variables = list(this._trainable_variables if trainable_variables is None else trainable_variables)

        def step(gradients: list[Any]) -> None:
            own.apply(exchange.exchange(gradients, variables), trainable_variables)

        if exchange.accumulator.passes == 1:
            step(list(grads))
            return
        if not this.built:  # a graph's branch, in which the step may be, must not create variables
            this.build(variables)
        exchange.add_pass(list(grads), step)

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
    optimizer: Plain, make_exchange: Callable[[], OptimizerExchange[Any]], utils: Any
) -> Plain:
    """Return `optimizer` with the class `kind` of the exchange before its own; Keras saves it as the plain optimizer.
    The result is the optimizer itself: variables, learning rate and schedules are the same objects. utils: the module
    of Keras."""
    own = type(optimizer)
    needed = ("apply", "apply_gradients", "build")
    if isinstance(optimizer, WrappedOptimizer) or not all(
        callable(getattr(own, name, None)) for name in needed
    ):
        raise InvalidInput(f"DistributedOptimizer wraps an optimizer of Keras 3 once; got a {own.__name__}.")
    exchange = make_exchange()
    # The class keeps the name of the plain one, so that a saved optimizer is loaded as the plain one.
    members = {"__module__": own.__module__, "_make_exchange": staticmethod(make_exchange)}
    distributed = type(own.__name__, (exchange.kind, own), members)
    package, _, name = utils.get_registered_name(own).rpartition(">")
    if package:
        for kind in (distributed, own):  # the name stands for the class that was registered last
            utils.register_keras_serializable(package, name)(kind)
    result: Any = object.__new__(distributed)
    object.__setattr__(result, "__dict__", optimizer.__dict__)  # bypasses the __setattr__ of Keras
    vars(result)[_EXCHANGE] = exchange  # Keras does not track this attribute
    return result  # type: ignore[no-any-return]


def register_local_layers(distributed: Plain, layers: Any) -> Plain:
    """Return the wrapped optimizer, which does not exchange the gradients of these layers of Keras any more."""
    for variable in list_trainable_weights(layers):
        distributed.register_local_var(variable)  # type: ignore[attr-defined]
    return distributed

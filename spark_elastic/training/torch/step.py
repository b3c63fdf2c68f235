"""One optimizer step of the whole world: forward, backward, exchange, apply. See `training.trainer.ModelStep`.

With `loss_scope="step"` the ranks gather outputs, labels and weights in the order of the step's rows (R8, weighting;
R9, scope of P2). Each computes the same loss of all rows, and its gradient by its own outputs, which its backward
passes carry on to the weights (GradCache). The rank with the first row reports the loss. Main thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

from elastic_collectives import Group
from spark_elastic.data.transformation import list_output_parts
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.determinism import RowDropout, draw_rows, exchanges_statistics
from spark_elastic.gradients.devices import CPU, HostCopy, HostSum
from spark_elastic.gradients.exchange import GradientExchange
from spark_elastic.gradients.generators import (
    StepGenerators,
    borrow_rng,
    give_back_generators,
    seeded_rng,
)
from spark_elastic.gradients.modes import OneBucketMode
from spark_elastic.gradients.module_state import view_bytes
from spark_elastic.gradients.step_summary import StepDecision, StepSummary
from spark_elastic.runs.ledger import Ledger
from spark_elastic.training.batch import Chunk, gather_columns, join_chunks
from spark_elastic.training.spec import FitConfig
from spark_elastic.training.torch.buffers import BufferMerge, BufferSnapshot, has_buffers, shares_statistics
from spark_elastic.training.torch.loss import Batch, LossFn, autocast, to_float32
from spark_elastic.training.torch.metrics import Metrics
from spark_elastic.training.torch.state import TorchTrainingState
from spark_elastic.training.trainer import ModelStep, Summarize, WorkClock


class StepLoss:
    """A step: `add` for each chunk of this rank's rows, then `compute`, then `seek`, and `backward` for each chunk."""

    def __init__(self, loss_fn: LossFn) -> None:
        self._loss_fn = loss_fn
        self.begin()

    def begin(self) -> None:
        """Begin a step, also after one that was given up."""
        self._chunks: list[tuple[int, HostCopy]] = []
        self._output: Any = None  # of the newest chunk, detached
        self._outputs: list[tuple[Tensor, bool]] = []  # of all rows; see `Column`
        self.first = 0  # after `compute`: where the rows of this rank begin among those of the step
        self.compares, self.differs = False, False  # outputs with those that were gathered

    def add(self, output: Any, part: Batch) -> None:
        self._output = tree_map_only(Tensor, Tensor.detach, output)
        self._device = next((tensor.device for tensor in list_tensors(output)), CPU)
        labels, weights = part.on_host or (part.labels, part.weights)
        columns = [*list_tensors(self._output), *labels, *([] if weights is None else [weights])]
        self._is_weighted = weights is not None
        self._chunks.append((len(part), HostCopy([to_float32(column) for column in columns])))

    def compute(
        self,
        group: Group,
        batch: Batch,
        key: Sequence[int],
        metrics: Metrics,
        backward: Callable[[Tensor, int], None] | None = None,
        work: WorkClock | None = None,
    ) -> tuple[HostSum, float]:
        """The loss of all rows and its denominator, on the rank that reports them; else zeros. Collective.
        key: of random numbers, on all ranks alike. backward: of (sum of losses, divisor); None: no gradient is wanted.
        Raises InvalidInput: the outputs of the chunks do not make one output of all rows; on all ranks alike."""
        chunks = [Chunk(rows, [column.numpy() for column in copies.wait()]) for rows, copies in self._chunks]
        self._chunks, loss = [], HostSum()
        columns, self.first, reports = gather_columns(group, chunks, None if work is None else work.pause())
        if not chunks:
            return loss, 0.0
        count = len(list_tensors(self._output))
        # Copies: torch's memory begins at the same alignment on every rank.
        tensors = [(torch.from_numpy(values).clone(), by_row) for values, by_row in columns]
        self._outputs = [(each.to(self._device), by_row) for each, by_row in tensors[:count]]
        for each, _ in self._outputs:
            each.requires_grad_(backward is not None and (each.is_floating_point() or each.is_complex()))
        outputs = iter(self._outputs)
        output = tree_map_only(Tensor, lambda _: next(outputs)[0], self._output)
        whole = self._make_batch(batch, [each for each, _ in tensors[count:]])
        with seeded_rng(*key):
            result = self._loss_fn(lambda *_: output, whole)  # type: ignore[arg-type] # in place of the model
            if backward is not None:
                backward(result.total, batch.planned)
        if not reports:
            return loss, 0.0
        loss.add(result.total)
        metrics.add(result, whole.labels)
        return loss, result.denominator

    def _make_batch(self, own: Batch, given: list[Tensor]) -> Batch:
        """A batch of all rows with these labels and weights; its features, of which errors name types, are some."""
        rows, weights = len(given[0]), given.pop() if self._is_weighted else None
        return replace(
            own,
            row_ids=np.arange(rows),
            features=next((share.features for share in own.shares), own.features),
            labels=tuple(label.to(self._device) for label in given),
            weights=None if weights is None else weights.to(self._device),
            shares=(),
            on_host=None if self._device == CPU else (tuple(given), weights),
        )

    def seek(self, place: int) -> None:
        self._place = place

    def backward(self, output: Any, part: Batch) -> None:
        """The backward pass of a chunk. output: of the model, with its graph."""
        rows, pairs = slice(self._place, self._place + len(part)), []
        has_shared = self._place == 0 and len(part) > 0  # what all rows share has its gradient once
        for tensor, (whole, by_row) in zip(list_tensors(output), self._outputs, strict=True):
            if self.compares and by_row:
                own, gathered = (to_float32(each.detach()) for each in (tensor, whole[rows]))
                self.differs |= view_bytes(own)[0].tobytes() != view_bytes(gathered)[0].tobytes()
            if whole.grad is not None and tensor.requires_grad and (by_row or has_shared):
                gradient = whole.grad[rows] if by_row else whole.grad
                pairs.append((tensor, gradient.to(tensor.dtype)))
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))  # type: ignore[arg-type]
        self._place += len(part)


def list_tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if torch.is_tensor(leaf)]


def check_outputs(outputs: Sequence[tuple[int, Any]]) -> None:
    """outputs: of the model, each of so many rows. Raises InvalidInput: they do not make one output of all rows."""
    join_chunks([Chunk(n, [to_float32(each).numpy() for each in list_tensors(one)]) for n, one in outputs])


# ---- a loss of all rows of the step


class GradientScaling:
    """A `GradScaler` around the exchange if `precision` is fp16. Its scale is part of the state. All ranks see the same
    sums, so all leave out a step whose gradients overflowed. Raises InvalidInput: torch is older than 2.3."""

    def __init__(self, precision: str | None = None, device: torch.device = CPU) -> None:
        if precision == "fp16" and not hasattr(torch.amp, "GradScaler"):
            raise InvalidInput(
                f"precision='fp16' needs torch 2.3 or newer, and this is {torch.__version__}: update it, or set "
                "precision to 'bf16'."
            )
        self._device = device
        self._scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None
        self.skipped = 0  # steps since training began that were not applied

    def backward(self, total: Tensor, divisor: int) -> None:
        if self._scaler is not None:
            self._scaler.scale(total / divisor).backward()  # type: ignore[no-untyped-call]
        else:  # the gradient of the division, without a node in the graph
            total.backward(total.new_full((), 1.0 / divisor))  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients, once they are summed over all ranks."""
        if self._scaler is not None:
            self._scaler.scale(torch.zeros((), device=self._device))  # which a rank without rows lacks
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._scaler is None:
            take_step(optimizer)
            return
        before = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        if self._scaler.get_scale() < before:
            self.skipped += 1

    def state_dict(self) -> dict[str, Any]:
        scaler = {} if self._scaler is None else self._scaler.state_dict()
        return {"scaler": scaler, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped = state["skipped"]
        if self._scaler is not None and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])


# Of what torch wraps around the `step` of each of its optimizers, for hooks and profilers.
_AROUND_STEP = torch.optim.Optimizer.profile_hook_step(lambda *_: None).__code__


def is_plain_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step is torch's own, and nothing else is called with it."""
    step = type(optimizer).step
    is_own = type(optimizer).__module__.startswith("torch.optim.") and "step" not in vars(optimizer)
    if not is_own or getattr(step, "__code__", None) is not _AROUND_STEP:  # another library has replaced it
        return False
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return False
    return not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """As `step`, without what torch wraps around its own for hooks and profilers, which takes a small model longer than
    the step itself, where there are none of them."""
    if is_plain_optimizer(optimizer) and not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
    else:
        optimizer.step()


class TrainStep(ModelStep[Tensor]):
    _state: TorchTrainingState
    _metrics: Metrics

    def __init__(
        self,
        state: TorchTrainingState,
        loss_fn: LossFn,
        exchange: GradientExchange,
        config: FitConfig,
        ledger: Ledger,
        metrics: Metrics,
        scaling: GradientScaling,
    ) -> None:
        super().__init__(config, ledger)
        self._state, self._metrics = state, metrics
        self._loss_fn, self._exchange = loss_fn, exchange
        self._modules = tuple(state.model.modules())  # walking through them takes long
        self._exchanging = tuple(filter(exchanges_statistics, self._modules))
        self._has_row_dropout = any(isinstance(module, RowDropout) for module in self._modules)
        self._buffers = BufferMerge(state.model, state.merges)
        self._scaling = scaling
        # None: each part of the rows has a loss of its own.
        self._step_loss = StepLoss(loss_fn) if config.loss.loss_scope == "step" else None
        self._worked = 0.0
        self._before: BufferSnapshot | None = None  # the buffers before the newest step
        self._has_exchanged_buffers = False
        self.generators = StepGenerators()
        self.shows_buffers = False  # whether the user's code looks at the model after a step
        self.on_launched: Callable[[], None] = lambda: None  # while the device computes

    def _begin(self, rank: int) -> None:
        self._before = BufferSnapshot(self._state.model, self._modules, self._before)

    def _restore(self) -> None:
        assert self._before is not None
        self._before.restore()
        give_back_generators()

    def _exchange_sums(self, group: Group, batch: Batch, summarize: Summarize) -> StepSummary:
        assert self._before is not None
        loss, denominator = self._compute_gradients(group, batch, self._before)
        self._has_exchanged_buffers = self._exchange_buffers(group, batch, self._before)
        self._metrics.gather(group)
        mode = self._exchange.mode
        self._gather = mode.carry if isinstance(mode, OneBucketMode) else None
        found = {"layout": mode.layout.hash, "present": mode.present, "found_sparse": mode.found_sparse}
        return summarize(loss=loss, denominator=denominator, seconds=self._worked, **found)

    def _finalize(self, previous: Callable[[], None]) -> None:
        """Call the function while the model has the buffers before the step, not those that this rank's rows made."""
        if not self.shows_buffers:
            previous()
            return
        written = BufferSnapshot(self._state.model, self._modules)
        assert self._before is not None
        self._before.restore(attributes=False)
        previous()
        written.restore(attributes=False)

    def _compute_gradients(self, group: Group, batch: Batch, before: BufferSnapshot) -> tuple[float, float]:
        """Compute and exchange gradients. Returns this rank's part of the loss and of its denominator."""
        position = self._state.position
        # Statistics of the whole step's rows need one pass over all of them, on ranks without rows as well.
        one_pass = shares_statistics(self._exchanging)
        parts = [batch] if one_pass else list(batch.micro_batches(self._config.data.batch_size))
        self._loss_fn.begin(group, batch, position)
        self._exchange.clear_and_begin(group, len(parts))
        self._ledger.write_ahead(group.fence, position, batch.row_ids)  # buckets go out during backward
        if self._step_loss is None:  # each rank draws its own dropout (R9, scope of P2)
            with self.generators(*self.key, group.rank):
                loss, denominator = self._backward(parts)
        else:
            loss, denominator = self._backward_from_all(self._step_loss, group, batch, parts, before)
        self.on_launched()
        self._worked = self.work.take()
        self._exchange.finish()
        return loss.compute(), denominator

    # ---- a loss of all rows of the step

    def _backward_from_all(
        self, step_loss: StepLoss, group: Group, batch: Batch, parts: list[Batch], before: BufferSnapshot
    ) -> tuple[HostSum, float]:
        """Two graphs are never in memory together, so all parts but the newest take a second forward pass."""
        step_loss.begin()
        output = self._run_parts(parts, group.rank, step_loss.add)
        loss = step_loss.compute(group, batch, self.key, self._metrics, self._scaling.backward, self.work)
        if parts:
            step_loss.seek(step_loss.first + len(batch) - len(parts[-1]))
            step_loss.backward(output, parts[-1])
        if len(parts) > 1:
            after = BufferSnapshot(self._state.model, self._modules)
            before.restore()
            step_loss.seek(step_loss.first)
            self._run_parts(parts[:-1], group.rank, step_loss.backward)
            after.restore()
        return loss

    def _run_parts(self, parts: Sequence[Batch], number: int, use: Callable[[Any, Batch], None]) -> Any:
        """Give each part's output to `use`, always with the same random numbers. Returns the newest, with its graph."""
        output = None
        with borrow_rng() as seed:
            for index, part in enumerate(parts):
                seed(*self.key, number, index)
                self._draw_rows(part)
                output = None  # frees the graph of the part before
                with autocast(self._config.optimizer.precision):
                    output = self._state.model(*part.features)
                use(output, part)
        return output

    # ---- buffers

    def _exchange_buffers(self, group: Group, batch: Batch, before: BufferSnapshot) -> bool:
        """Exchange the buffers that the step wrote. Returns whether there is something to apply."""
        if group.size == 1 or not has_buffers(self._modules):
            return False
        self._buffers.begin()
        self._buffers.take(before, group.rank, len(batch) / batch.planned)

        def reduce(tensors: list[Tensor], op: str) -> Tensor:
            (tensor,) = tensors
            array = tensor.clone().numpy()
            group.allreduce(array, op=op)
            return torch.from_numpy(array)

        self._buffers.exchange(group, before, batch, self._try, reduce)
        return True

    def _try(self, model: torch.nn.Module, part: Batch) -> None:
        with seeded_rng(*self.key, 0):
            if self._has_row_dropout:
                draw_rows(model, part.row_ids, *self.key)
            if self._step_loss is None:
                self._loss_fn(model, part)
            else:  # which may fail on so few rows
                with autocast(self._config.optimizer.precision):
                    model(*part.features)

    def _apply_buffers(self) -> None:
        self._buffers.apply()

    def _backward(self, parts: Sequence[Batch]) -> tuple[HostSum, float]:
        """Accumulate the gradients of (sum of losses / planned rows). Returns that sum and its denominator."""
        loss, denominator = HostSum(), 0.0
        for part in parts:
            self._draw_rows(part)
            if not len(part):
                output = self._state.model(*part.features)  # its layers exchange statistics
                tensors = [out for out in list_output_parts(output) if isinstance(out, Tensor)]
                torch.autograd.backward([out.sum() for out in tensors if out.requires_grad])
                continue
            result = self._loss_fn(self._state.model, part)
            loss.add(result.total)
            self._metrics.add(result, part.labels)
            self._scaling.backward(result.total, part.planned)
            denominator += result.denominator
        return loss, denominator

    def _draw_rows(self, part: Batch) -> None:
        if self._has_row_dropout:
            draw_rows(self._state.model, part.row_ids, *self.key)

    def _apply(self, decision: StepDecision, planned: int) -> None:
        if self._has_exchanged_buffers:
            self._apply_buffers()
        divisor = decision.denominator or 1.0  # 0: a loss that the user wants summed
        if divisor != planned:
            self._exchange.scale(planned / divisor)
        self._exchange.drop_absent(decision.present)
        self._scaling.unscale(self._state.optimizer)
        _clip(self._exchange.parameters, self._config)
        self._scaling.step(self._state.optimizer)
        self._exchange.adopt_sparse_parameters(decision.found_sparse)


def _clip(parameters: Sequence[torch.nn.Parameter], config: FitConfig) -> None:
    if config.optimizer.gradient_clip_value is not None:
        torch.nn.utils.clip_grad_value_(parameters, config.optimizer.gradient_clip_value)
    if config.optimizer.gradient_clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(parameters, config.optimizer.gradient_clip_norm)

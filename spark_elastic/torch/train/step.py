"""One optimizer step of the whole world: forward, backward, exchange, trailer, apply (R1, R3, R6, R8).

`TrainStep.take` either applies the step or leaves everything as it was and raises; nothing interrupts its apply
section. It owns no data and no loop. Main thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from elastic_collectives import Group
from spark_elastic.ops.flat_allreduce import FlatBuffer
from spark_elastic.protocol.types import Position
from spark_elastic.torch.gradients.exchange import GradientExchange
from spark_elastic.torch.layers import RowDropout, SyncBatchNorm, draw_rows
from spark_elastic.torch.train.loss import LossFn
from spark_elastic.torch.train.metrics import Metrics
from spark_elastic.torch.train.precision import Scaling
from spark_elastic.torch.train.snapshot import ForwardSnapshot, has_buffers, seeded_rng
from spark_elastic.torch.train.state import TorchTrainingState
from spark_elastic.training.fit_config import FitConfig
from spark_elastic.training.ledger import Ledger
from spark_elastic.training.spec import LocalBatch
from spark_elastic.training.step_summary import StepDecision, StepSummary, exchange_summaries
from spark_elastic.training.trainer import defer_interrupts, describe_dependent_layers, output_parts

# Running statistics of a model (BatchNorm's and their like), averaged over the ranks by rows, so that replicas agree.
#
# Floating point buffers become the row-weighted mean, integer and boolean ones the maximum; buffers that nobody wrote
# to (masks, tables of positions, which may be larger than the gradients) stay where they are. The others travel after
# the gradients and before the trailer; nothing is written back before the step is applied.


class BufferExchange:
    """Buffers of one model: `send` in the exchange, `apply` in the apply section."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def send(self, group: Group, before: ForwardSnapshot, rows: int, planned: int) -> None:
        """before: the forward pass. rows: of this rank's share, out of `planned`; a rank without rows adds nothing."""
        named = [(name, b) for name, b in self._model.named_buffers() if not b.is_complex()]
        written = np.array([before.has_changed(name, b) for name, b in named], np.int64)
        if len(written):
            group.allreduce(written, op="max")  # all ranks send the same ones
        sent = [b for (_, b), flag in zip(named, written, strict=True) if flag]
        self._floats = [b for b in sent if b.is_floating_point()]
        self._integers = [b for b in sent if not b.is_floating_point()]
        # Zeros, not values times zero, which are NaN where a mask holds infinities.
        self._means = _copy_to_flat(self._floats, torch.float64, rows / planned if rows else None)
        self._means.allreduce(group)
        self._maxima = _copy_to_flat(self._integers, torch.int64)
        self._maxima.allreduce(group, "max")

    def apply(self) -> None:
        with torch.no_grad():
            for buffers, flat in ((self._floats, self._means), (self._integers, self._maxima)):
                for buffer, view in zip(buffers, flat.views, strict=True):
                    buffer.copy_(torch.from_numpy(view))


def _copy_to_flat(buffers: list[torch.Tensor], dtype: torch.dtype, factor: float | None = 1.0) -> FlatBuffer:
    """Copy buffers, times `factor`, to one flat buffer. factor: None stands for zeros."""
    arrays = [None if factor is None else buffer.detach().to(dtype).numpy() for buffer in buffers]
    name = str(dtype).removeprefix("torch.")
    flat = FlatBuffer([tuple(buffer.shape) for buffer in buffers], [name] * len(buffers))
    flat.fill([array if array is None or factor == 1.0 else array * factor for array in arrays])
    return flat


# Layers that make a step depend on how its rows are split over workers (R9). Pure looking at a module; no thread.


def describe_world_dependence(model: torch.nn.Module) -> str | None:
    """One sentence that names the layers, or None: then weights equal those of any other world, up to rounding."""
    return describe_dependent_layers((name or "the model", why) for name, why in _dependent(model))


def shares_statistics(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether forward passes of all ranks meet, so that each must make the same number of them, of all its rows."""
    return any(isinstance(module, SyncBatchNorm) and module.training for module in modules)


def _dependent(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        if not module.training:
            continue
        if isinstance(module, _BatchNorm) and not isinstance(module, torch.nn.SyncBatchNorm | SyncBatchNorm):
            yield name, f"{type(module).__name__}: statistics of each worker's own rows"
        elif _is_random(module):
            yield name, f"{type(module).__name__}: random in each worker"


def _is_random(module: torch.nn.Module) -> bool:
    if isinstance(module, torch.nn.RReLU):
        return True
    rate = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(rate, float | int) and rate > 0.0  # RNNs and attention hold a number, others a module


class TrainStep:
    """Takes steps on one state."""

    def __init__(
        self,
        state: TorchTrainingState,
        objective: LossFn,
        exchange: GradientExchange,
        config: FitConfig,
        ledger: Ledger,
        metrics: Metrics,
        scaling: Scaling,
    ) -> None:
        self._state = state
        self._objective = objective
        self._exchange = exchange
        # To walk a model each step costs as much as a small one's forward pass.
        self._modules = tuple(state.model.modules())
        self._draws_rows = any(isinstance(module, RowDropout) for module in self._modules)
        self._buffers = BufferExchange(state.model)
        self._config = config
        self._ledger = ledger
        self._metrics = metrics
        self._scaling = scaling

    def run(
        self,
        group: Group,
        share: LocalBatch[torch.Tensor],
        version: int,
        after: Callable[[StepDecision], Position],
        before_apply: Callable[[], None] = lambda: None,
        ends: bool = False,
    ) -> StepDecision:
        """One step. version: newest membership version heard of. before_apply: called once the exchange is complete, so
        that the step before is sealed. after: part of the apply section; accounts for the decision and returns the next
        position. ends: see `StepSummary`.

        Raises:
            CollectiveError: the exchange broke; the state is as before the step.
            FloatingPointError: the loss is no number, and `terminate_on_nan`; likewise.
        """
        state, here = self._state, self._state.position
        before = ForwardSnapshot(state.model, self._modules)
        try:
            loss, denominator = self._gradients(group, share)
            shared = group.size > 1 and has_buffers(self._modules)
            if shared:
                self._buffers.send(group, before, len(share), share.planned)
            self._metrics.gather(group)
            decision = exchange_summaries(group, self._trailer(share, version, loss, denominator, ends=ends))
            if self._config.terminate_on_nan:
                decision.check_finite(here)
        except BaseException:
            before.restore()
            self._metrics.discard()
            raise
        with defer_interrupts():
            before_apply()
            self._apply(decision, share.planned, shared)
            self._metrics.commit()
            self._exchange.apply_agreement(decision.found_sparse)
            state.position = after(decision)
            self._ledger.record_applied(group.fence, here, group.size)
        return decision

    def _gradients(self, group: Group, share: LocalBatch[torch.Tensor]) -> tuple[float, float]:
        """Exchanged with all ranks; this rank's loss and its denominator."""
        here = self._state.position
        # Statistics of the whole step's rows need all of them in one pass, on ranks without rows as well.
        meets = shares_statistics(self._modules)
        parts = [share] if meets else list(share.micro_batches(self._config.batch_size))
        self._objective.begin(group, share, here)
        self._exchange.begin(group, len(parts))
        self._ledger.write_ahead(group.fence, here, share.row_ids)  # buckets go out during backward
        # Dropout of each rank its own (R9), while what an optimizer draws is the same on all.
        with seeded_rng(self._config.seed, here.epoch, here.phase, here.step, group.rank):
            loss, denominator = self._backward(parts)
        self._exchange.finish()
        return loss, denominator

    def _trailer(
        self, share: LocalBatch[torch.Tensor], version: int, loss: float, denominator: float, *, ends: bool
    ) -> StepSummary:
        return StepSummary(
            self._state.position,
            version,
            self._exchange.layout_hash,
            rows=len(share),
            loss=loss,
            denominator=denominator,
            present=self._exchange.present,
            found_sparse=self._exchange.found_sparse,
            ends=ends,
        )

    def _backward(self, parts: Sequence[LocalBatch[torch.Tensor]]) -> tuple[float, float]:
        """Accumulate the gradients of (sum of losses / planned rows); returns that sum and its denominator."""
        loss, denominator = 0.0, 0.0
        here = self._state.position
        for part in parts:
            if self._draws_rows:
                draw_rows(
                    self._state.model, part.row_ids, self._config.seed, here.epoch, here.phase, here.step
                )
            if not len(part):
                output = self._state.model(*part.features)  # its layers meet those of the other ranks
                tensors = [out for out in output_parts(output) if isinstance(out, torch.Tensor)]
                torch.autograd.backward([out.sum() for out in tensors if out.requires_grad])
                continue
            scored = self._objective(self._state.model, part)
            self._scaling.backward(scored.total, part.planned)
            self._metrics.add(scored, part.labels)
            loss += float(scored.total.detach())
            denominator += scored.denominator
        return loss, denominator

    def _apply(self, decision: StepDecision, planned: int, shared: bool) -> None:
        divisor = decision.denominator or 1.0  # 0: a loss that the user wants summed
        if divisor != planned:
            self._exchange.scale(planned / divisor)
        self._exchange.drop_absent(decision.present)
        if shared:
            self._buffers.apply()
        self._scaling.unscale(self._state.optimizer)
        _clip(self._exchange.parameters, self._config)
        self._scaling.step(self._state.optimizer)


def _clip(parameters: Sequence[torch.nn.Parameter], config: FitConfig) -> None:
    if config.gradient_clip_value is not None:
        torch.nn.utils.clip_grad_value_(parameters, config.gradient_clip_value)
    if config.gradient_clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(parameters, config.gradient_clip_norm)

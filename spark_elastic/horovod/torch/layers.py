"""`SyncBatchNorm`, which makes a step independent of how its rows are split over workers.

The training thread owns everything here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.exchange import disable_compile
from spark_elastic.gradients.process_sets import ALL, ProcessSet
from spark_elastic.gradients.reduction import Sum
from spark_elastic.horovod.torch.operations import allgather, allreduce


class SyncBatchNorm(_BatchNorm):
    """As torch.nn.BatchNorm1d, 2d or 3d, with the statistics of all ranks' rows while it trains, on CPU or GPU.

    All ranks must take part in each forward and backward pass. Each step has two exchanges: (rows, mean, squared
    deviation) of each rank forward, two sums per channel backward. Ranks may have different numbers of rows, or none;
    moments are combined in float64, in rank order (Chan, Golub and LeVeque), so that every rank has the bits that one
    process with the whole batch would have.

    Args:
        process_set: the ranks that share statistics.
    """

    exchanges_statistics = True

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = ALL,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.size(1) != self.num_features:
            raise InvalidInput(
                f"SyncBatchNorm of {self.num_features} features takes (rows, features, ...); got {tuple(input.shape)}."
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        if not self.training or self.process_set.size() == 1:
            return super().forward(input)
        weight = self.weight if self.affine else None
        bias = self.bias if self.affine else None
        result, mean, variance, rows = _normalise(input, weight, bias, self.eps, self.process_set)  # type: ignore[no-untyped-call]
        if self.running_mean is not None:
            self._track(mean, variance * (rows / max(rows - 1.0, 1.0)))
        return result  # type: ignore[no-any-return]

    def _track(self, mean: torch.Tensor, unbiased: torch.Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.to(self.running_mean), share)
            self.running_var.lerp_(unbiased.to(self.running_var), share)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        process_set: ProcessSet,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        rows, mean, variance = _moments(x, process_set)
        scale = (variance + eps).rsqrt()
        ctx.process_set, ctx.rows = process_set, rows
        ctx.of_bias = None if bias is None else bias.dtype
        computes_in = torch.float32 if x.element_size() < 4 else x.dtype
        normal = ((x.double() - _spread(mean, x)) * _spread(scale, x)).to(computes_in)
        ctx.save_for_backward(normal, scale, weight)
        result = normal if weight is None else normal * _spread(weight, x)
        result = result if bias is None else result + _spread(bias, x)
        ctx.mark_non_differentiable(mean, variance)
        return result.to(x.dtype), mean, variance, rows

    @staticmethod
    @once_differentiable  # what forward saved has no graph behind it
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        normal, scale, weight = ctx.saved_tensors
        gradient = gradients[0]
        wide = gradient.to(normal.dtype)
        over = [0, *range(2, gradient.dim())]
        mine = torch.stack([wide.double().sum(over), (wide * normal).double().sum(over)])
        of_x = None
        if ctx.needs_input_grad[0]:
            summed = allreduce(mine, op=Sum, process_set=ctx.process_set) / max(ctx.rows, 1.0)
            centred = wide.double() - _spread(summed[0], wide) - normal.double() * _spread(summed[1], wide)
            factor = scale if weight is None else scale * weight.double()
            of_x = (centred * _spread(factor, wide)).to(gradient.dtype)
        of_weight = mine[1].to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        of_bias = mine[0].to(ctx.of_bias) if ctx.needs_input_grad[2] else None
        return of_x, of_weight, of_bias, None, None


_normalise = disable_compile(_Normalise.apply)


def _moments(x: torch.Tensor, process_set: ProcessSet) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Return (values per channel, mean, biased variance) of all ranks' inputs, in float64."""
    over = [0, *range(2, x.dim())]
    wide = x.detach().double()
    count = float(x.numel() // x.size(1))
    mean = wide.mean(over) if count else wide.new_zeros(x.size(1))
    spread = (wide - _spread(mean, x)).square().sum(over)
    mine = torch.cat([wide.new_tensor([count]), mean, spread])
    parts = allgather(mine[None], process_set=process_set)
    counts, means, spreads = parts[:, :1], parts[:, 1 : 1 + x.size(1)], parts[:, 1 + x.size(1) :]
    total = float(counts.sum())
    if total == 0:
        return 0.0, mean, spread
    whole = (counts * means).sum(0) / total
    squares = spreads.sum(0) + (counts * (means - whole).square()).sum(0)
    return total, whole, squares / total


def _spread(of_channels: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Reshape one number per channel to broadcast over (rows, channels, ...)."""
    return of_channels.view(1, -1, *[1] * (x.dim() - 2))

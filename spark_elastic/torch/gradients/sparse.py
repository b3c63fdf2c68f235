"""Sparse gradients (of embeddings with sparse=True) summed over the ranks: indices and values are gathered.

Sums are made of all ranks' values in rank order, alike on all of them. Engine's thread; owns nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput


def checked(name: str, gradient: torch.Tensor) -> torch.Tensor:
    """`gradient` with its rows listed once.

    Raises:
        InvalidInput: more than its first dimension is sparse.
    """
    if not gradient.is_sparse:
        return gradient.detach().to_sparse(1)
    if gradient.sparse_dim() != 1:
        raise InvalidInput(
            f"the gradient of parameter {name!r} is sparse in {gradient.sparse_dim()} dimensions: only whole rows may "
            "be missing; pass sparse_as_dense=True."
        )
    return gradient.detach().coalesce()


def summed(group: Group, own: torch.Tensor, factor: float) -> torch.Tensor:
    """The sum of all ranks' gradients, times `factor`; the rows that any of them has, each once."""
    rows = np.concatenate(group.allgatherv(own.indices()[0].cpu().numpy()))
    values = np.concatenate(group.allgatherv(_array(own.values())))
    flat = torch.from_numpy(values)
    flat = flat.view(torch.bfloat16) if own.dtype == torch.bfloat16 else flat
    scaled = flat if factor == 1.0 else flat * factor
    listed = torch.sparse_coo_tensor(torch.from_numpy(rows)[None], scaled, own.shape, check_invariants=False)
    return listed.coalesce().to(own.device)


def _array(values: torch.Tensor) -> npt.NDArray[Any]:
    dense = values.cpu().contiguous()
    return (dense.view(torch.uint16) if dense.dtype == torch.bfloat16 else dense).numpy()

"""Whether all ranks train the same parameters on the same terms, and what the first difference is.

Before any gradient travels (R7). Runs in the engine's thread; knows no tensors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from elastic_collectives import Group, MismatchError
from spark_elastic.torch.gradients.buckets import Spec
from spark_elastic.torch.gradients.terms import Terms


def agree(group: Group, layout: int, specs: Sequence[Spec], terms: Terms) -> None:
    """A collective of all ranks. layout: a hash of everything that must be equal.

    Raises:
        MismatchError: it is not, on every rank alike.
    """
    hashes = group.allgather(np.array(layout, np.uint64)).tolist()
    off = [rank for rank, cut in enumerate(hashes) if cut != hashes[0]]
    if off:
        own = json.dumps(described(specs, terms)).encode()
        texts = [json.loads(text) for text in group.allgather_bytes(own)]
        raise MismatchError(
            off,
            f"ranks {off} do not exchange the same gradients as rank 0: "
            + first_difference(texts[0], texts[off[0]], off[0]),
        )


def described(specs: Sequence[Spec], terms: Terms) -> list[str]:
    """The terms, and each parameter in the order of the optimizer."""
    own = f"gradients are {terms.spoken}, in {len(terms.groups)} groups"
    return [own, *(f"{spec.name!r} is {spec.dtype} of shape {spec.shape}" for spec in specs)]


def first_difference(first: Sequence[str], other: Sequence[str], rank: int) -> str:
    """One sentence, of what rank 0 and that rank said of themselves."""
    for number, (a, b) in enumerate(zip_longest(first, other, fillvalue="no more")):
        if a != b:
            what = (
                f"of {max(len(first), len(other)) - 1} parameters, the first that differs, number {number}: "
            )
            return f"{what if number else ''}on rank 0, {a}; on rank {rank}, {b}."
    return "their buckets are cut differently: set SPARK_ELASTIC_BUCKET_BYTES and groups alike."

"""Copies of frozen parameters, each made once per process and shared by all snapshots: `FrozenCopies`.

A snapshot that travels names them by content, and a process that has made the same ones takes its own. Training thread
only.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

import numpy as np
import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.runs.snapshot import Bytes, Kept

_SAMPLES = 16  # elements of a frozen parameter that are compared before each commit


class FrozenCopies:
    """The copies, until their parameters change.

    A possible change is seen by the parameter's version and memory, and, since writing through `.data` leaves no such
    trace, by some of its elements. A parameter that has changed once, as that of a moving average, is copied each time.
    """

    def __init__(self) -> None:
        # By the parameter's id: itself, its memory and version, elements of it, and the copy.
        self._kept: dict[int, tuple[torch.Tensor, tuple[int, int], torch.Tensor, Kept]] = {}
        self._moving: set[int] = set()
        # Whether nothing was trained yet: what is frozen then, the program makes in each process.
        self._is_first = True

    def take(self, frozen: Mapping[str, torch.Tensor]) -> dict[int, Kept]:
        """The copies of these parameters, by id; without those that change."""
        held = {name: p for name, p in frozen.items() if id(p) not in self._moving and p.numel()}
        former, self._kept = self._kept, {}
        for (name, tensor), sample in zip(held.items(), _sample(held.values()), strict=True):
            place, known = (tensor.data_ptr(), tensor._version), former.get(id(tensor))
            if known is None or known[0] is not tensor:
                known = tensor, place, sample, _copy(name, tensor, self._is_first)
            elif known[1] != place or not torch.equal(known[2], sample):
                if _make_key(name, view_bytes(tensor)[0]) != known[3].key:
                    self._moving.add(id(tensor))
                    continue
                known = tensor, place, sample, known[3]  # it has gone to another device
            self._kept[id(tensor)] = known
        self._is_first = False
        return {key: known[3] for key, known in self._kept.items()}

    def list_copies(self) -> dict[tuple[str, int, int], Kept]:
        """The copies by what they contain."""
        return {kept.key: kept for *_, kept in self._kept.values()}

    def holds(self, tensor: torch.Tensor, kept: Kept) -> bool:
        """Whether the parameter still has that content."""
        known = self._kept.get(id(tensor))
        if known is None or known[3].key != kept.key or known[1] != (tensor.data_ptr(), tensor._version):
            return False
        (sample,) = _sample([tensor])
        return torch.equal(known[2], sample)

    def put(self, tensor: torch.Tensor, kept: Kept) -> None:
        """The parameter has got that content."""
        (sample,) = _sample([tensor])
        self._kept[id(tensor)] = tensor, (tensor.data_ptr(), tensor._version), sample, kept


def _copy(name: str, tensor: torch.Tensor, is_made: bool) -> Kept:
    memory, shared = view_bytes(tensor)
    return Kept(_make_key(name, memory), memory.copy() if shared else memory, is_made)


def _make_key(name: str, memory: Bytes) -> tuple[str, int, int]:
    return name, memory.nbytes, zlib.crc32(memory.data)


def _sample(tensors: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    """The bits of some elements of each."""
    taken = [
        each.detach().as_strided((min(each.numel(), _SAMPLES),), (max(each.numel() // _SAMPLES, 1),)).double()
        for each in tensors
    ]
    if not taken:
        return ()
    sizes = [len(each) for each in taken]
    return torch.split(torch.cat(taken).cpu().view(torch.int64), sizes)


def view_bytes(tensor: torch.Tensor) -> tuple[Bytes, bool]:
    """Return (its bytes, whether they are the tensor's own memory and not a copy)."""
    if hasattr(tensor, "to_local"):  # a DTensor
        raise InvalidInput(
            "a DTensor has a part of its values on each worker, and TorchState holds whole models: divide the model by "
            "fully_shard and use FSDPState."
        )
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    if not dense.numel():
        return np.empty(0, np.uint8), False
    return dense.view(torch.uint8).numpy(), dense.data_ptr() == tensor.data_ptr()

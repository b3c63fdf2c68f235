"""What a forward pass changes besides gradients: module buffers and random generators.

An aborted step puts buffers back (R3, aborted forward). What an applied step wrote becomes what one process would have:
each of `MERGES` is tried on some rows of the first step that writes the buffer. All ranks choose alike, as part of the
state. Main thread only.
"""

from __future__ import annotations

import copy
import json
import logging
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from elastic_collectives import CollectiveError, Group
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.determinism import exchanges_statistics
from spark_elastic.gradients.devices import CPU
from spark_elastic.gradients.generators import (
    get_device_rng_state,
    get_torch_rng_state,
    give_back_generators,
    set_device_rng_state,
)
from spark_elastic.gradients.module_state import PLAIN, list_buffers, put_buffer
from spark_elastic.training.batch import LocalBatch, pack_arrays, unpack_arrays
from spark_elastic.training.trainer import describe_dependent_layers


def rng_state() -> dict[str, Any]:
    """The states of the process's generators. Their words are arrays: one by one they would cost more than a step."""
    give_back_generators()
    state: Any = np.random.get_state()
    kind, words, *rest = state
    version, numbers, *others = random.getstate()
    return {
        "torch": get_torch_rng_state(),
        "numpy": (kind, words.astype(np.int64), *rest),
        "python": (version, np.array(numbers, np.int64), *others),
        "device": get_device_rng_state(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Set what `rng_state` returned; also from a checkpoint that has the words one by one."""
    give_back_generators()
    torch.set_rng_state(state["torch"])
    kind, words, *rest = state["numpy"]
    np.random.set_state((kind, np.array(words, np.uint32), *rest))
    version, numbers, *others = state["python"]
    random.setstate((version, tuple(np.array(numbers).tolist()), *others))
    set_device_rng_state(state["device"])


def has_buffers(modules: Iterable[Module]) -> bool:
    """Whether any of them has a buffer of its own now; a forward pass may add some."""
    return any(map(attrgetter("_buffers"), modules))


Attributes = list[dict[str, Any]]  # by module


def copy_attributes(modules: Iterable[Module]) -> Attributes:
    return [module.__dict__.copy() for module in modules]


def restore_attributes(modules: Iterable[Module], saved: Attributes) -> None:
    """Put back attributes of plain types that a forward pass has set."""
    for module, before in zip(modules, saved, strict=False):  # modules that were added come last
        now = vars(module)
        for name in [name for name, value in now.items() if type(value) in PLAIN and name not in before]:
            del now[name]
        now.update({name: value for name, value in before.items() if type(value) in PLAIN})


class BufferSnapshot:
    """What a forward pass may write to, buffers and plain attributes, as it was at the beginning of a step."""

    def __init__(
        self, model: Module, modules: Iterable[Module], former: BufferSnapshot | None = None
    ) -> None:
        """modules: all of the model; finding them takes long. former: one whose memory is used again."""
        self._model, modules = model, tuple(modules)
        self._attributes = copy_attributes(modules)
        self._unset: dict[str, bool] = {}
        self._saved: dict[str, bool] = {}
        self._buffers: dict[str, tuple[Tensor, Tensor]] = {}  # by name, with what it held
        if not has_buffers(modules):
            return
        found = list_buffers(model)
        named = {name: each.tensor for name, each in found.items() if each.tensor is not None}
        self._unset = {name: each.is_saved for name, each in found.items() if each.tensor is None}
        self._saved = {name: each.is_saved for name, each in found.items()}
        if former is not None and former._holds(named):
            self._buffers = former._buffers
        with torch.no_grad():
            if self._buffers:
                torch._foreach_copy_([saved for _, saved in self._buffers.values()], list(named.values()))
            else:
                self._buffers = {name: (buffer, buffer.clone()) for name, buffer in named.items()}

    def _holds(self, named: Mapping[str, Tensor]) -> bool:
        if named.keys() != self._buffers.keys():
            return False
        pairs = [(buffer, *self._buffers[name]) for name, buffer in named.items()]
        return all(now is buffer and held.shape == now.shape for now, buffer, held in pairs)

    def get(self, name: str) -> Tensor | None:
        return self._buffers[name][1] if name in self._buffers else None

    def find_changed(self, named: Iterable[tuple[str, Tensor]]) -> list[bool]:
        """Whether each buffer's values changed since; torch's version counters miss what BatchNorm writes."""
        flags: list[bool] = []
        computed: dict[int, Tensor] = {}  # by index: a flag () on the device
        for index, (name, buffer) in enumerate(named):
            flags.append(name not in self._buffers)
            if not flags[index]:
                before = self._buffers[name][1]
                if buffer.device == CPU or buffer.shape != before.shape:
                    flags[index] = not torch.equal(before, buffer)
                else:
                    computed[index] = (before != buffer).any()
        if computed:
            for index, flag in zip(computed, torch.stack(list(computed.values())).tolist(), strict=True):
                flags[index] = flag
        return flags

    def restore(self, model: Module | None = None, *, attributes: bool = True) -> None:
        """Put back what was there, in the model or in a copy of it, which gets buffers of its own."""
        target = self._model if model is None else model
        with torch.no_grad():
            for name, each in list_buffers(target).items():
                if name not in self._saved:
                    delattr(each.owner, each.name)
            for name, is_saved in self._unset.items():
                put_buffer(target, name, None, is_saved=is_saved)
            for name, (buffer, saved) in self._buffers.items():
                in_place = model is None and buffer.shape == saved.shape
                put_buffer(target, name, buffer if in_place else saved.clone(), is_saved=self._saved[name])
                if in_place:
                    buffer.copy_(saved)
        if attributes:
            restore_attributes(target.modules(), self._attributes)


def describe_world_dependence(model: Module) -> str | None:
    """A sentence on the layers that make a step depend on how its rows are split (R9, scope of P2), or None."""
    return describe_dependent_layers((name or "the model", why) for name, why in _dependent_layers(model))


def shares_statistics(modules: Iterable[Module]) -> bool:
    """Whether forward passes exchange statistics: each rank must make exactly one, of all its rows."""
    return any(exchanges_statistics(module) and module.training for module in modules)


def _dependent_layers(model: Module) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        if not module.training:
            continue
        synced = isinstance(module, torch.nn.SyncBatchNorm) or exchanges_statistics(module)
        if isinstance(module, _BatchNorm) and not synced:
            yield name, f"{type(module).__name__}: statistics of each worker's own rows"
        elif is_random(module):
            yield name, f"{type(module).__name__}: random in each worker"


def depends_on_batch(module: Module) -> bool:
    """Whether a layer of torch draws random numbers, or takes statistics of all rows, while it is in training mode."""
    return isinstance(module, _BatchNorm) or is_random(module)


def is_random(module: Module) -> bool:
    if isinstance(module, torch.nn.RReLU):
        return True
    rate = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(rate, float | int) and rate > 0.0  # RNNs and attention hold a number, others a module


log = logging.getLogger("spark_elastic")

T = TypeVar("T")
Batch = LocalBatch[Tensor]
Reduce = Callable[[list[Tensor], str], Tensor]
Forward = Callable[[Module, Batch], object]

# How the values of several parts of a step's rows become one, the first that is right:
# the mean weighted by rows; of each element the value of the last part that changed it; the sum of the changes; the
# maximum; the minimum. APPROXIMATE is the mean, where it is not what all rows give. EQUAL: user code has exchanged it.
MERGES = ("mean", "overwrite", "sum", "max", "min")
EQUAL, APPROXIMATE = "equal", "approximate"
_ROWS = 8  # of each of the two parts on which they are tried; with repetitions where a rank has fewer


def merge(kind: str, before: Tensor, parts: Sequence[tuple[int, Tensor, float]], reduce: Reduce) -> Tensor:
    """The merged values. parts: of this process: (number, values, part of the step's rows) each.
    reduce: the "sum" or "max" over all parts of all processes, of one tensor for each part of this one."""
    if kind in ("mean", APPROXIMATE):  # zeros: a mask's infinity times zero is NaN
        return reduce([own * factor if factor else torch.zeros_like(own) for _, own, factor in parts], "sum")
    if kind == "max":
        return reduce([own for _, own, _ in parts], "max")
    if kind == "min":
        return -reduce([-own for _, own, _ in parts], "max")
    if kind == "sum":
        return before + reduce([torch.where(own == before, 0, own - before) for _, own, _ in parts], "sum")
    if kind == "overwrite":
        claims = [torch.where(own == before, 0, number + 1) for number, own, _ in parts]
        last = reduce(claims, "max")
        mine = [torch.where(last == number + 1, own, 0) for number, own, _ in parts]
        return torch.where(last == 0, before, reduce(mine, "sum"))
    return parts[0][1]  # EQUAL


def widen(tensor: Tensor) -> Tensor:
    """A flat copy in float64 or int64, in which ranks exchange values."""
    real = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    return real.to(torch.float64 if real.is_floating_point() else torch.int64).reshape(-1)


def narrow(flat: Tensor, like: Tensor) -> Tensor:
    """What `widen` made of a tensor, with the shape and the dtype of that one."""
    if like.is_complex():
        return torch.view_as_complex(flat.view(*like.shape, 2)).to(like.dtype)
    return flat.view(like.shape).to(like.dtype)


def _reduce_here(tensors: list[Tensor], op: str) -> Tensor:
    stacked = torch.stack(tensors)
    return stacked.sum(0) if op == "sum" else stacked.amax(0)


class BufferMerge:
    """The buffers that the steps of a model wrote: for each step `take` for each part of this process, then `exchange`,
    then `apply` in the apply section. Buffers that nothing wrote to (masks, tables of positions, which may be larger
    than the gradients) do not travel."""

    def __init__(self, model: Module, merges: dict[str, str]) -> None:
        """merges: of the state, by name; those that are learned are added."""
        self._model, self._merges = model, merges
        self.begin()

    def begin(self) -> None:
        self._parts: list[tuple[int, float, dict[str, Tensor]]] = []  # (number, factor, buffers)
        self._saved: dict[str, bool] = {}  # by name: whether `state_dict` has it
        self._results: dict[str, Tensor] = {}

    def take(self, before: BufferSnapshot, number: int, factor: float, *, keep: bool = False) -> None:
        """Take what the newest part wrote: number and factor are its place among the step's rows and its share of them.
        keep: copy the values, since the next part writes to the same memory."""
        buffers = list_buffers(self._model)
        live = {name: each.tensor for name, each in sorted(buffers.items()) if each.tensor is not None}
        changed = before.find_changed(live.items())
        pairs = zip(live.items(), changed, strict=True)
        written = {name: each.clone() if keep else each for (name, each), flag in pairs if flag}
        self._saved.update((name, buffers[name].is_saved) for name in written)
        self._parts.append((number, factor, written))

    def exchange(
        self, group: Group, before: BufferSnapshot, batch: Batch, run: Forward, reduce: Reduce
    ) -> None:
        """Bring the parts of all ranks together; collective. run: makes a forward pass of a copy of the model.
        Raises InvalidInput: a buffer cannot be brought together; on all ranks alike."""
        layouts = [
            {name: [list(each.shape), str(each.dtype), self._saved[name]] for name, each in written.items()}
            for _, _, written in self._parts
        ]
        distinct = [layout for number, layout in enumerate(layouts) if layout not in layouts[:number]]
        digests = group.allgather(np.array([zlib.crc32(json.dumps(distinct).encode())], np.int64))
        self._results = {}
        if len(distinct) > 1 or len(set(digests.ravel().tolist())) > 1:
            layouts = _gather(group, layouts)
            self._results = _settle_shapes(group, layouts, [written for *_, written in self._parts])
            for layout in layouts:
                self._saved.update((name, bool(saved)) for name, (_, _, saved) in layout.items())
        names = sorted({name for layout in layouts for name in layout if name not in self._results})
        if not names:
            return
        live = list_buffers(self._model)
        for name in names:
            if name in live and isinstance(live[name].owner, _NormBase):
                self._merges.setdefault(name, "mean" if _is_real(self._find(name, before)) else "max")
        unknown = [name for name in names if name not in self._merges]
        if unknown:
            self._merges.update(self._learn(group, unknown, before, batch, run))
        kinds: dict[tuple[str, bool], list[str]] = {}
        for name in names:
            kinds.setdefault((self._merges[name], _is_real(self._find(name, before))), []).append(name)
        for (kind, _), members in sorted(kinds.items()):
            self._merge(kind, members, before, reduce)

    def apply(self) -> None:
        with torch.no_grad():
            live = list_buffers(self._model)
            for name, result in self._results.items():
                current = live[name].tensor if name in live else None
                if current is None or current.shape != result.shape or 0 in current.stride():
                    put_buffer(self._model, name, result, is_saved=self._saved[name])
                else:
                    current.copy_(result)

    def _find(self, name: str, before: BufferSnapshot) -> Tensor:
        """The values of a buffer that some part has written; before the step where none of this process has."""
        found = next((written[name] for *_, written in self._parts if name in written), None)
        return before.get(name) if found is None else found  # type: ignore[return-value]

    def _merge(self, kind: str, names: list[str], before: BufferSnapshot, reduce: Reduce) -> None:
        likes = [self._find(name, before) for name in names]
        olds = [_get_before(before, name, like) for name, like in zip(names, likes, strict=True)]
        flat = _join(olds)
        pairs = list(zip(names, olds, strict=True))
        parts = [
            (number, _join([written.get(name, old) for name, old in pairs]), factor)
            for number, factor, written in self._parts
        ]
        merged = merge(kind, flat, parts, reduce).to(likes[0].device)
        sizes = [like.numel() * (2 if like.is_complex() else 1) for like in likes]
        for name, like, part in zip(names, likes, torch.split(merged, sizes), strict=True):
            self._results[name] = narrow(part, like)

    # ---- what a buffer is

    def _learn(
        self, group: Group, names: list[str], before: BufferSnapshot, batch: Batch, run: Forward
    ) -> dict[str, str]:
        mine: dict[str, list[int]] = {name: [] for name in names}
        for name, tensor in ((n, written[n]) for *_, written in self._parts for n in names if n in written):
            mine[name].append(zlib.crc32(widen(tensor).cpu().numpy().data))
        found = {}
        if len(batch):
            try:
                found = try_merges(self._model, names, before, batch, run)
            except CollectiveError:
                raise
            except Exception as error:  # of the user's code; or a model that has trained cannot be copied
                log.debug("how to merge the buffers %s was not tried: %r", names, error)
                found = {name: [APPROXIMATE] for name in names}
        # All ways are right for one row, but forward may exchange something, so such a rank has tried them as well.
        everywhere: list[list[dict[str, Any]]] = _gather(group, [[mine, found if len(batch) > 1 else {}]])
        chosen = {}
        for name in names:
            held = [ranks[name] for _, ranks in everywhere if name in ranks]
            fits = [kind for kind in (*MERGES, EQUAL, APPROXIMATE) if all(kind in each for each in held)]
            if not held:
                fits = [APPROXIMATE]
            if len({digest for digests, _ in everywhere for digest in digests[name]}) > 1:
                fits = [kind for kind in fits if kind != EQUAL]
            if not fits:
                raise InvalidInput(
                    f"buffer {name!r} of the model depends on all rows of a step in a way that several workers cannot "
                    "bring together (as a queue of rows does): exchange the rows in forward by "
                    "spark_elastic.torch.allgather, so that all workers write the same, or set max_workers=1."
                )
            chosen[name] = fits[0]
        averaged = [name for name, kind in chosen.items() if kind == APPROXIMATE]
        if averaged and group.rank == 0:
            log.warning(
                "the workers' values of the buffer %s are averaged by rows after each step, which is right for "
                "statistics of the rows; they depend on the number of workers.",
                ", ".join(map(repr, averaged)),
            )
        return chosen


def try_merges(
    model: Module, names: Sequence[str], before: BufferSnapshot, batch: Batch, run: Forward
) -> dict[str, list[str]]:
    """Which kinds of `MERGES` make of two parts of these rows what a forward pass of both makes, by buffer.
    APPROXIMATE: the mean, if order and number of rows do not matter. EQUAL: none fits, and contents matter."""
    half = len(batch) // 2
    first, second = np.resize(np.arange(half), _ROWS), np.resize(np.arange(half, len(batch)), _ROWS)
    both = np.concatenate([first, second])
    orders = first, second, both, [*second, *first], [*first, *first]
    after = [_run_copy(model, before, _pick(batch, np.array(order)), run) for order in orders]
    found = {}
    for name in names:
        x, y, whole, turned, twice = (buffers.get(name) for buffers in after)
        kinds: list[str] = []
        if whole is None:
            found[name] = [*MERGES, EQUAL, APPROXIMATE]  # these rows do not write it
            continue
        old = _get_before(before, name, whole)
        if x is not None and y is not None and x.shape == y.shape == whole.shape:
            wide, w, parts = widen(old), widen(whole), [(0, widen(x), 0.5), (1, widen(y), 0.5)]
            real = w.is_floating_point()
            for kind in MERGES:
                if kind == "mean" and not real:
                    continue
                if _are_close(merge(kind, wide, parts, _reduce_here), w, wide, whole.dtype):
                    kinds.append(kind)
            if real and turned is not None and twice is not None and twice.shape == x.shape:
                same_order = _are_close(widen(turned), w, wide, whole.dtype)
                moved = float((widen(x) - wide).norm())
                if same_order and float((widen(twice) - widen(x)).norm()) <= 0.25 * moved:
                    kinds.append(APPROXIMATE)
        if x is None or y is None or x.shape != y.shape or not torch.equal(x, y):
            kinds.append(EQUAL)
        found[name] = kinds
    return found


def _are_close(found: Tensor, wanted: Tensor, old: Tensor, dtype: torch.dtype) -> bool:
    """Whether they differ by rounding alone, which in 16 bits and in sums of another order is a part of the change."""
    if not wanted.is_floating_point():
        return torch.equal(found, wanted)
    finite = torch.isfinite(wanted)
    if not torch.equal(torch.nan_to_num(found[~finite]), torch.nan_to_num(wanted[~finite])):
        return False
    found, wanted, old = found[finite], wanted[finite], old[finite]
    if not wanted.numel():
        return True
    change = torch.where(torch.isfinite(old), wanted - old, wanted).abs().max()
    allowed = 0.02 * change + 8 * torch.finfo(dtype).eps * wanted.abs().max()
    return bool(((found - wanted).abs() <= allowed).all())


def _run_copy(model: Module, before: BufferSnapshot, batch: Batch, run: Forward) -> dict[str, Tensor | None]:
    """The buffers after a pass of a copy, which shares what is trained: what forward may change is frozen."""
    copied = copy.deepcopy(model, {id(p): p for p in model.parameters() if p.requires_grad})
    before.restore(copied)
    for part in copied.modules():
        if isinstance(part, _NormBase) or is_random(part):
            part.eval()
    with torch.no_grad():
        run(copied, batch)
    return {name: each.tensor for name, each in list_buffers(copied).items()}


def _pick(batch: Batch, rows: Any) -> Batch:
    def pick(side: Any) -> Any:
        if side is None or isinstance(side, tuple):
            return side and tuple(map(pick, side))
        return side[rows]

    sides = ("row_ids", "features", "labels", "weights", "on_host")
    return replace(batch, **{name: pick(getattr(batch, name)) for name in sides})


# ---- shapes


def _settle_shapes(
    group: Group, layouts: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """The buffers that parts wrote in different shapes: each is the largest, if the others are its beginning, as where
    a table of positions grows. Collective. Raises InvalidInput: they are not; on all ranks alike."""
    settled = {}
    for name in sorted({name for layout in layouts for name in layout}):
        written = [layout[name][:2] for layout in layouts if name in layout]
        if all(each == written[0] for each in written):
            continue
        arrays = [widen(values[name]).cpu().numpy() for values in own if name in values]
        blobs = group.allgather_bytes(pack_arrays([], arrays))
        gathered = [array for blob in blobs for array in unpack_arrays(blob)[1]]
        dtypes = [getattr(torch, kind.removeprefix("torch.")) for _, kind in written]
        likes = [torch.empty(shape, dtype=dtype) for (shape, _), dtype in zip(written, dtypes, strict=True)]
        tensors = [narrow(torch.from_numpy(a), like) for a, like in zip(gathered, likes, strict=True)]
        largest = max(tensors, key=torch.numel)
        for each in tensors:
            part = tuple(slice(length) for length in each.shape)
            fits = (each.dtype, each.ndim) == (largest.dtype, largest.ndim)
            if not fits or largest[part].shape != each.shape or not torch.equal(largest[part], each):
                where = "on rank" if len(layouts) == group.size else "by virtual share"
                shapes = [(number, layout[name]) for number, layout in enumerate(layouts) if name in layout]
                seen = "; ".join(f"{kind} {shape} {where} {number}" for number, (shape, kind, _) in shapes)
                raise InvalidInput(
                    f"the workers wrote buffer {name!r} of the model in different shapes ({seen}): give it one shape, "
                    "whatever rows a worker has, or compute it in forward without keeping it."
                )
        settled[name] = largest
    return settled


def _gather(group: Group, own: list[T]) -> list[T]:
    """The lists of all ranks, one after the other; collective."""
    return [each for blob in group.allgather_bytes(json.dumps(own).encode()) for each in json.loads(blob)]


def _get_before(before: BufferSnapshot, name: str, like: Tensor) -> Tensor:
    """A buffer before the step; zeros if the step has registered it, or given it another shape."""
    old = before.get(name)
    return old if old is not None and old.shape == like.shape else torch.zeros_like(like)


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _join(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([widen(tensor) for tensor in tensors]).to(CPU)

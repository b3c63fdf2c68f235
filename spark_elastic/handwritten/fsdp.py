"""`FSDPState`: elastic training of models that `fully_shard` (FSDP2) divides over the workers.

A function builds what depends on the world, such as a model, at the beginning of each world; handlers add its divided
tensors to the commits of `sharded_commits`. All ranks agree which commit they restore before anything is changed, and
keep it until the new world has committed the same state, divided anew, everywhere. Training thread only.
"""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.gradients.module_state import (
    ModelStateHandler,
    OptimizerStateHandler,
    map_leaves,
    view_bytes,
)
from spark_elastic.handwritten.object_state import (
    PLAIN,
    ObjectState,
    State,
    WorkerSession,
    make_commit_position,
)
from spark_elastic.handwritten.sharded_commits import (
    FROM_CHECKPOINT,
    LAYOUT,
    CommitKey,
    DividedTensor,
    LostCommit,
    Place,
    RestorableCommit,
    ShardBuilder,
    ShardedCommits,
    lay_out,
)
from spark_elastic.handwritten.torch_state import get_handler_registry
from spark_elastic.protocol.types import START, Checkpoint
from spark_elastic.runs.checkpoint import Checkpointer, SnapshotReader
from spark_elastic.runs.handlers import Registry, SamplerStateHandler, SnapshotHandler
from spark_elastic.runs.snapshot import Bytes, PickleCodec, Snapshot, SnapshotBuilder, broadcast_snapshot

try:
    if torch.__version__.startswith("2.6."):
        raise ImportError
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Shard
except ImportError as error:
    raise InvalidInput(
        f"FSDPState needs torch 2.7 or newer, whose fully_shard runs on CPUs; this is torch {torch.__version__}."
    ) from error

log = logging.getLogger("spark_elastic.state")

Build = Callable[[Any], Mapping[str, Any]]


class DividedHandler(SnapshotHandler):
    """A handler of a value with divided tensors: `capture` gets a `ShardBuilder`, and `load` also reads `pieces`."""

    # For `load`: this rank's piece of each divided tensor, by the number that `ShardBuilder.add_piece` returned.
    pieces: Sequence[Bytes] = ()


class FSDPState(ObjectState):
    """A model that FSDP2 divides, its optimizer, and plain values by name.

    `build(state)` is called at the beginning of each world, once the plain values and the position of an
    `ElasticDataLoader` are there. What it returns are attributes of the state then, and continue from the newest
    commit. A `DistributedDataParallel` may be among them. Reset callbacks run after it, on every worker.

    `commit` copies the worker's shard, sends a copy to another host, and returns once all workers have done so.
    """

    builds_late = False  # whether `finish_world` is called by whoever builds, and not when a world begins

    def __init__(self, build: Build, **values: Any) -> None:
        """
        Args:
            build: forms the process group, makes model and optimizer, the same on all workers, and returns them by
                name: {"model": model, "optimizer": optimizer}; also what depends on them, such as a scheduler.
            values: what does not depend on the world. They must pickle, or have a state dict.

        Raises:
            InvalidInput: an argument is wrong.
        """
        if not callable(build):
            raise InvalidInput(
                f"{type(self).__name__} takes a function that makes the model in each world; got a "
                f"{type(build).__name__}."
            )
        self._build = build
        self._commits = ShardedCommits()
        self._built: list[str] = []  # names of what `build` has returned
        # The commit that this world continues, and what all ranks have alike in it; None: nothing was committed.
        self._chosen: tuple[RestorableCommit, Snapshot] | None = None
        super().__init__(**values)
        for name, handler in self._handlers.items():
            if isinstance(handler, DividedHandler):
                raise InvalidInput(
                    f"{name!r} belongs to a world: make it in build(state), and return it by that name."
                )

    @property
    def registry(self) -> Registry:  # type: ignore[override] # looked up for each value
        return (
            (torch.nn.Module, DividedModelHandler),
            (torch.optim.Optimizer, DividedOptimizerHandler),
            *get_handler_registry(),
        )

    def _add(self, name: str, value: Any) -> None:
        super()._add(name, value)
        handler = self._handlers.get(name)
        if isinstance(handler, SamplerStateHandler):
            raise InvalidInput(
                f"{type(self).__name__} takes no ElasticSampler ({name!r}): use an ElasticDataLoader."
            )
        if handler is not None and not isinstance(handler, SnapshotHandler):
            raise InvalidInput(
                f"{type(self).__name__} makes one commit of all: have the handler of {name!r} be a SnapshotHandler."
            )

    # ---- commits

    def renew_commit(self) -> None:
        """Commit, if this process is a worker: otherwise there are no ranks to commit with."""
        session = self._session
        if session is not None and self._built:
            group, position = _wait_for_idle_group(session), make_commit_position(self._number)
            fence = session.world.fence.attempt, session.world.fence.generation
            self._commits.save(group, position, fence, self._capture)

    def make_commit(self) -> None:
        self.save()
        session = self._session
        if session is None or session.checkpointer is None:
            return
        due = np.array([session.group.rank == 0 and session.checkpointer.count_step()], np.int64)
        session.group.allreduce(due, op="max")
        if due[0]:
            self._offer_newest_commit(session.checkpointer)

    def restore(self) -> None:
        """Put this worker's part back as it was at the newest commit."""
        commit, session = self._commits.get_newest_complete(), self._session
        if commit is None or session is None or commit.key.fence[1] != session.world.fence.generation:
            return  # the next world does it
        size, rank = session.group.size, session.group.rank
        extents, _ = lay_out(commit.tensors, size, rank)
        self._load_values(commit.common)
        self._load_built(commit.common, [extent.of(commit.shards[rank]) for extent in extents])

    def on_broken_world(self) -> None:
        """Nothing: at the beginning of the next world the ranks choose the commit that all go back to."""

    def write_checkpoint(self, checkpointer: Checkpointer) -> None:
        self._offer_newest_commit(checkpointer)
        checkpointer.flush()

    def _offer_newest_commit(self, checkpointer: Checkpointer) -> None:
        """Have rank 0 write the whole state. Collective."""
        assert self._session is not None
        if self._number == START.step:
            return
        with checkpointer.measure_stall():
            whole = self._commits.gather(_wait_for_idle_group(self._session), 0)
        if whole is not None:
            checkpointer.offer(self._session.world.fence, whole)

    def restore_checkpoint(self, reader: SnapshotReader, candidates: Sequence[Checkpoint]) -> None:
        whole = reader.read(candidates)
        if whole is None:
            return
        if LAYOUT not in whole.values:
            raise InvalidInput("the run's checkpoints are of another kind of state: use another run_id.")
        self._commits.adopt(whole)

    def continue_from(self, other: State) -> None:
        if not isinstance(other, FSDPState):
            raise InvalidInput(
                "the function made a state of another kind than when it was called before: make the same one each time."
            )
        self._commits = other._commits

    # ---- at the beginning of a world

    def begin_alone(self) -> None:
        if not self.builds_late:
            self.finish_world()

    def on_reset(self) -> None:
        self.reset()  # callbacks run once the state is there

    def sync(self) -> None:
        raise InvalidInput("elastic.run synchronizes this state at the beginning of each world: drop sync().")

    def begin_world(self, source: int | None, commits: int | None) -> None:
        session = self._session
        assert session is not None
        group = _wait_for_idle_group(session)
        if commits is None and group.rank != source:
            self._commits.clear()  # rank `source` has read a checkpoint
        place = Place(session.address, session.world.me.host)
        chosen = self._commits.agree_on_commit(group, place)
        if isinstance(chosen, LostCommit):
            chosen = self._replace_lost(session, place, chosen)
        self._chosen = None
        if chosen is not None:
            common = self._commits.share_common(group, chosen)
            self._load_values(common)
            self._chosen = chosen, common
        if not self.builds_late:
            self.finish_world()

    @property
    def continues(self) -> bool:
        """Whether this world continues a commit."""
        return self._chosen is not None

    def finish_world(self) -> None:
        """Build, continue the commit that `begin_world` has chosen, and commit again, as this world divides it."""
        self._build_values()
        session, chosen, self._chosen = self._session, self._chosen, None
        if session is None:
            return
        group = _wait_for_idle_group(session)
        if chosen is None:
            self._begin_training(group)
        else:
            commit, common = chosen
            self._load_built(common, self._commits.divide(group, commit, common))
            for callback in self._reset_callbacks if commit.key.fence != FROM_CHECKPOINT else ():
                callback()
        self.renew_commit()
        self._report_commit()

    def _replace_lost(self, session: WorkerSession, place: Place, lost: LostCommit) -> RestorableCommit:
        """The newest checkpoint, in place of a commit of which parts are lost."""
        group, reader = session.group, session.snapshot_reader
        missing = self._commits.gather_loss_description(group, lost)
        sentence = f"commit {lost.key.number} is lost with the workers that held parts of it: {missing}"
        if reader is not None and group.rank == 0:
            try:
                self.restore_checkpoint(reader, reader.read_published())
            except StoreError as error:
                log.warning("%s", error)
        chosen = self._commits.agree_on_commit(group, place)
        if isinstance(chosen, RestorableCommit):
            log.warning(
                "%s; training continues from the checkpoint of commit %d", sentence, chosen.key.number
            )
            return chosen
        raise InvalidInput(
            f"{sentence}. Pass run_id= and store=, so that such a loss goes back to a checkpoint, or spread the "
            "workers over more hosts."
        )

    def _begin_training(self, group: Group) -> None:
        """Nothing was committed: rank 0's values, and what each rank has built."""
        self._number = 0
        commit = self._commits.copy_state(group.rank, CommitKey(0, (0, 0), group.size), START, self._capture)
        common = broadcast_snapshot(group, 0, commit.common, PickleCodec())
        if common is not None:
            extents, _ = lay_out(commit.tensors, group.size, group.rank)
            self._load_values(common)
            self._load_built(common, [extent.of(commit.shards[group.rank]) for extent in extents])

    def _build_values(self) -> None:
        for name in self._built:
            del self._handlers[name]
            object.__delattr__(self, name)
        self._built = []
        built: Any = self._build(self)
        if not isinstance(built, Mapping) or not built or not all(isinstance(name, str) for name in built):
            raise InvalidInput(
                'build(state) returns what it made by name, as in {"model": model, "optimizer": optimizer}; it '
                f"returned a {type(built).__name__}."
            )
        for name, value in built.items():
            if name in self._plain or name in self._handlers:
                raise InvalidInput(
                    f"build(state) returned a value named {name!r}, which the state has already."
                )
            self._add(name, value)
            if name not in self._handlers:
                raise InvalidInput(
                    f"build(state) returned {name!r}, which has no state dict: give the state its plain values."
                )
            self._built.append(name)

    def _load_values(self, common: Snapshot) -> None:
        plain, own = pickle.loads(common.values[PLAIN]), self._handlers.keys() - self._built
        if plain.keys() != set(self._plain) or not own <= common.values.keys():
            raise InvalidInput("the commit is of a state of other names: make the same one on each worker.")
        self._load(common, later=self._built)

    def _load_built(self, common: Snapshot, pieces: list[Bytes]) -> None:
        if set(common.values) != {PLAIN, LAYOUT, *self._handlers}:
            raise InvalidInput(
                "build(state) returned other names than before: return the same ones in each world."
            )
        handlers = self._find_snapshot_handlers()
        for name in self._built:
            if isinstance(handler := handlers[name], DividedHandler):
                handler.pieces = pieces
            handler.load(common.values[name], common.memory)


def _wait_for_idle_group(session: WorkerSession) -> Group:
    session.wait_until_idle()
    return session.group


# ---- divided tensors


class _PieceRef(NamedTuple):
    """A divided tensor in a commit: each rank has its rows."""

    number: int  # among the divided tensors of the commit
    dtype: torch.dtype  # of whole and piece
    shape: tuple[int, ...]  # of the whole tensor


def _add_piece(builder: SnapshotBuilder, tensor: DTensor, what: str) -> _PieceRef:
    mesh, placements = tensor.device_mesh, tensor.placements
    if placements != (Shard(0),) or mesh.mesh.tolist() != list(range(dist.get_world_size())):
        raise InvalidInput(
            f"FSDPState commits tensors that are divided by rows over all workers, and {what} has the placements "
            f"{placements} on a mesh of shape {tuple(mesh.shape)}: call fully_shard without mesh and "
            "shard_placement_fn."
        )
    assert isinstance(builder, ShardBuilder)
    shape = tuple(tensor.shape)
    memory, _ = view_bytes(_local(tensor))
    row_bytes = math.prod(shape[1:]) * tensor.dtype.itemsize
    return _PieceRef(builder.add_piece(DividedTensor(shape[0], row_bytes), memory), tensor.dtype, shape)


def reshard(model: torch.nn.Module) -> None:
    """Take the parameters apart, which are still whole after a forward pass alone."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _local(tensor: DTensor) -> torch.Tensor:
    """This rank's rows, in the tensor's own memory."""
    with torch.no_grad():
        return tensor.to_local()


def _read_piece(ref: _PieceRef, pieces: Sequence[Bytes]) -> torch.Tensor:
    """This rank's rows, as a view of the commit's memory."""
    memory, rest = pieces[ref.number], ref.shape[1:]
    if not memory.nbytes:
        return torch.empty((0, *rest), dtype=ref.dtype)
    return torch.from_numpy(memory).view(ref.dtype).view(-1, *rest)


class DividedModelHandler(ModelStateHandler, DividedHandler):
    """A model of which `fully_shard` has divided parameters; other modules as well."""

    def capture(self, builder: SnapshotBuilder) -> Any:
        reshard(self.value)
        divided = {name: _add_piece(builder, p, f"parameter {name!r}") for name, p in self._list_divided()}
        frozen = [name for name, parameter in self._list_divided() if not parameter.requires_grad]
        return {"divided": divided, "divided frozen": frozen, **super().capture(builder)}

    def load(self, values: Any, memory: Bytes) -> None:
        divided = dict(self._list_divided())
        saved: dict[str, _PieceRef] = values["divided"]
        shapes = {name: (tuple(p.shape), p.dtype) for name, p in divided.items()}
        if shapes != {name: (ref.shape, ref.dtype) for name, ref in saved.items()}:
            odd = sorted(shapes.keys() ^ saved.keys()) or list(shapes)
            raise InvalidInput(
                f"build(state) made another model than in the world before (see {odd[0]!r}): build the same one in "
                "each world."
            )
        with torch.no_grad():
            for name, ref in saved.items():
                _local(divided[name]).copy_(_read_piece(ref, self.pieces))
                divided[name].requires_grad_(name not in values["divided frozen"])
        super().load(values, memory)

    def _list_divided(self) -> Iterator[tuple[str, DTensor]]:
        return ((n, p) for n, p in self.value.named_parameters() if isinstance(p, DTensor))

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((n, p) for n, p in self.value.named_parameters() if not isinstance(p, DTensor))


class DividedOptimizerHandler(OptimizerStateHandler, DividedHandler):
    """An optimizer of divided parameters, whose state is divided as they are; other optimizers as well."""

    has_own_format = False

    def load(self, values: Any, memory: Bytes) -> None:
        super().load(values, memory)
        for group in self.value.param_groups:
            for parameter in group["params"]:
                state = self.value.state.get(parameter)
                if state is not None:
                    self.value.state[parameter] = map_leaves(
                        state, partial(self._divide, parameter=parameter)
                    )

    def _divide(self, leaf: Any, parameter: torch.Tensor) -> Any:
        """A tensor that is divided as its parameter is, in place of a reference."""
        if not isinstance(leaf, _PieceRef):
            return leaf
        if not isinstance(parameter, DTensor):
            raise InvalidInput("build(state) divides other parameters than before: build the same model.")
        own = _read_piece(leaf, self.pieces).clone().to(parameter.to_local().device)
        shape, stride = torch.Size(leaf.shape), torch.empty(leaf.shape, device="meta").stride()
        mesh, placements = parameter.device_mesh, parameter.placements
        return DTensor.from_local(own, mesh, placements, run_check=False, shape=shape, stride=stride)

    def _add_leaf(self, leaf: Any, builder: SnapshotBuilder, *, deferred: bool) -> Any:
        if isinstance(leaf, DTensor):
            return _add_piece(builder, leaf, "the optimizer's state")
        return super()._add_leaf(leaf, builder, deferred=deferred)

"""What torch.distributed offers beside its collectives, as its documentation lists it.

Each function is called by 4 ranks. It returns pairs (found, expected), or raises `Absent` if torch is too old.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

SIZE = 4
Pairs = list[tuple[Any, Any]]


class Absent(Exception):
    """This version of torch lacks what is tried."""


def ones(rank: int) -> torch.Tensor:
    return torch.full((4,), rank + 1.0)


def exchange_objects(rank: int) -> Pairs:
    if not hasattr(dist, "send_object_list"):
        raise Absent
    told, came = ["hello", {3}] if rank == 3 else [None, None], list[Any]([None])
    dist.broadcast_object_list(told, src=3)
    if rank == 0:
        dist.send_object_list([("from", 0)], dst=3)
    elif rank == 3:
        dist.recv_object_list(came, src=0)
    return [(told, ["hello", {3}]), (came, [("from", 0)] if rank == 3 else [None])]


def exchange_lists(rank: int) -> Pairs:
    sent = [torch.full((rank + other,), 10 * rank + other) for other in range(SIZE)]
    came = [torch.zeros(rank + other, dtype=torch.int64) for other in range(SIZE)]
    dist.all_to_all(came, sent)
    columns = torch.zeros(2, SIZE)  # each part is a column: no part is contiguous
    dist.all_gather(list(columns.unbind(1)), torch.tensor([rank, -rank]) * 1.0)
    own = torch.zeros(2, 2).t()[0]
    dist.scatter(own, [torch.full((2,), other * 1.0) for other in range(SIZE)] if rank == 3 else None, src=3)
    return [
        ([part.tolist() for part in came], [[10 * other + rank] * (rank + other) for other in range(SIZE)]),
        (columns.tolist(), [[0, 1, 2, 3], [0, -1, -2, -3]]),
        (own.tolist(), [rank, rank]),
    ]


def leave_after_messages(rank: int) -> Pairs:
    """Who has sent all that it had may end its group: it is no error for who has received it."""
    group, sources = dist.new_group(), []
    for source in range(1, SIZE):
        if rank == source:
            dist.send(ones(rank), 0, group=group)
        elif rank == 0:
            sources.append(dist.recv(torch.zeros(4), group=group))
        dist.barrier()
    if rank != 0:
        dist.destroy_process_group(group)
    dist.barrier()
    if rank == 0:
        time.sleep(0.5)  # until the end of their connections has come
        torch.optim.SGD(make_net().parameters(), lr=0.1).step()
        dist.destroy_process_group(group)
    return [(sources, list(range(1, SIZE)) if rank == 0 else [])]


def coalesce(rank: int) -> Pairs:
    """As FSDP and DDP's communication hooks do."""
    sums = [ones(rank), torch.full((3,), rank * 1.0)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for tensor in sums:
            dist.all_reduce(tensor)
    manager.wait()
    gathered = [torch.zeros(SIZE), torch.zeros(2 * SIZE)]
    with dist.distributed_c10d._coalescing_manager():
        dist.all_gather_into_tensor(gathered[0], torch.full((1,), rank * 1.0))
        dist.all_gather_into_tensor(gathered[1], torch.full((2,), rank * 1.0))
    return [
        ([tensor.tolist() for tensor in sums], [[10.0] * 4, [6.0] * 3]),
        (gathered[0].tolist(), [0, 1, 2, 3]),
        (gathered[1].tolist(), [0, 0, 1, 1, 2, 2, 3, 3]),
    ]


def make_groups(rank: int) -> Pairs:
    mine, every = dist.new_subgroups(2)
    total = ones(rank)
    dist.all_reduce(total, group=mine)
    by_parity, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    number = torch.tensor([rank * 1.0])
    dist.all_reduce(number, op=dist.ReduceOp.AVG, group=by_parity)
    root = torch.tensor([rank])
    dist.broadcast(root, src=2 + rank % 2, group=by_parity)
    return [
        (total[0].item(), 3.0 if rank < 2 else 7.0),
        (len(every), 2),
        (number.item(), rank % 2 + 1.0),
        (root.item(), 2 + rank % 2),
        (dist.get_process_group_ranks(by_parity), [rank % 2, rank % 2 + 2]),
        (dist.get_group_rank(by_parity, rank), rank // 2),
    ]


def use_functional_collectives(rank: int) -> Pairs:
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    pairs = [
        (functional.all_reduce(ones(rank), "avg", group), torch.full((4,), 2.5)),
        (functional.all_gather_tensor(ones(rank)[:1].view(1, 1), 1, group), torch.arange(1.0, 5.0)[None]),
        (functional.reduce_scatter_tensor(ones(rank), "sum", 0, group), torch.tensor([10.0])),
        (functional.broadcast(ones(rank), 2, group), torch.full((4,), 3.0)),
        (functional.all_to_all_single(ones(rank), [1] * SIZE, [1] * SIZE, group), torch.arange(1.0, 5.0)),
        (functional.all_gather_into_tensor_coalesced([ones(rank)[:1]], group)[0], torch.arange(1.0, 5.0)),
    ]
    if hasattr(functional, "permute_tensor"):  # from torch 2.3 on
        pairs.append((functional.permute_tensor(ones(rank), [1, 2, 3, 0], group), ones((rank - 1) % SIZE)))
    return [(functional.wait_tensor(found).tolist(), expected.tolist()) for found, expected in pairs]


def distribute_tensors(rank: int) -> Pairs:
    try:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    except ImportError:
        raise Absent from None
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2))
    a, b = (torch.arange(48.0).view(6, 8), torch.arange(40.0).view(8, 5))
    rows = distribute_tensor(a, mesh, [Shard(0), Shard(1)])
    columns = distribute_tensor(b, mesh, [Replicate(), Shard(0)])
    product = rows @ columns  # a sum over the mesh's second dimension
    moved = rows.redistribute(mesh, [Shard(1), Shard(0)])
    return [
        (product.full_tensor().tolist(), (a @ b).tolist()),
        (moved.full_tensor().tolist(), a.tolist()),
        (rows.sum().full_tensor().item(), a.sum().item()),
    ]


def train(wrapped: torch.nn.Module, rank: int) -> list[float]:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        wrapped(torch.full((2, 3), rank + step + 1.0)).square().mean().backward()
        optimizer.step()
    return [value for p in wrapped.parameters() for value in p.detach().flatten().tolist()]


def make_net() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def train_compiled_ddp(rank: int) -> Pairs:
    ddp = torch.nn.parallel.DistributedDataParallel
    plain = train(ddp(make_net()), rank)
    compiled = train(torch.compile(ddp(make_net()), backend="aot_eager"), rank)
    every: list[Any] = [None] * SIZE
    dist.all_gather_object(every, compiled)
    is_close = torch.allclose(torch.tensor(compiled), torch.tensor(plain), atol=1e-6)
    return [(is_close, True), (every, [every[0]] * SIZE)]


def train_by_hooks(rank: int) -> Pairs:
    """DDP with a communication hook, without a synchronization in between, and with uneven inputs."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    ddp = torch.nn.parallel.DistributedDataParallel
    plain, hooked, uneven = ddp(make_net()), ddp(make_net()), ddp(make_net())
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    before, after = train(plain, rank), train(hooked, rank)
    with uneven.join():
        for _ in range(rank + 1):
            uneven(torch.ones(2, 3)).sum().backward()
    with plain.no_sync():
        plain(torch.ones(2, 3)).sum().backward()
    return [(torch.allclose(torch.tensor(before), torch.tensor(after)), True)]


def train_by_zero(rank: int) -> Pairs:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    plain, zero, adam = make_net(), make_net(), torch.optim.Adam
    divided = ZeroRedundancyOptimizer(zero.parameters(), adam, lr=0.1)
    for net, optimizer in (plain, adam(plain.parameters(), lr=0.1)), (zero, divided):
        net(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
    return [(torch.allclose(a, b), True) for a, b in zip(plain.parameters(), zero.parameters(), strict=True)]


PROGRAMS: tuple[Callable[[int], Pairs], ...] = (
    *(exchange_objects, exchange_lists, leave_after_messages, coalesce, make_groups),
    *(use_functional_collectives, distribute_tensors, train_compiled_ddp, train_by_hooks, train_by_zero),
)


def attempt(program: Callable[[int], Pairs], rank: int) -> Pairs | str:
    """What it found; "absent", or its error's text."""
    try:
        return program(rank)
    except Absent:
        return "absent"
    except Exception:
        return traceback.format_exc()


def run_programs() -> dict[str, Pairs | str]:
    dist.init_process_group()
    rank = dist.get_rank()
    found = {}
    for program in PROGRAMS:
        found[program.__name__] = attempt(program, rank)
        dist.barrier()
    dist.destroy_process_group()
    return found

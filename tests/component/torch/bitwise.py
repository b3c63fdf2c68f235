"""Trainings in bitwise mode on plain processes, whose weights must be the same bytes for any world and any faults."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import torch

from tests.component.torch.hand_written import hold
from tests.component.torch.job import CLASSES, WIDTH, Job, add_pace

SHARES, BATCH = 8, 40
NETS = ("mlp", "conv", "lstm", "embedding")
# Of the hand-written loop.
ROWS, EPOCHS, STEPS = 101, 2, 12


BitwiseJob = partial(Job, shares=SHARES, global_batch=BATCH)


def everything() -> torch.nn.Module:
    """Layers that draw, that keep statistics and that are used twice, in float32."""
    torch.manual_seed(6)
    images = torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.Flatten()
    wide = torch.nn.Linear(4 * WIDTH, 20), torch.nn.Dropout(0.3), *[torch.nn.Linear(20, 20)] * 2
    return add_pace(*images, *wide, torch.nn.Tanh(), torch.nn.Linear(20, CLASSES), pace=0.0).float()


def hash_state(state: dict[str, Any]) -> str:
    """SHA-256 of all tensors, by name."""
    hasher = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        hasher.update(name.encode() + tensor.numpy().tobytes())
    return hasher.hexdigest()


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(7)
    if name == "mlp":
        first, last = torch.nn.Linear(16, 40), torch.nn.Linear(40, 3)
        return torch.nn.Sequential(first, torch.nn.Dropout(0.2), torch.nn.Tanh(), last)
    if name == "conv":
        first = torch.nn.Unflatten(1, (1, 4, 4)), torch.nn.Conv2d(1, 8, 3, padding=1)
        rest = torch.nn.GroupNorm(2, 8), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(128, 3)
        return torch.nn.Sequential(*first, *rest)
    return Lstm() if name == "lstm" else SparseEmbedding()


class Lstm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = torch.nn.LSTM(4, 12, num_layers=2, batch_first=True, dropout=0.1)
        self.head = torch.nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.cells(x.view(-1, 4, 4))
        last: torch.Tensor = self.head(outputs[:, -1])
        return last


class SparseEmbedding(torch.nn.Module):
    """Sparse gradients, and words that come several times in a share."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(50, 8, sparse=True)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = self.words((x * 7).long().remainder(50))
        found: torch.Tensor = self.head(words.mean(1))
        return found


class NoisyRows(torch.utils.data.Dataset[Any]):
    """Rows with noise from the process's generator, as random transforms draw it."""

    def __init__(self) -> None:
        drawn = torch.Generator().manual_seed(3)
        self._x = torch.randn(ROWS, 16, generator=drawn)
        self._y = torch.randint(0, 3, (ROWS,), generator=drawn)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        return self._x[row] + 0.01 * torch.randn(16), self._y[row]


def train(name: str, holds: dict[int, int | str], readers: int = 0) -> dict[str, Any]:
    """A hand-written loop. holds: what `hold` awaits before those steps."""
    import spark_elastic.torch as hvd

    hvd.init()
    model = build(name)
    kind = torch.optim.SGD if name == "embedding" else torch.optim.Adam
    how: Any = {"determinism": "bitwise", "virtual_shares": SHARES, "num_workers": readers}
    loader = hvd.elastic.ElasticDataLoader(NoisyRows(), BATCH // 2, seed=5, **how)
    named, plain = model.named_parameters(), kind(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, loader=loader)
    trained: list[int] = []

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while loader.epoch < EPOCHS:
            for shares in loader:
                optimizer.zero_grad()
                for x, y in shares:
                    loss = torch.nn.functional.cross_entropy(model(x), y)
                    (loss * loader.loss_weight).backward()
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if not p.grad.is_sparse], 0.1)
                with optimizer.skip_synchronize():
                    optimizer.step()
                trained.append(state.step)
                state.step += 1
                print(f"step {state.step}", flush=True)  # noqa: T201 - what the test waits for
                state.commit()
                hold(state, holds[state.step]) if state.step in holds else None

    state: Any = hvd.elastic.TorchState(model, optimizer, loader=loader, step=0)
    loop(state)
    optimizer.close()
    return {"sha256": hash_state(model.state_dict()), "trained": trained, "size": hvd.size()}

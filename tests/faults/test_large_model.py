"""A model that is too large for each worker: FSDP2 under the Trainer, through kills.

python -m tests.faults.test_large_model FOLDER    trains it in this process alone, and prints what that took as JSON
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from tests.component.torch import hand_written
from tests.component.torch.hand_written import hold
from tests.sources import ROOT

pytestmark = [pytest.mark.faults, pytest.mark.native, pytest.mark.timeout(1800)]

WORKERS, BATCH, TOKENS, STEPS = 4, 16, 112, 4


class PeakMemory:
    """The most private memory of this process, which RLIMIT_DATA limits, while it is watched."""

    def __init__(self) -> None:
        self.bytes = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(0.005):
            status = Path("/proc/self/status").read_text()
            self.bytes = max(self.bytes, int(status.partition("VmData:")[2].split()[0]) << 10)


def train(folder: str, limit: int | None = None) -> dict[str, Any]:
    """limit: bytes of private memory that this worker may have; None: it trains alone, as without this package."""
    import torch
    import transformers

    from spark_elastic.torch.huggingface import ElasticTrainer

    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    class Pace(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            print(f"step {state.global_step}", flush=True)  # noqa: T201 - what the test waits for
            if limit is not None and state.global_step in (2, 3):  # a worker is killed here, and replaced
                hold(trainer._adapter.state, state.global_step)

    torch.set_num_threads(1)
    with PeakMemory() as peak:
        torch.manual_seed(7)
        shape = {"hidden_size": 216, "intermediate_size": 576, "num_hidden_layers": 9}
        config = transformers.LlamaConfig(vocab_size=128_256, num_attention_heads=4, **shape)
        model = transformers.LlamaForCausalLM(config)
        size = sum(parameter.numel() for parameter in model.parameters())
        drawn = torch.Generator().manual_seed(3)
        rows = [torch.randint(0, config.vocab_size, (TOKENS,), generator=drawn) for _ in range(BATCH * 2)]
        args = transformers.TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=BATCH, train_sampling_strategy="sequential",
            lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
            disable_tqdm=True, seed=5, fsdp=limit is not None,
        )  # fmt: skip
        labelled = [{"input_ids": row, "labels": row} for row in rows]
        options: dict[str, Any] = {"train_dataset": labelled, "callbacks": [Pace()]}
        if limit is None:
            trainer = transformers.Trainer(model, args, **options)
        else:
            trainer = ElasticTrainer(model, args, global_batch_size=BATCH, **options)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"parameters": size, "bytes": peak.bytes, "losses": losses}


def test_workers_train_what_needs_twice_the_memory_that_each_has(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.test_large_model", str(tmp_path)]
    for module in (hand_written, sys.modules[__name__]):
        cloudpickle.register_pickle_by_value(module)
    alone = json.loads(subprocess.check_output(command, cwd=ROOT, timeout=900).splitlines()[-1])
    assert alone["parameters"] > 59e6
    sizes = dict.fromkeys(("room", "num_workers", "min_workers", "max_workers"), WORKERS)
    run = hand_written.Run(train, (str(tmp_path), alone["bytes"] // 2), spares=True, **sizes)
    for step in (2, 3):
        run.at(step, lambda: [worker.kill() for worker in run.workers()[1:2]])
    results = run.results()
    assert run.sizes() == [WORKERS] * 3, "no worker was lost, or another took no place"
    for result in results:
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-4)
        assert result["bytes"] <= alone["bytes"] // 2
    print(alone, [result["bytes"] for result in results])  # noqa: T201 - with -rP


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1])))  # noqa: T201

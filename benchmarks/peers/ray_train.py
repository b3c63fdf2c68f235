"""Ray Train, elastic: `num_workers=(1, 2)`, `FailureConfig(max_failures=-1)` and a reported checkpoint.

After Ray's guides "Elastic training" and "Saving and loading checkpoints"; `job.take_steps` says what is beyond them.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import job
import ray
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig

RESIZE_SECONDS = 5.0  # Ray's default, 60 s, is longer than the whole run


def train() -> None:
    net = job.make_net()
    optimizer, begun = job.make_optimizer(net), 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt")
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begun = saved["step"]
    model = ray.train.torch.prepare_model(net, parallel_strategy_kwargs={})

    def report(step: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if dist.get_rank() == 0:
                state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, Path(folder) / "state.pt")
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report({"step": step}, checkpoint=checkpoint)

    job.take_steps(model, optimizer, begun, report)
    if dist.get_rank() == 0:
        job.save_weights(net)


def main() -> None:
    here = str(Path(__file__).parent)
    variables = {name: os.environ[name] for name in ("HEAD_TO_HEAD", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")}
    ray.init(address=os.environ["RAY_ADDRESS"], runtime_env={"env_vars": {**variables, "PYTHONPATH": here}})
    storage, failures = str(job.folder() / "storage"), FailureConfig(max_failures=-1)
    workers = {"num_workers": (1, job.HOSTS), "elastic_resize_monitor_interval_s": RESIZE_SECONDS}
    trainer = ray.train.torch.TorchTrainer(
        train,
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(**workers),
        run_config=RunConfig(name="run", storage_path=storage, failure_config=failures),
    )
    trainer.fit()


if __name__ == "__main__":
    main()

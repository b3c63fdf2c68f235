"""Optuna's TorchDistributedTrial: rank 0 asks the study, all ranks train each trial by DDP and report for pruning.

The study lies in a file: a world that comes later takes it up with the trials that are done.
"""

import optuna
import torch
import torch.distributed as dist
from optuna.trial import TrialState
from optuna_integration.pytorch_distributed import TorchDistributedTrial
from steps import finish, note
from toy import make_net, make_rows

TRIALS, STEPS = 8, 6
x, y = make_rows()
dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()


def objective(single):
    trial = TorchDistributedTrial(single)
    rate = trial.suggest_float("rate", 1e-4, 1e-1, log=True)
    model = torch.nn.parallel.DistributedDataParallel(make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x[rank::size]), y[rank::size])
        loss.backward()
        optimizer.step()
        value = loss.detach()
        dist.all_reduce(value)
        note(trial.number * STEPS + step)
        trial.report(float(value), step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return float(value)


left = [TRIALS]
if rank == 0:
    study = optuna.create_study(
        study_name="rates",
        storage="sqlite:///study.db",
        load_if_exists=True,
        sampler=optuna.samplers.RandomSampler(seed=1),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
    )
    done = study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))
    left = [TRIALS - len(done)]
dist.broadcast_object_list(left)
if rank == 0:
    study.optimize(objective, n_trials=left[0])
    finish(f"{len(study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED)))} trials")
else:
    for _ in range(left[0]):
        try:
            objective(None)
        except optuna.TrialPruned:
            pass
    finish(f"{TRIALS} trials")

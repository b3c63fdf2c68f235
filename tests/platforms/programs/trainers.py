"""What the programs of transformers' Trainer have in common."""

import sys
from pathlib import Path

from steps import finish, note
from toy import weigh
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

CHECKPOINTS = "checkpoints"
elastic = "--elastic" in sys.argv


class Steps(TrainerCallback):
    def on_step_end(self, args, state, control, **others):
        note(state.global_step)


def train(trainer):
    """From the trainer's newest checkpoint, if it has saved one."""
    last = get_last_checkpoint(CHECKPOINTS) if Path(CHECKPOINTS).exists() else None
    trainer.train(resume_from_checkpoint=last)
    finish(weigh(trainer.model))

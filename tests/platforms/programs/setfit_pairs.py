"""setfit fine-tunes a BERT of random weights on pairs of sentences; `elastic_trainer` makes its trainer."""

from functools import partial

import setfit.trainer
from datasets import Dataset
from setfit import SetFitModel, Trainer, TrainingArguments
from sklearn.linear_model import LogisticRegression
from steps import finish
from toy import make_bert, make_sentences, weigh
from trainers import CHECKPOINTS, Steps
from transformers import set_seed

from spark_elastic.torch.huggingface import elastic_trainer

kind = elastic_trainer(setfit.trainer.BCSentenceTransformersTrainer)
setfit.trainer.BCSentenceTransformersTrainer = partial(kind, global_batch_size=8)
set_seed(1)
model = SetFitModel(make_bert(), LogisticRegression())
rows = Dataset.from_dict({"text": make_sentences(32), "label": [number % 2 for number in range(32)]})
quiet = {"save_strategy": "no", "report_to": "none", "show_progress_bar": False}
args = TrainingArguments(CHECKPOINTS, max_steps=40, **quiet)
trainer = Trainer(model, args, train_dataset=rows, callbacks=[Steps()])
trainer.train()
finish(weigh(model.model_body))

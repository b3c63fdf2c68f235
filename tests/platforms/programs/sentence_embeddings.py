"""sentence-transformers trains a BERT of random weights by MultipleNegativesRankingLoss, whose negatives are gathered.

With `--elastic`: its trainer by `elastic_trainer`, with the batch sampler NO_DUPLICATES: rows of a step that occur
nowhere else in it. Without, it resumes from its own checkpoint.
"""

from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments, losses
from toy import make_bert, make_sentences
from trainers import CHECKPOINTS, Steps, elastic, train
from transformers import set_seed

kind, options = SentenceTransformerTrainer, {}
if elastic:
    from spark_elastic.torch.huggingface import elastic_trainer

    kind, options = elastic_trainer(SentenceTransformerTrainer), {"global_batch_size": 8}

set_seed(1)
model = make_bert()
sentences = make_sentences()
rows = {"anchor": sentences, "positive": [text[:-4] for text in sentences]}
trainer = kind(
    model,
    SentenceTransformerTrainingArguments(
        CHECKPOINTS,
        per_device_train_batch_size=4,
        max_steps=40,
        save_strategy="no" if elastic else "steps",
        save_steps=5,
        learning_rate=0.001,
        report_to="none",
        disable_tqdm=True,
        batch_sampler="no_duplicates" if elastic else "batch_sampler",
        dataloader_drop_last=elastic,
    ),
    train_dataset=Dataset.from_dict(rows),
    loss=losses.MultipleNegativesRankingLoss(model, gather_across_devices=True),
    callbacks=[Steps()],
    **options,
)
train(trainer)

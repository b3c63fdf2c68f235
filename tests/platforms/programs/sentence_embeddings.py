"""sentence-transformers trains a BERT of random weights by MultipleNegativesRankingLoss, whose negatives are gathered.

With `--elastic`: its trainer as a subclass of ElasticTrainer, with CosineSimilarityLoss, since negatives of a rank's
own rows depend on the world. Without, it resumes from its own checkpoint.
"""

import os

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)
from toy import make_sentences, make_tokenizer
from trainers import CHECKPOINTS, Steps, elastic, train
from transformers import BertConfig, BertModel, set_seed

options = {}
if elastic:
    from spark_elastic.torch.huggingface import ElasticTrainer

    class ElasticEmbeddingTrainer(ElasticTrainer, SentenceTransformerTrainer):
        pass

    options = {"global_batch_size": 8}


def make_model():
    folder = f"bert-{os.getpid()}"
    tokenizer = make_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    transformer = models.Transformer(folder)
    return SentenceTransformer(modules=[transformer, models.Pooling(32)], device="cpu")


set_seed(1)
model = make_model()
sentences = make_sentences()
rows = {"anchor": sentences, "positive": [text[:-4] for text in sentences]}
if elastic:
    rows["label"] = [number % 5 / 4 for number in range(len(sentences))]
    loss = losses.CosineSimilarityLoss(model)
else:
    loss = losses.MultipleNegativesRankingLoss(model, gather_across_devices=True)
trainer = (ElasticEmbeddingTrainer if elastic else SentenceTransformerTrainer)(
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
    ),
    train_dataset=Dataset.from_dict(rows),
    loss=loss,
    callbacks=[Steps()],
    **options,
)
train(trainer)

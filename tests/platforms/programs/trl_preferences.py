"""TRL's DPOTrainer, or with `--reward` its RewardTrainer, by `elastic_trainer`, trains a LoRA on pairs of answers."""

import sys

from datasets import Dataset
from peft import LoraConfig
from toy import make_llama, make_sentences, make_tokenizer
from trainers import CHECKPOINTS, Steps, train
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, set_seed
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

from spark_elastic.torch.huggingface import elastic_trainer

set_seed(1)
rewards = "--reward" in sys.argv
kind, config = (RewardTrainer, RewardConfig) if rewards else (DPOTrainer, DPOConfig)
tokenizer = make_tokenizer()
model = make_llama(tokenizer, LlamaForSequenceClassification if rewards else LlamaForCausalLM, num_labels=1)
rows = {
    "prompt": make_sentences(),
    "chosen": make_sentences()[::-1],
    "rejected": make_sentences()[7:] + ["w1 w2"] * 7,
}
if rewards:
    chosen, rejected = (zip(rows["prompt"], rows[name], strict=True) for name in ("chosen", "rejected"))
    rows = {"chosen": [" ".join(pair) for pair in chosen], "rejected": [" ".join(pair) for pair in rejected]}
quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "bf16": False}
args = config(CHECKPOINTS, max_steps=40, learning_rate=0.01, **quiet)
task = "SEQ_CLS" if rewards else "CAUSAL_LM"
trainer = elastic_trainer(kind)(
    model,
    args=args,
    train_dataset=Dataset.from_dict(rows),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type=task),
    callbacks=[Steps()],
    global_batch_size=8,
)
train(trainer)

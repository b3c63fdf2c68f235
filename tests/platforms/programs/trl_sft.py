"""TRL's SFTTrainer trains a LoRA of PEFT on a Llama of random weights, and resumes from its own checkpoint.

With `--elastic`: the same trainer by `elastic_trainer(SFTTrainer)`, with packed rows, which saves no checkpoints.
"""

from datasets import Dataset
from peft import LoraConfig
from toy import make_llama, make_sentences, make_tokenizer
from trainers import CHECKPOINTS, Steps, elastic, train
from transformers import set_seed
from trl import SFTConfig, SFTTrainer

kind, options = SFTTrainer, {}
if elastic:
    from spark_elastic.torch.huggingface import elastic_trainer

    kind, options = elastic_trainer(SFTTrainer), {"global_batch_size": 8}

set_seed(1)
tokenizer = make_tokenizer()
saves = {"save_strategy": "no" if elastic else "steps", "save_steps": 5}
packs = {"packing": elastic, "packing_strategy": "wrapped", "max_length": 32 if elastic else 1024}
quiet = {"report_to": "none", "disable_tqdm": True, "bf16": False}
numbers = {"per_device_train_batch_size": 4, "max_steps": 40, "learning_rate": 0.01}
args = SFTConfig(CHECKPOINTS, **numbers, **saves, **packs, **quiet)
trainer = kind(
    make_llama(tokenizer),
    args,
    train_dataset=Dataset.from_dict({"text": make_sentences()}),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    callbacks=[Steps()],
    **options,
)
train(trainer)

"""TRL's SFTTrainer trains a LoRA of PEFT on a Llama of random weights, and resumes from its own checkpoint.

With `--elastic`: the same trainer as a subclass of ElasticTrainer, which saves no checkpoints.
"""

from datasets import Dataset
from peft import LoraConfig
from toy import make_sentences, make_tokenizer
from trainers import CHECKPOINTS, Steps, elastic, train
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

options = {}
if elastic:
    from spark_elastic.torch.huggingface import ElasticTrainer

    class ElasticSFTTrainer(ElasticTrainer, SFTTrainer):
        pass

    options = {"global_batch_size": 8}


set_seed(1)
tokenizer = make_tokenizer()
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
)
args = SFTConfig(
    CHECKPOINTS,
    per_device_train_batch_size=4,
    max_steps=40,
    save_strategy="no" if elastic else "steps",
    save_steps=5,
    learning_rate=0.01,
    report_to="none",
    disable_tqdm=True,
    bf16=False,
)
trainer = (ElasticSFTTrainer if elastic else SFTTrainer)(
    model,
    args,
    train_dataset=Dataset.from_dict({"text": make_sentences()}),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    callbacks=[Steps()],
    **options,
)
train(trainer)

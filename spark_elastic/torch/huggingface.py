"""Hugging Face's Trainer and Accelerate on elastic workers: the public name of `integrations.huggingface`."""

from spark_elastic.integrations.huggingface import ElasticTrainer, create_accelerator, elastic_trainer

__all__ = ["ElasticTrainer", "create_accelerator", "elastic_trainer"]

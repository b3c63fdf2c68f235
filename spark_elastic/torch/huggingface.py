"""Hugging Face's Trainer and Accelerate on elastic workers: the public names of parts of `integrations`."""

from spark_elastic.integrations.huggingface import ElasticTrainer, create_accelerator, elastic_trainer

__all__ = ["ElasticTrainer", "create_accelerator", "elastic_trainer"]

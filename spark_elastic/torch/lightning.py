"""Lightning's Trainer on elastic workers: the public name of `integrations.lightning`."""

from spark_elastic.integrations.lightning import ElasticStrategy

__all__ = ["ElasticStrategy"]

"""Lightning's Trainer on elastic workers: the public name of `integrations.lightning`."""

from spark_elastic.integrations.lightning import ElasticModelParallelStrategy, ElasticStrategy

__all__ = ["ElasticModelParallelStrategy", "ElasticStrategy"]

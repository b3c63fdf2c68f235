"""torch.distributed on elastic workers: the backend `elastic`, which needs no configuration inside of a job.

Importing this package registers it; a worker does so before the user's code runs.
"""

from spark_elastic.integrations.torch_distributed.process_group import ElasticProcessGroup
from spark_elastic.integrations.torch_distributed.registration import register

__all__ = ["ElasticProcessGroup", "register"]

register()

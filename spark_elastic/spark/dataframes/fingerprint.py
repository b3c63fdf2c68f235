"""What a materialised data set was made from, so that the same DataFrame is not written twice.

Owns the identity of a DataFrame: its logical plan, its columns, how it is written, and the state of the files that
it reads (a table that was overwritten is another DataFrame, though its plan is the same). Where that state cannot
be seen (other databases, Spark Connect, clusters that deny it), a fingerprint is unique and nothing is reused. Any
thread.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame

_FORM = 1  # of what is written; raise it when that changes
# Leaves of a plan whose rows cannot change, and the relation whose files can be looked at.
_RDDS = {"LogicalRDD", "ExternalRDD"}
_FIXED_LEAVES = {"LocalRelation", "Range", "OneRowRelation"} | _RDDS
_FILES = "HadoopFsRelation"


def fingerprint(df: DataFrame, columns: Sequence[str], options: Mapping[str, str]) -> str:
    """32 hex digits: equal only for the same columns of the same rows, written the same way."""
    content = {
        "form": _FORM,
        "plan": df.semanticHash(),
        "source": _source(df),
        "columns": [[name, df.schema[name].dataType.json()] for name in columns],
        "options": dict(options),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _source(df: DataFrame) -> list[Any]:
    """The plan's text, which has more bits than Spark's hash of it, and the files that it reads."""
    frame: Any = getattr(df, "_jdf", None)
    if frame is None:
        return [uuid.uuid4().hex]
    from py4j.protocol import Py4JError  # which a client of Spark Connect alone has not

    try:
        plan = frame.queryExecution().analyzed()
        kinds = set(_leaves(plan))
        if not kinds <= _FIXED_LEAVES | {_FILES}:
            return [uuid.uuid4().hex]
        text = str(plan.canonicalized().toString())
        # Spark tells RDDs apart by an address, which another driver may come to for other rows.
        owner = df.sparkSession.sparkContext.applicationId if kinds & _RDDS else ""
        return [text, _files(df) if _FILES in kinds else [], *filter(None, [owner])]
    except Py4JError:
        return [uuid.uuid4().hex]


def _leaves(plan: Any) -> Iterator[str]:
    leaves = plan.collectLeaves()
    for index in range(leaves.size()):
        leaf = leaves.apply(index)
        kind = str(leaf.getClass().getSimpleName())
        yield str(leaf.relation().getClass().getSimpleName()) if kind == "LogicalRelation" else kind


def _files(df: DataFrame) -> list[list[Any]]:
    """(path, bytes, time of change) of each file that the DataFrame reads."""
    gateway: Any = df.sparkSession._jvm
    configuration = df.sparkSession._jsparkSession.sessionState().newHadoopConf()
    states: list[list[Any]] = []
    for path in sorted(df.inputFiles()):
        place = gateway.org.apache.hadoop.fs.Path(gateway.java.net.URI(path))
        status = place.getFileSystem(configuration).getFileStatus(place)
        states.append([path, status.getLen(), status.getModificationTime()])
    return states

"""A training state that goes through a checkpoint and back, without a store."""

from __future__ import annotations

from typing import Any

from spark_elastic.runs.snapshot import Snapshot, build_snapshot


def reload_from_checkpoint(source: Any, target: Any = None) -> None:
    """Encode everything that a checkpoint of `source` holds, and load it into `target` (None: into `source`)."""
    snapshot = build_snapshot(source.position, source.capture)
    values = source.codec.loads(source.codec.dumps(snapshot.values), trusted=False)
    (source if target is None else target).load(Snapshot(snapshot.position, values, snapshot.memory))

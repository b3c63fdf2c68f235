"""What tests write into tables of Delta that its Python package cannot: deletion vectors."""

from __future__ import annotations

import base64
import json
import struct
import time
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable
from pyroaring import BitMap


def delete_by_vector(folder: Path, path: str, rows: list[int], **partition: str) -> None:
    """Commit a deletion vector for a file, as Spark's connector does and the Python package cannot."""
    bitmap = BitMap(rows).serialize()
    vector = struct.pack("<IQI", 1681511377, 1, 0) + bitmap
    vector += bytes(-len(vector) % 4)
    table = DeltaTable(folder)
    (add,) = (each for each in pa.table(table.get_add_actions()).to_pylist() if each["path"] == path)
    inline = {"storageType": "i", "pathOrInlineDv": encode_z85(vector), "sizeInBytes": len(vector)}
    entry = {
        "path": path,
        "partitionValues": partition,
        "size": add["size_bytes"],
        "modificationTime": add["modification_time"],
        "dataChange": True,
        "stats": json.dumps({"numRecords": add["num_records"], "tightBounds": False}),
        "deletionVector": {**inline, "cardinality": len(rows)},
    }
    remove = {"path": path, "deletionTimestamp": int(time.time() * 1000), "dataChange": True}
    features = {key: ["deletionVectors"] for key in ("readerFeatures", "writerFeatures")}
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, **features}
    lines = [{"protocol": protocol}, {"remove": remove}, {"add": entry}]
    log = folder / "_delta_log" / f"{table.version() + 1:020}.json"
    log.write_text("\n".join(json.dumps(line) for line in lines))


def encode_z85(data: bytes) -> str:
    """ZeroMQ's base 85: that of base64.b85encode, with other signs."""
    usual = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
    z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    return base64.b85encode(data).decode().translate(str.maketrans(usual, z85))

"""The journal of a job that a test runs, which the rules of docs/protocol.md must hold for."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from spark_elastic.config import ElasticConfig
from tests.specification import check_journal


@contextmanager
def keep_journal(config: ElasticConfig) -> Iterator[tuple[ElasticConfig, list[str]]]:
    """(the configuration with a journal, the journal's lines); these are there after the block, which may raise
    RuleBroken."""
    lines: list[str] = []
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as file:
        yield replace(config, journal=file.name), lines
        lines.extend(file)
        check_journal(Path(file.name))

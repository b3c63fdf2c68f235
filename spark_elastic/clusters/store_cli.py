"""The command line tool `spark-elastic`: examines a cluster, lists what a store holds, and removes old entries.

It defines the options and prints. `doctor` examines, `data.store` decides what may be removed. Runs in the main thread.
"""

from __future__ import annotations

import json
import os
import re
import sys
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TypeAlias

import click

import spark_elastic
from spark_elastic.clock import SystemClock
from spark_elastic.clusters.doctor import examine
from spark_elastic.data.store import Store, StoreEntry, list_entries, remove_old_entries
from spark_elastic.errors import ElasticError, InvalidInput

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
Words: TypeAlias = tuple[str, ...]


@click.group(name="spark-elastic")
@click.version_option(spark_elastic.__version__)
def group() -> None:
    """Tools for clusters and stores of spark_elastic."""


@group.command(name="doctor")
@click.option("--master", help="Cluster to examine, as Spark names it: local[2], spark://host:7077, yarn ...")
@click.option("--conf", "settings", multiple=True, metavar="NAME=VALUE", help="Setting of Spark; repeatable.")
@click.option("--store", help="Store to try, a path or an fsspec url.")
@click.option("-n", "--num-workers", type=click.IntRange(min=1), help="Workers that a job would ask for.")
def examine_all(master: str | None, settings: Words, store: str | None, num_workers: int | None) -> None:
    """Say what is installed, what a cluster offers and what a job would be refused for."""
    spark = _start_session(master, settings) if master is not None else None
    try:
        findings = []
        for finding in examine(spark, store, num_workers):
            click.echo(str(finding))
            findings.append(finding)
    finally:
        if spark is not None:
            spark.stop()
    if spark is None:
        click.echo(f"{'':8} give --master to examine a cluster")
    sys.exit(any(finding.refused for finding in findings))


def _start_session(master: str, settings: Words) -> SparkSession:
    pairs = [setting.partition("=") for setting in settings]
    if not all(equals for _, equals, _ in pairs):
        raise InvalidInput(f"--conf takes NAME=VALUE; got {' '.join(settings)!r}.")
    try:
        from spark_elastic.clusters.spark.host_facts import start_session
    except ImportError as error:
        raise InvalidInput(f"to examine a cluster takes pyspark ({error}): install it.") from error
    return start_session(master, {name: value for name, _, value in pairs})


@group.group(name="store")
def store_group() -> None:
    """Data sets and runs in a store, a path or an fsspec url."""


_OPTION = click.option(
    "-o",
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Option for fsspec, as text or JSON; repeatable. Text that looks like JSON is put in double quotes.",
)


@store_group.command(name="ls")
@click.argument("url")
@_OPTION
def ls(url: str, options: Words) -> None:
    """List what is in the store at URL."""
    _show(list_entries(_open_existing(url, options)))


@store_group.command(name="clean")
@click.argument("url")
@click.option("--older-than", required=True, help="Least age of what is removed, as in 12h, 30d or 2w.")
@click.option("--unfinished", is_flag=True, help="Also remove runs that could be resumed, and their rows.")
@_OPTION
def clean_store(url: str, older_than: str, unfinished: bool, options: Words) -> None:
    """Remove data sets, ended runs and half-written files that have not been written to for a while."""
    store, age = _open_existing(url, options), parse_age(older_than)
    removed = remove_old_entries(store, age, SystemClock().wall(), unfinished)
    _show(removed)
    click.echo(f"removed {len(removed)}, {sum(entry.bytes for entry in removed):,} bytes")


def parse_age(text: str) -> float:
    """12h, 30d, 2w ... as seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if match is None:
        raise InvalidInput(f"{text!r} is no age: give a number with s, m, h, d or w, as in 30d.")
    return float(match[1]) * _SECONDS[match[2]]


def _open_existing(url: str, options: Words) -> Store:
    """The store, unless it is a folder that does not exist: other stores have no folders."""
    pairs: dict[str, Any] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals:
            raise InvalidInput(f"--option takes NAME=VALUE; got {name!r}.")
        try:
            pairs[name] = json.loads(value)  # a number, true, {...}
        except ValueError:
            pairs[name] = value
    store = Store.open(url, **pairs)
    if store.is_local and not os.path.isdir(store.root):
        advice = "give the path or url that a job had as its store"
        raise InvalidInput(f"there is no folder {store.root}: {advice}.")
    return store


def _show(shown: list[StoreEntry]) -> None:
    for entry in shown:
        when = "unknown"
        if entry.modified is not None:
            when = f"{datetime.fromtimestamp(entry.modified, timezone.utc):%Y-%m-%d %H:%M}"
        state = "unfinished" if entry.needed else ""
        click.echo(f"{entry.kind:6} {entry.bytes:>15,} {when:16} {entry.name} {state}".rstrip())


def main() -> None:
    """The entry point."""
    try:
        group()
    except ElasticError as error:
        click.echo(f"spark-elastic: {type(error).__name__}: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()

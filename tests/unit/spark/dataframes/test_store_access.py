"""Stores by the names that Spark has for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")

from spark_elastic.data.store import Store
from spark_elastic.errors import StoreError
from spark_elastic.estimators.dataframes.store_access import check_store_access, to_spark_url
from tests.memory_store import make_memory_store


@pytest.mark.parametrize(
    ("given", "python", "spark"),
    [
        ("/mnt/jobs", "file:///mnt/jobs/a", "file:///mnt/jobs/a"),
        ("/dbfs/jobs", "file:///dbfs/jobs/a", "dbfs:/jobs/a"),
        ("dbfs:/jobs", "file:///dbfs/jobs/a", "dbfs:/jobs/a"),
        (
            "/Volumes/main/default/v/jobs",
            "file:///Volumes/main/default/v/jobs/a",
            "/Volumes/main/default/v/jobs/a",
        ),
        ("dbfs:/Volumes/main/default/v", "file:///Volumes/main/default/v/a", "/Volumes/main/default/v/a"),
        ("memory://jobs", "memory://jobs/a", "memory://jobs/a"),
    ],
)
def test_spark_and_the_store_name_an_object_alike(given: str, python: str, spark: str) -> None:
    store = Store.open(given)
    assert (store.join("a"), to_spark_url(store, "a")) == (python, spark)


@pytest.mark.parametrize(
    ("url", "spark"),
    [
        ("az://jobs/mine", "abfss://jobs@acme.dfs.core.windows.net/mine/a"),
        ("abfs://jobs", "abfss://jobs@acme.dfs.core.windows.net/a"),
        ("abfss://jobs@other.dfs.core.windows.net/x", "abfss://jobs@other.dfs.core.windows.net/x/a"),
    ],
)
def test_an_azure_container_is_named_for_spark_with_the_account_of_the_options(url: str, spark: str) -> None:
    filesystem: Any = SimpleNamespace(account_name="acme", protocol="abfs")
    assert to_spark_url(Store(url, filesystem, "jobs"), "a") == spark


def test_a_store_that_cannot_delete_the_check_s_object_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise StoreError("Cannot delete 'probes/x' in the store.")

    monkeypatch.setattr(Store, "delete", fail)
    session: Any = SimpleNamespace(_jvm=None)
    check_store_access(session, make_memory_store())
    assert caplog.messages == ["Cannot delete 'probes/x' in the store. Remove it by hand."]

"""Tables by their names in a catalog, with the credentials that it vends: Iceberg REST, and Unity Catalog.

`find_in_catalog` makes a `CatalogTable`, which `read_snapshot` opens. It pickles: workers ask the catalog for the next
credentials. What the user gives as a secret is in no repr and no error. Any thread.
"""

from __future__ import annotations

import json
import os
import pickle
import urllib.error
import urllib.request
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote, urlsplit

from spark_elastic.checks import require_package
from spark_elastic.data.object_store import Lease, RenewedCredentials
from spark_elastic.errors import InvalidInput, StoreError

SECONDS = 10.0  # that Unity Catalog may take for an answer
_VARIABLE = "env:"  # prefix of a property whose value is a variable of each process
_SHOWN = ("uri", "type", "name", "warehouse")  # properties that are no secrets
_UNITY_API = "/api/2.1/unity-catalog"
# Only the catalog knows all commits of a table with one of these.
_CATALOG_COMMITS = ("delta.feature.catalogManaged", "delta.feature.catalogOwned", "delta.coordinatedCommits")
# Errors of pyiceberg after which the same request may succeed.
_AWAY = ("ServiceUnavailableError", "ServerError", "TooManyRequestsError")
# What the user gives in storage_options, for this store or for that of the run.
_OWN_CREDENTIALS = {
    "key", "secret", "token", "anon", "profile", "credential", "account_key", "sas_token", "connection_string",
}  # fmt: skip
# Name in Iceberg -> that of fsspec's client.
_ICEBERG_NAMES = {
    "s3.access-key-id": "key",
    "s3.secret-access-key": "secret",
    "s3.session-token": "token",
    "s3.endpoint": "endpoint_url",
    "gcs.oauth2.token": "token",
    "adls.account-name": "account_name",
    "adls.sas-token": "sas_token",
}


# What Unity Catalog vends by store: option of fsspec -> its name there.
_UNITY_NAMES = {
    "aws_temp_credentials": {"key": "access_key_id", "secret": "secret_access_key", "token": "session_token"},
    "azure_user_delegation_sas": {"sas_token": "sas_token"},
    "gcp_oauth_token": {"token": "oauth_token"},
}


@dataclass(frozen=True)
class CatalogTable:
    """A table by its name."""

    name: str
    uri: str  # of the catalog, for errors
    properties: Mapping[str, Any] = field(repr=False)  # as the user gave them

    def __repr__(self) -> str:
        return f"table {self.name!r} of the catalog {self.uri}"

    def open(self, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """What `read_snapshot` takes. options: the user's. Raises StoreError if the catalog does not answer."""
        try:
            return self._open(options)
        except ConnectionError as error:
            raise StoreError(f"The {self!r} cannot be opened: {error}.") from error

    @abstractmethod
    def _open(self, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]: ...

    @abstractmethod
    def fetch(self) -> Lease:
        """See `Credentials`."""

    def find_values(self) -> dict[str, Any]:
        values = {name: value() if callable(value) else value for name, value in self.properties.items()}
        for name, value in values.items():
            if isinstance(value, str) and value.startswith(_VARIABLE):
                variable = value.removeprefix(_VARIABLE)
                if variable not in os.environ:
                    raise InvalidInput(
                        f"The {name} of the {self} is in the variable {variable}, which this process lacks: set it for "
                        "the driver and all workers (spark.executorEnv), or give a function."
                    )
                values[name] = os.environ[variable]
        return values

    def away(self, error: object) -> ConnectionError:
        return ConnectionError(
            f"the catalog {self.uri} does not answer ({self.hide(error)}): check its uri, and that all hosts reach it"
        )

    def refusal(self, error: object) -> InvalidInput:
        return InvalidInput(
            f"The catalog {self.uri} gives no access to table {self.name!r} ({self.hide(error)}): check its token, "
            "which must be valid as long as the run, and the right to read the table from outside."
        )

    def unknown(self) -> InvalidInput:
        return InvalidInput(f"The catalog {self.uri} has no table {self.name!r}: check the name.")

    def wrong_kind(self, kind: str) -> InvalidInput:
        return InvalidInput(
            f"Table {self.name!r} of the catalog {self.uri} is of the kind {kind}, which has no files of its own: fit "
            f"on spark.table({self.name!r}), or name the table that it selects from."
        )

    def hide(self, error: object) -> str:
        """The first line of an error, without secrets."""
        text = (str(error) or type(error).__name__).partition("\n")[0].rstrip(".")
        for name, value in self.find_values().items():
            if name not in _SHOWN and isinstance(value, str):
                for part in [value, *value.split(":")]:  # an id and a secret
                    text = text.replace(part, "...") if len(part) > 3 else text
        return text

    def add_credentials(self, options: Mapping[str, Any], lease: Lease | None = None) -> dict[str, Any]:
        """Storage options with credentials that are renewed, instead of the user's, which may be for another store."""
        kept = {name: value for name, value in options.items() if name not in _OWN_CREDENTIALS}
        return {**kept, "renewed_credentials": RenewedCredentials(self, lease)}


def find_in_catalog(catalog: Any, table: Any) -> Any:
    """The table of that name in the catalog; without a catalog what was given. catalog: a pyiceberg `Catalog` or a dict
    of properties: {"type": "rest", "uri": ...} as pyiceberg's, or {"type": "unity", "uri": ..., "token": ...}. A value
    may be a function, or "env:NAME", a variable of each process."""
    if catalog is None or table is None:
        return table
    if not isinstance(table, str):
        raise InvalidInput(
            f"With catalog, table is its name there, such as 'prod.digits'; got {type(table).__name__}: leave catalog "
            "out, or give the name."
        )
    if hasattr(catalog, "load_table") and isinstance(getattr(catalog, "properties", None), Mapping):
        properties = {**catalog.properties, "name": catalog.name}
        try:
            pickle.dumps(properties)
        except Exception as error:
            raise InvalidInput(
                f"The credentials of table {table!r} cannot be renewed: workers cannot get the properties of the "
                f"catalog {catalog.name!r} ({error}): give catalog as a dict of plain properties."
            ) from error
        return IcebergTable(table, str(properties.get("uri", catalog.name)), properties, catalog)
    if not isinstance(catalog, Mapping):
        raise InvalidInput(
            "catalog must be a pyiceberg Catalog or a dict of its properties, such as {'type': 'rest', 'uri': ...}; "
            f"got {type(catalog).__name__}."
        )
    uri = str(catalog.get("uri", catalog.get("name", "")))
    if catalog.get("type") != "unity":
        return IcebergTable(table, uri, catalog)
    if urlsplit(uri).scheme not in ("http", "https"):
        raise InvalidInput(f"The uri of a Unity Catalog is http(s)://host; got {uri!r}.")
    uri = uri.rstrip("/")
    return UnityTable(table, uri if "/api/" in uri else uri + _UNITY_API, catalog)


# ---- Iceberg


@dataclass(frozen=True, repr=False)
class IcebergTable(CatalogTable):
    """A table of any catalog that pyiceberg knows; those of REST vend credentials."""

    catalog: Any = None  # the user's; a worker makes one of the properties

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "catalog": None}

    def _open(self, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        table = self._load()
        found = dict(table.io.properties)
        lease = _read_properties(found)
        is_secret = any(name in lease.options for name in ("secret", "token", "sas_token"))
        if not is_secret and (found.get("s3.signer") or found.get("s3.remote-signing-enabled") == "true"):
            raise InvalidInput(
                f"The catalog {self.uri} signs each request for table {self.name!r} and gives no credentials, which "
                "workers need: let it vend credentials, or give storage_options."
            )
        if not is_secret or "rest" not in type(table.catalog).__module__:
            return table, {**lease.options, **options}  # the credentials are the user's
        return table, self.add_credentials(options, lease)

    def fetch(self) -> Lease:
        return _read_properties(self._load().io.properties)

    def _load(self) -> Any:
        load_catalog = require_package("pyiceberg.catalog", "a catalog of Iceberg", "pyiceberg").load_catalog
        exceptions = require_package("pyiceberg.exceptions", "a catalog of Iceberg", "pyiceberg")
        names = "NoSuchTableError", "NoSuchNamespaceError", "NoSuchIdentifierError"
        missing = tuple(getattr(exceptions, name) for name in names)
        catalog: Any = self.catalog
        try:
            if catalog is None:
                values = self.find_values()
                catalog = load_catalog(values.pop("name", "default"), **values)
            return catalog.load_table(self.name)
        except missing as error:
            is_view = False
            with suppress(Exception):  # not all catalogs know views
                is_view = catalog.view_exists(self.name)
            raise (self.wrong_kind("VIEW") if is_view else self.unknown()) from error
        except (exceptions.RESTError, OSError, ValueError) as error:
            is_away = isinstance(error, OSError) or type(error).__name__ in _AWAY
            raise (self.away(error) if is_away else self.refusal(error)) from error


def _read_properties(properties: Mapping[str, Any]) -> Lease:
    options: dict[str, Any] = {}
    ends = None
    for name, value in properties.items():
        known = next((each for each in _ICEBERG_NAMES if name == each or name.startswith(f"{each}.")), None)
        if "expires-at" in name:
            ends = int(value) / 1000
        elif known is not None and value is not None:
            options[_ICEBERG_NAMES[known]] = value
            if known == "adls.sas-token" and name != known:
                options["account_name"] = name.removeprefix(f"{known}.").partition(".")[0]
        elif name in ("s3.region", "client.region"):
            options["client_kwargs"] = {"region_name": value}
    return Lease(options, ends)


# ---- Unity Catalog


@dataclass(frozen=True, repr=False)
class UnityTable(CatalogTable):
    """A table of Delta Lake in Unity Catalog."""

    table_id: str = ""  # known once it is open

    def _open(self, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        facts = self._call(f"tables/{quote(self.name, safe='')}")
        kind, layout = str(facts.get("table_type")), str(facts.get("data_source_format"))
        location = str(facts.get("storage_location") or "")
        if kind not in ("MANAGED", "EXTERNAL") or not location:
            raise self.wrong_kind(kind)
        if layout != "DELTA":
            raise InvalidInput(
                f"Table {self.name!r} of the catalog {self.uri} has the format {layout}: Unity Catalog gives tables of "
                "Delta; for Iceberg give its REST catalog, {'type': 'rest', 'uri': ...}."
            )
        if any(name.startswith(_CATALOG_COMMITS) for name in facts.get("properties") or {}):
            raise InvalidInput(
                f"Only the catalog {self.uri} knows all commits of table {self.name!r} (catalogManaged), which "
                "deltalake cannot open: fit on spark.table(...), or on a copy."
            )
        if urlsplit(location).scheme in ("", "file"):
            return location, dict(options)
        return location, replace(self, table_id=str(facts.get("table_id"))).add_credentials(options)

    def fetch(self) -> Lease:
        vended = self._call("temporary-table-credentials", {"table_id": self.table_id, "operation": "READ"})
        ends = vended.get("expiration_time")
        for store, names in _UNITY_NAMES.items():
            if vended.get(store):
                options = {name: vended[store].get(own) for name, own in names.items()}
                return Lease(options, int(ends) / 1000 if ends else None)
        raise self.refusal("it vends credentials of no known store")

    def _call(self, path: str, body: Any = None) -> Any:
        token = self.find_values().get("token")
        headers = {"Accept": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        try:
            request = urllib.request.Request(f"{self.uri}/{path}", data, headers)
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                reason = f"HTTP {error.code}: no reason"
                with suppress(ValueError, AttributeError):
                    reason = f"HTTP {error.code}: {json.loads(error.read()).get('message')}"
            if error.code == 404 and body is None:
                raise self.unknown() from error
            if error.code >= 500 or error.code == 429:
                raise self.away(reason) from error
            raise self.refusal(reason) from error
        except (OSError, ValueError) as error:
            raise self.away(error) from error


# ---- deltalake

_DELTA_NAMES = {
    "key": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "token": "aws_session_token",
    "endpoint_url": "aws_endpoint_url",
    "account_name": "azure_storage_account_name",
    "account_key": "azure_storage_account_key",
    "sas_token": "azure_storage_sas_token",
}


def to_delta_options(url: str, options: Mapping[str, Any]) -> dict[str, str] | None:
    """What `deltalake` takes for fsspec's options of S3 and Azure; None: it finds its credentials itself."""
    if not urlsplit(url).scheme.startswith(("s3", "ab", "az")):
        return None
    credentials = options.get("renewed_credentials")
    given = {**(credentials.get().options if credentials is not None else {}), **options}
    found = {own: str(given[name]) for name, own in _DELTA_NAMES.items() if given.get(name)}
    region = (given.get("client_kwargs") or {}).get("region_name")
    if region:
        found["aws_region"] = region
    if found.get("aws_endpoint_url", "").startswith("http:"):
        found["aws_allow_http"] = "true"
    return found or None

"""Certificates of the rendezvous server: made for one job, or given; and clients that take exactly one of them.

A client trusts the very certificate that came with the job's key, whoever signed it and whatever the clocks say: no
authority and no name is asked. The private key of one that is made never touches a disk. No state; any thread.
"""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
from dataclasses import dataclass, field

from spark_elastic.config import ElasticConfig
from spark_elastic.errors import InvalidInput

NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which Python does not name
MAKE_SECONDS = 30.0
DAYS = "3650"


@dataclass(frozen=True)
class Certificate:
    """public: the certificate alone, PEM; what clients need. context: with the private key, for the server."""

    public: str
    context: ssl.SSLContext = field(repr=False, compare=False)


def wanted(config: ElasticConfig, encrypted: bool) -> bool:
    """Server and mesh speak TLS. encrypted: what goes where `config.tls` is None."""
    return config.tls if config.tls is not None else encrypted or config.tls_certificate is not None


def chosen(config: ElasticConfig, encrypted: bool) -> Certificate | None:
    """The certificate of a job's server; None for plain HTTP. encrypted: as for `wanted`.

    Raises:
        InvalidInput: no certificate can be read or made.
    """
    if not wanted(config, encrypted):
        return None
    if config.tls_certificate is None or config.tls_key is None:
        return made()
    return given(config.tls_certificate, config.tls_key)


def given(certificate: str, key: str) -> Certificate:
    """A certificate from PEM files; after it, `certificate` may hold the chain that signed it.

    Raises:
        InvalidInput: they cannot be read, or do not belong together.
    """
    try:
        with open(certificate, encoding="ascii") as file:
            return _loaded(file.read(), certificate, key)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise InvalidInput(
            f"tls_certificate {certificate} and tls_key {key} cannot be used ({error}): give a certificate and its "
            "private key without a password, in PEM."
        ) from error


def made() -> Certificate:
    """A new certificate, signed by itself.

    Raises:
        InvalidInput: there is no openssl.
    """
    openssl = shutil.which("openssl")
    if openssl is None:
        raise InvalidInput(
            "tls needs the program openssl on the driver to make a certificate: install it, or give tls_certificate "
            "and tls_key."
        )
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", DAYS, "-subj", "/CN=spark_elastic", "-keyout", "-", "-out", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MAKE_SECONDS, check=False)
    if done.returncode != 0:
        raise InvalidInput(
            f"openssl could not make a certificate ({done.stderr.strip()[-200:]}): give tls_certificate and tls_key."
        )
    descriptor = os.memfd_create("certificate")
    try:
        os.write(descriptor, done.stdout.encode())
        place = f"/proc/self/fd/{descriptor}"
        return _loaded(done.stdout, place, place)
    finally:
        os.close(descriptor)


def only(public: str) -> ssl.SSLContext:
    """A context for clients that refuses every certificate but this one.

    Raises:
        InvalidInput: it is no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | NO_CHECK_TIME
    try:
        context.load_verify_locations(cadata=public)
    except ssl.SSLError as error:
        raise InvalidInput(f"the driver's certificate cannot be read: {error}") from error
    return context


def _loaded(text: str, certificate: str, key: str) -> Certificate:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key, password=_no_password)
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    return Certificate(text[text.index(begin) : text.index(end) + len(end)] + "\n", context)


def _no_password() -> str:
    """Instead of asking at the terminal."""
    raise ValueError("the private key has a password")

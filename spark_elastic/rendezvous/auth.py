"""Mutual proof of the job's key, and the server's TLS certificate.

A client begins each connection with a hello under a random nonce; the server answers with a session id. Each later
request carries the session, a counter that grows, and an HMAC-SHA256 over purpose, method, path, session, counter and
body, cut to half its length (RFC 2104, section 5). The server remembers the last counter of each session, so replays
are refused without clocks; one that forgot a session refuses its requests, and the client dials again. With each
request a client names the sessions whose connections broke, so that none takes effect after its own repeat, or after
what its sender asked for next. Replies are signed over the request's session and counter and their own status and body.
A proxy between may spread the requests.

TLS clients accept exactly the certificate that came with the job's key: they check no authority, name or date.
"""

from __future__ import annotations

import functools
import hmac
import os
import secrets
import shutil
import ssl
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from spark_elastic.config import ElasticConfig
from spark_elastic.errors import InvalidInput

HELLO = "/rendezvous/hello"
SCHEME = "Elastic "
REPLY_HEADER = "x-elastic-signature"
SIGNATURE_DIGITS = 32  # hexadecimal
HIGHEST_COUNT = 10**15  # above all that a header can have


@dataclass(frozen=True)
class Credentials:
    """The authorization header of a request."""

    session: str  # the id that the server gave; in a hello, the client's nonce; 32 characters
    count: int  # grows with each request of a session; 0 in a hello alone
    signature: str  # the first half of an HMAC-SHA256, in `SIGNATURE_DIGITS`

    def header(self) -> str:
        return f"{SCHEME}{self.session}.{self.count}.{self.signature}"


def parse_credentials(header: str) -> Credentials | None:
    """None if the header does not have the form of `Credentials.header`."""
    parts = header.removeprefix(SCHEME).split(".") if header.startswith(SCHEME) else []
    if len(parts) != 3 or len(parts[0]) != 32 or len(parts[2]) != SIGNATURE_DIGITS:
        return None
    session, count, signature = parts
    if not (count.isascii() and count.isdigit() and len(count) <= 15):
        return None
    return Credentials(session, int(count), signature)


def create_id() -> str:
    return secrets.token_hex(16)


def sign_request(key: bytes, path: str, session: str, count: int, body: bytes) -> Credentials:
    signature = _compute_mac(key, f"request\nPOST\n{path}\n{session}\n{count}\n", body)
    return Credentials(session, count, signature)


def request_is_genuine(key: bytes, path: str, credentials: Credentials, body: bytes) -> bool:
    expected = sign_request(key, path, credentials.session, credentials.count, body)
    return _is_same(expected.signature, credentials.signature)


def sign_reply(key: bytes, credentials: Credentials, status: int, body: bytes) -> str:
    return _compute_mac(key, f"reply\n{credentials.session}\n{credentials.count}\n{status}\n", body)


def reply_is_genuine(key: bytes, credentials: Credentials, status: int, body: bytes, signature: str) -> bool:
    return _is_same(sign_reply(key, credentials, status, body), signature)


def _compute_mac(key: bytes, head: str, body: bytes) -> str:
    mac = _begin_mac(key).copy()
    mac.update(head.encode())
    mac.update(body)
    return mac.hexdigest()[:SIGNATURE_DIGITS]


@functools.lru_cache(maxsize=16)
def _begin_mac(key: bytes) -> hmac.HMAC:
    """Its copies take half the time of a new one, and do not let go of the interpreter's lock for small messages."""
    return hmac.new(key, b"spark-elastic/1\n", "sha256")


def _is_same(a: str, b: str) -> bool:
    return hmac.compare_digest(a.encode(), b.encode("utf-8", "replace"))


class Sessions:
    """Their ids begin with the server's own random number, so a replayed hello makes it keep nothing. It keeps the last
    count of each session in use, at most `max_used`; then it takes another number, and all clients say hello again."""

    def __init__(self, max_used: int = 1 << 18) -> None:
        self._max_used = max_used
        self._number = create_id()[:16]
        self._counts: dict[str, int] = {}  # the last count of each session

    def open(self, nonce: str) -> str:
        return self._number + nonce[:16]

    def is_known(self, session: str) -> bool:
        return session.startswith(self._number)

    def use(self, credentials: Credentials) -> bool:
        """Mark the count of a genuine request as used; False for an unknown session or a replay."""
        session, count = credentials.session, credentials.count
        if not self.is_known(session) or count <= self._counts.get(session, 0):
            return False
        if session not in self._counts and len(self._counts) >= self._max_used:
            self._number = create_id()[:16]
            self._counts.clear()
            return False
        self._counts[session] = count
        return True

    def end(self, sessions: Iterable[str]) -> None:
        for session in sessions:
            if self.is_known(session) and (session in self._counts or len(self._counts) < self._max_used):
                self._counts[session] = HIGHEST_COUNT


NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which Python does not name
OPENSSL_TIMEOUT = 30.0
DAYS = "3650"


@dataclass(frozen=True)
class Certificate:
    public: str  # the certificate alone, in PEM; what clients need
    context: ssl.SSLContext = field(repr=False, compare=False)  # with the private key, for the server


def is_tls_enabled(config: ElasticConfig, encrypted: bool) -> bool:
    """Server and mesh speak TLS. encrypted: what goes where `config.tls` is None."""
    return config.tls if config.tls is not None else encrypted or config.tls_certificate is not None


def select_certificate(config: ElasticConfig, encrypted: bool) -> Certificate | None:
    """The certificate of a job's server; None for plain HTTP. Raises InvalidInput: none can be read or made."""
    if not is_tls_enabled(config, encrypted):
        return None
    if config.tls_certificate is None or config.tls_key is None:
        return create_certificate()
    return load_certificate(config.tls_certificate, config.tls_key)


def load_certificate(certificate: str, key: str) -> Certificate:
    """A certificate from PEM files; after it, `certificate` may hold the chain that signed it."""
    try:
        return _load_certificate(Path(certificate).read_text(encoding="ascii"), certificate, key)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise InvalidInput(
            f"tls_certificate {certificate} and tls_key {key} cannot be used ({error}): give a certificate and its "
            "private key without a password, in PEM."
        ) from error


def create_certificate() -> Certificate:
    openssl = shutil.which("openssl")
    if openssl is None:
        raise InvalidInput(
            "tls needs the program openssl on the driver to make a certificate: install it, or give tls_certificate "
            "and tls_key."
        )
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", DAYS, "-subj", "/CN=spark_elastic", "-keyout", "-", "-out", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=OPENSSL_TIMEOUT, check=False)
    if done.returncode != 0:
        raise InvalidInput(
            f"openssl could not make a certificate ({done.stderr.strip()[-200:]}): give tls_certificate and tls_key."
        )
    descriptor = os.memfd_create("certificate")
    try:
        os.write(descriptor, done.stdout.encode())
        place = f"/proc/self/fd/{descriptor}"
        return _load_certificate(done.stdout, place, place)
    finally:
        os.close(descriptor)


def create_pinned_context(public: str) -> ssl.SSLContext:
    """For clients; refuses every certificate but this one. Requests stay signed inside it: TLS only hides them."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | NO_CHECK_TIME
    try:
        context.load_verify_locations(cadata=public)
    except ssl.SSLError as error:
        raise InvalidInput(f"the driver's certificate cannot be read: {error}") from error
    return context


def _load_certificate(text: str, certificate: str, key: str) -> Certificate:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key, password=_refuse_password_prompt)
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    return Certificate(text[text.index(begin) : text.index(end) + len(end)] + "\n", context)


def _refuse_password_prompt() -> str:
    raise ValueError("the private key has a password")

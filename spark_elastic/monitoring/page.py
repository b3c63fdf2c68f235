"""The page of a job as a document: HTML that loads nothing from elsewhere, either live or with a job's data in it.

A live page asks its server for the data every second; a saved one holds them and needs no server. Pure.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from importlib.resources import files
from typing import Any

MAX_TEXT = 4000  # characters of a message or a stack
_SCRIPT = "<script>"  # the only one of the page


def read_page() -> bytes:
    return files("spark_elastic.monitoring").joinpath("status_page.html").read_bytes()


def save_page(status: dict[str, Any]) -> str:
    """The page of a job that is over, with the last status in it."""
    data = encode_json({**status, "saved": True}).decode().replace("<", "\\u003c")
    holder = f'<script type="application/json" id="saved">{data}</script>\n'
    return read_page().decode().replace(_SCRIPT, holder + _SCRIPT, 1)


def encode_json(status: dict[str, Any]) -> bytes:
    """As JSON. Infinities and NaN become null, since browsers refuse JSON that contains them."""
    try:
        return json.dumps(status, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_replace_non_finite(status), separators=(",", ":")).encode()


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def build_content_security_policy(html: bytes) -> str:
    """Allow only the page's own script and style, by their hashes, and data from the same origin."""
    hashes = {tag: _hash_element(html, tag) for tag in (b"script", b"style")}
    return (
        f"default-src 'none'; script-src 'sha256-{hashes[b'script']}'; style-src 'sha256-{hashes[b'style']}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


def _hash_element(html: bytes, tag: bytes) -> str:
    element = re.search(b"<" + tag + b">(.*?)</" + tag + b">", html, re.DOTALL)
    assert element is not None  # of our own page
    return base64.b64encode(hashlib.sha256(element[1]).digest()).decode()

"""The pages of a running job: one HTML page without any external asset, its data as JSON, and the metrics.

Every page is made when it is asked for, in the server's thread.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import partial
from importlib.resources import files

from spark_elastic.clock import Clock
from spark_elastic.observe import metrics
from spark_elastic.observe.chronicle import Chronicle
from spark_elastic.observe.snapshot import snapshot, text
from spark_elastic.rendezvous.status_door import Page


def pages(chronicle: Chronicle, name: str, clock: Clock) -> dict[str, Page]:
    """The pages by their path, relative to the status page."""
    html = files("spark_elastic.observe").joinpath("status_page.html").read_bytes()

    def seen() -> dict[str, object]:
        return snapshot(chronicle, name, clock.now())

    return {
        "": Page("text/html; charset=utf-8", partial(bytes, html), policy(html)),
        "data": Page("application/json", lambda: text(seen())),
        "metrics": Page(metrics.KIND, lambda: metrics.exposition(seen())),
    }


def policy(html: bytes) -> str:
    """Nothing runs but this page's own script and style, named by their hashes; data comes from the same place."""
    hashes = {tag: _hash(html, tag) for tag in (b"script", b"style")}
    return (
        f"default-src 'none'; script-src 'sha256-{hashes[b'script']}'; style-src 'sha256-{hashes[b'style']}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


def _hash(html: bytes, tag: bytes) -> str:
    found = re.search(b"<" + tag + b">(.*?)</" + tag + b">", html, re.DOTALL)
    assert found is not None  # of our own page
    return base64.b64encode(hashlib.sha256(found[1]).digest()).decode()

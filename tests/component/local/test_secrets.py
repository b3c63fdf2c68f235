"""The job's key and the values of `env=` are nowhere to be found: every trace of a real run, here one over TLS, is
searched for them."""

from __future__ import annotations

import base64
import io
import logging
import re
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import cloudpickle
import psutil
import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.clusters.run.call import prepare
from spark_elastic.config import ElasticConfig
from spark_elastic.driver.discovery import CombinedDiscovery
from spark_elastic.driver.job import DriverOptions, supervise
from spark_elastic.driver.ports import Post
from spark_elastic.errors import WorkerFailed
from spark_elastic.protocol.types import SlotSpec
from spark_elastic.rendezvous.auth import create_pinned_context
from spark_elastic.testing.fakes import ProcessLauncher

pytestmark = [pytest.mark.native, pytest.mark.timeout(120)]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SECRET = "marked-7f3a9c51e0"


def train(looked: str) -> None:
    """Ten commits, each durable; then an error of the user, whose traceback is told."""
    import os
    import sys
    import time
    from pathlib import Path

    from spark_elastic.handwritten.elastic_loop import elastic
    from spark_elastic.handwritten.object_state import ObjectState
    from spark_elastic.worker.context import get_context

    assert len(os.environ["TOKEN"]) == 17, "the worker has it"

    def loop(state: Any) -> None:
        assert get_context().group._spec.endpoint.encrypted, "the mesh is inside TLS as well"
        while state.step < 10:
            state.step += 1
            state.commit()
        sys.stdout.write("look now\n")
        while not Path(looked).exists():
            time.sleep(0.05)
        raise ValueError("the end of the script")

    elastic(loop)(ObjectState(step=0))


class SecretSearch(io.StringIO):
    """The stream of a job; it looks at what others can see of the job while its workers wait for `looked`."""

    def __init__(self, looked: Path) -> None:
        super().__init__()
        self.looked = looked
        self.certificate = ""
        self.seen: dict[str, bytes] = {}

    def write(self, text: str) -> int:
        written = super().write(text)
        if "look now" in text and not self.looked.exists():
            self._look_at_processes()
            self.looked.touch()
        return written

    def _look_at_processes(self) -> None:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # it ended meanwhile
                self.seen[f"arguments of {process.pid}"] = " ".join(process.cmdline()).encode()
                self.seen[f"environment of {process.pid}"] = repr(process.environ()).encode()
        found = re.search(r"(https://\S+)(\?token=\S+)", self.getvalue())
        assert found is not None
        for name in ("", "data", "metrics"):
            context = create_pinned_context(self.certificate)
            with closing(urlopen(found[1] + name + found[2], context=context)) as answer:
                self.seen[f"status page {name}"] = answer.read()


class SearchedLauncher(ProcessLauncher):
    key = b""
    traces: SecretSearch

    def start(self, spec: SlotSpec, post: Post) -> None:
        self.key, self.traces.certificate = spec.key, spec.certificate or ""
        super().start(spec, post)


def test_no_trace_of_a_run_shows_its_secrets(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    traces = SecretSearch(tmp_path / "looked")
    config = ElasticConfig(checkpoint_steps=1, journal=str(tmp_path / "journal"), ledger=True, tls=True)
    how = {"env": {"TOKEN": SECRET}, "num_workers": 2, "stdout": traces, "verbose": 2, "run_id": "r"}
    call = prepare(train, ((str(traces.looked),),), {**how, "store": str(tmp_path / "store")}, config)
    assert SECRET not in repr(call)
    launcher = SearchedLauncher(call.program, SystemClock(), call.preload)
    launcher.traces = traces
    driver, limits = DriverOptions(run=call.take_run()), call.make_limits(2)
    with pytest.raises(WorkerFailed) as failed, call.open_output() as listener:
        supervise(launcher, CombinedDiscovery(), driver, limits, call.options.config, call.name, listener)
    assert "the end of the script" in str(failed.value)
    texts = {"log": caplog.text, "stream": traces.getvalue(), "error": repr(failed.value)}
    found = traces.seen | {name: text.encode() for name, text in texts.items()}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    found |= {str(path.relative_to(tmp_path)): path.read_bytes() for path in files}
    assert any("checkpoint" in name for name in found), sorted(found)
    assert "journal" in found
    assert b"\ninfo: " in found["stream"], "verbose=2 tells the log"
    kept = b"".join(text for name, text in found.items() if name.startswith("store/runs/r/logs/"))
    assert re.search(rb"^\S+ \d-0\.\d \[[01]\] look now$", kept, re.MULTILINE), "files of what workers print"
    assert sum(name.startswith("arguments of") for name in found) >= 4, "two slots and their workers"
    assert b"look now" in found["stream"], "the search would find what is there"
    key = launcher.key
    needles = [SECRET.encode(), key, key.hex().encode(), base64.b64encode(key), repr(key).encode()]
    told = {name: needle for name, text in found.items() for needle in needles if needle in text}
    assert not told

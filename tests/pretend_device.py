"""A device of torch, "pretend", that catches forgotten copies without a GPU. Importing this module registers it.

Its extension, pretend_device.cc, is compiled once per version of torch, into build/. Random numbers of the device are
those of the CPU's generator. A process counts in `count_waits` how often it waited for the device.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_suffix(".cc")
FOLDER = SOURCE.parents[1] / "build" / "pretend"


class Stream:
    """All work of the device is in order, whatever the stream."""

    def wait_event(self, event: Event) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        synchronize()


class Event:
    """A moment in the work of the device."""

    def record(self, stream: Stream | None = None) -> None:
        """Work is in order."""

    def synchronize(self) -> None:
        synchronize()


def synchronize(device: Any = None) -> None:
    """Complete the copies to the host that do not block."""
    torch.ops.pretend.synchronize()


def count_waits() -> int:
    return int(torch.ops.pretend.count_waits())


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    yield


def build() -> Path:
    """The compiled extension."""
    key = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {sys.version}".encode()).hexdigest()[:16]
    library = FOLDER / f"pretend-{key}.so"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    root = Path(torch.__file__).parent
    partial = library.with_suffix(".partial")
    abi = int(torch.compiled_with_cxx11_abi())
    command = ["g++", "-std=c++17", "-O0", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", str(SOURCE)]
    for folder in (root / "include", root / "include" / "torch" / "csrc" / "api" / "include"):
        command += ["-isystem", str(folder)]
    command += [f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-o", str(partial)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"pretend_device.cc was not compiled:\n{done.stderr[-3000:]}")
    partial.rename(library)


def _make_module() -> Any:
    module: Any = types.ModuleType("torch.pretend")
    module.Stream, module.Event, module.stream, module.synchronize = Stream, Event, stream, synchronize
    module.current_stream = lambda device=None: Stream()
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


def _register() -> None:
    torch.utils.rename_privateuse1_backend("pretend")
    torch._register_device_module("pretend", _make_module())
    torch.ops.load_library(str(build()))
    # So that modules keep their parameters when they move, as they do on a GPU.
    torch.__future__.set_swap_module_params_on_conversion(True)


if torch._C._get_privateuse1_backend_name() != "pretend":
    _register()

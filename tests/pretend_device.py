"""A device of torch, "pretend", that catches forgotten copies without a GPU. Importing this module registers it.

Its extension, pretend_device.cc, is compiled once per version of torch, into build/. A process counts in `count_waits`
how often it waited for the device.

Not as on a GPU: modules exchange the contents of their parameters when they move, so hooks that a parameter had before
are lost, and nothing may hold a weak reference to it; LSTM, GRU, sparse gradients and torch.compile do not work.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_suffix(".cc")
FOLDER = SOURCE.parents[1] / "build" / "pretend"


class Stream(torch.Stream):
    """A queue of work of the device."""

    def __new__(cls, device: Any = None, priority: int = 0, **options: Any) -> Any:
        return super().__new__(cls, **(options or {"device": "pretend", "priority": priority}))


class Event(torch.Event):
    """A moment in the work of a stream."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        return super().__new__(cls, "pretend", enable_timing=enable_timing, blocking=blocking)


class device:
    """A context in which a device is the current one; there is one."""

    def __init__(self, device: Any) -> None:
        self.idx = 0

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def count_waits() -> int:
    return int(torch.ops.pretend.count_waits())


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
    ops = torch.ops.pretend
    module: Any = types.ModuleType("torch.pretend")
    module.Stream, module.Event, module.device = Stream, Event, device
    module.stream = lambda chosen: chosen  # a stream is a context
    module.synchronize = lambda device=None: torch.accelerator.synchronize()
    module.current_stream = lambda device=None: torch.accelerator.current_stream()
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.empty_cache = lambda: None
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.get_rng_state = lambda device=None: ops.get_rng_state()
    module.set_rng_state = lambda state, device=None: ops.set_rng_state(state)
    module.get_rng_state_all = lambda: [ops.get_rng_state()]
    module.set_rng_state_all = lambda states: ops.set_rng_state(states[0])
    module.manual_seed = module.manual_seed_all = lambda seed: ops.manual_seed(seed % 2**63)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


def _register() -> None:
    torch.utils.rename_privateuse1_backend("pretend")
    torch.ops.load_library(str(build()))
    torch._register_device_module("pretend", _make_module())
    torch.utils.generate_methods_for_privateuse1_backend()
    # So that modules keep their parameters when they move, as they do on a GPU.
    torch.__future__.set_swap_module_params_on_conversion(True)


if torch._C._get_privateuse1_backend_name() != "pretend":
    _register()

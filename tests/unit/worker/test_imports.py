"""A module follows the import of a framework."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FRAMEWORK = "import sys\nloaded_before = 'follower' in sys.modules\n"
PROGRAM = """
from spark_elastic.worker import imports
imports.FOLLOWERS.clear()
imports.FOLLOWERS["framework"] = "follower"
{first}
imports.import_followers()
imports.import_followers()
import framework, sys
assert not framework.loaded_before
assert sys.modules["follower"].seen == "framework"
assert type(framework.__spec__.loader).__name__ == "SourceFileLoader"
assert sum(type(finder).__name__ == "_FollowingFinder" for finder in sys.meta_path) == 1
"""


@pytest.mark.parametrize("first", ["", "import framework"])
def test_the_following_module_is_imported_after_its_framework(tmp_path: Path, first: str) -> None:
    (tmp_path / "framework.py").write_text(FRAMEWORK)
    follower = "import framework\nframework.loaded_before\nseen = framework.__name__\n"
    (tmp_path / "follower.py").write_text(follower)
    program = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n" + PROGRAM.format(first=first)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

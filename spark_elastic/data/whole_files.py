"""Files that appear whole or not at all, as far as their file system has hard links and renames. Any thread."""

from __future__ import annotations

import errno
import os
import uuid
from typing import Any

TEMPORARY = ".part-"  # how the names of files begin that are still being written
# What mounts of object stores answer where they have no hard links, and some where they have no rename.
_NO_SUCH_OPERATION = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP}


def create(path: str, data: bytes) -> bool:
    """A new local file, unless there is one of that name; of several who try at once, one gets True."""
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    temporary = _temporary(folder)
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if not _is_unsupported(error):
            raise
        return _create_without_link(path, data)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return True


def replace(filesystem: Any, path: str, data: bytes, *, local: bool) -> None:
    """Write a file of an fsspec file system, in place of the one of that name."""
    temporary = _temporary(path.rpartition("/")[0])
    try:
        with filesystem.open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            if local:
                os.fsync(file.fileno())
        _rename(filesystem, temporary, path, data, local=local)
    except BaseException:
        if filesystem.exists(temporary):
            filesystem.rm_file(temporary)
        raise


def _temporary(folder: str) -> str:
    return f"{folder}/{TEMPORARY}{uuid.uuid4().hex}"


def _create_without_link(path: str, data: bytes) -> bool:
    """The name is taken at once, and the content comes a moment later."""
    try:
        with open(path, "xb") as file:
            file.write(data)
    except FileExistsError:
        return False
    return True


def _rename(filesystem: Any, temporary: str, path: str, data: bytes, *, local: bool) -> None:
    try:
        if local:
            os.replace(temporary, path)
            return
        # HDFS does not rename onto a file; for a moment there is none, never a part of one.
        if filesystem.exists(path):
            filesystem.rm_file(path)
        filesystem.mv(temporary, path)
    except (OSError, NotImplementedError) as error:
        if not _is_unsupported(error):
            raise
        # Without a rename a reader may see a part for a moment; checksums in what points to the file tell it.
        with filesystem.open(path, "wb") as file:
            file.write(data)
        filesystem.rm_file(temporary)


def _is_unsupported(error: Exception) -> bool:
    """Whether the file system has no such operation at all, rather than that this one failed."""
    return isinstance(error, NotImplementedError) or getattr(error, "errno", None) in _NO_SUCH_OPERATION

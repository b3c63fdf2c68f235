"""What is used in a `with` statement and ends with it. No state of its own; any thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

T = TypeVar("T", bound="Closing")


class Closing(ABC):
    """`with thing: ...` closes it at the end."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

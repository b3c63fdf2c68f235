"""Requests that were asked for before travel as two bytes: the same numbers on every rank, since all hear all.

Pure; owned by one thread. All ranks learn the same requests in the same order, and forget all of them together.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spark_elastic.ops.rounds.request import Request

CAPACITY = 4096
_NEW = 0xFFFF
_EXPIRED = 0xFFFE
_JOIN = 0xFFFD
_NUMBER = struct.Struct("<H")
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Word:
    """One thing that a rank says in a round: a request, that it has joined (after so many steps), or that an operation
    waited too long."""

    request: Request | None = None
    expired: str | None = None
    joined: int = 0


class Vocabulary:
    """Numbers for requests."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._numbers: dict[Request, int] = {}
        self._requests: list[Request] = []

    def write(self, words: Sequence[Word]) -> bytes:
        return b"".join(map(self._written, words))

    def _written(self, word: Word) -> bytes:
        if word.request is None:
            if word.expired is not None:
                return _long(_EXPIRED, word.expired.encode())
            return _NUMBER.pack(_JOIN) + _LENGTH.pack(word.joined)
        number = self._numbers.get(word.request)
        return _long(_NEW, word.request.to_json()) if number is None else _NUMBER.pack(number)

    def read(self, texts: Sequence[bytes]) -> list[list[Word]]:
        """What all ranks said in one round; then their new requests are known."""
        said = [list(self._words(text)) for text in texts]
        for words in said:
            for word in words:
                self._learn(word.request)
        if len(self._requests) > self._capacity:
            self._numbers.clear()
            self._requests.clear()
        return said

    def _learn(self, request: Request | None) -> None:
        if request is not None and request not in self._numbers:
            self._numbers[request] = len(self._requests)
            self._requests.append(request)

    def _words(self, text: bytes) -> Iterator[Word]:
        at = 0
        while at < len(text):
            (number,) = _NUMBER.unpack_from(text, at)
            at += _NUMBER.size
            if number < _JOIN:
                yield Word(self._requests[number])
                continue
            (length,) = _LENGTH.unpack_from(text, at)
            at += _LENGTH.size
            if number == _JOIN:
                yield Word(joined=length)
            else:
                told = text[at : at + length]
                at += length
                yield Word(Request.from_json(told)) if number == _NEW else Word(expired=told.decode())


def _long(number: int, text: bytes) -> bytes:
    return _NUMBER.pack(number) + _LENGTH.pack(len(text)) + text

"""`transformation_fn` in processes and threads: the same columns in the same order, errors, and deaths."""

from __future__ import annotations

import io
import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from spark_elastic.data.loader import StepRows
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.transformation import BatchTransformation, RowRandom
from spark_elastic.training.transformation_pool import TransformationPool
from tests.pages import blocks
from tests.sources import ROOT

STEPS, ROWS, SIDE = 12, 20, 8
PLAN = DataPlan((STEPS * ROWS,), ROWS, seed=1, lanes=1)
ALONE: Any = SimpleNamespace(rank=0, size=1)
Columns = dict[str, Any]


class Stream:
    """Steps that are there at once."""

    def __init__(self, columns: Columns) -> None:
        self._columns, self._step = columns, 0

    def __iter__(self) -> Iterator[StepRows]:
        return self

    def is_ready(self) -> bool:
        return True

    def __next__(self) -> StepRows:
        if self._step == STEPS:
            raise StopIteration
        rows = slice(self._step * ROWS, (self._step + 1) * ROWS)
        columns = {name: column[rows] for name, column in self._columns.items()}
        self._step += 1
        return StepRows(3, self._step - 1, ROWS, np.arange(STEPS * ROWS)[rows], columns)


def _make_pictures() -> Columns:
    from PIL import Image

    numbers = np.random.default_rng(0).integers(0, 256, (STEPS * ROWS, SIDE, SIDE, 3), dtype=np.uint8)
    found = np.empty(len(numbers), object)
    for place, each in enumerate(numbers):
        file = io.BytesIO()
        Image.fromarray(each).save(file, "PNG")
        found[place] = file.getvalue()
    return {"picture": found, "y": np.arange(len(numbers))}


def _decode_and_flip(columns: Columns, rng: RowRandom | None) -> Columns:
    from PIL import Image

    pictures = np.stack([np.asarray(Image.open(io.BytesIO(each))) for each in columns["picture"]])
    if rng is not None:
        flipped = rng.uniform(size=(1, 1, 1)) < 0.5
        pictures = np.where(flipped, pictures[:, :, ::-1], pictures)
    return {
        "picture": pictures.transpose(0, 3, 1, 2),
        "y": columns["y"],
        "pid": [os.getpid()] * len(pictures),
    }


def _transform(
    function: Any,
    columns: Columns,
    workers: int,
    kind: str = "process",
    wanted: Sequence[str] = ("picture", "y"),
) -> list[StepRows]:
    pool = TransformationPool(BatchTransformation(function, tuple(wanted), 9), workers, kind)
    with closing(pool):
        pool.start()
        stream: Any = Stream(columns)
        return [step.finish() for step in pool.transform(stream, PLAN, ALONE, augments=True)]


@pytest.mark.parametrize(("workers", "kind"), [(1, "process"), (3, "process"), (2, "thread")])
def test_workers_give_the_steps_that_the_training_thread_would(workers: int, kind: str) -> None:
    columns = _make_pictures()
    expected = _transform(_decode_and_flip, columns, 0)
    found = _transform(_decode_and_flip, columns, workers, kind)
    assert [rows.step for rows in found] == list(range(STEPS))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.columns["picture"].shape == (ROWS, 3, SIDE, SIDE)
        assert ours.columns["picture"].flags.writeable
        for name in ("picture", "y"):
            np.testing.assert_array_equal(ours.columns[name], theirs.columns[name])


def run_documented(number: int, **names: Any) -> dict[str, Any]:
    """The names that a program of the section about images, audio and text defines, and those that it uses."""
    section = "def decode", "def encode_texts"
    (program,) = (each for each in blocks("images-audio-text.md", "python") if section[number] in each)
    exec(compile(program, "images-audio-text.md", "exec"), names)
    return names


def test_documented_pictures_are_decoded_cropped_and_flipped_by_row() -> None:
    fitted: dict[str, Any] = {}
    decode = run_documented(0, ElasticTorchEstimator=lambda _, **params: fitted.update(params))["decode"]
    assert fitted["transformation_fn"] is decode
    columns = _make_pictures()
    plain = decode(columns, None)["picture"]
    assert plain.shape == (STEPS * ROWS, 3, 64, 64)
    assert plain.dtype == np.float32
    assert 0.9 < plain.max() <= 1
    steps = _transform(decode, columns, fitted["transformation_workers"])
    augmented = np.concatenate([rows.columns["picture"] for rows in steps])
    rng = RowRandom(9, 3, np.arange(STEPS * ROWS))  # the stream's epoch
    corners, flips = rng.integers(0, 9, size=2), rng.uniform() < 0.5
    unmoved = (corners == 4).all(axis=1)
    assert 0 < unmoved.sum() < STEPS * ROWS
    expected = np.where(flips[:, None, None, None], plain[..., ::-1], plain)
    np.testing.assert_array_equal(augmented[unmoved], expected[unmoved])
    (line,) = re.findall(r"`(\[augment\(.*?\])`", (ROOT / "docs" / "images-audio-text.md").read_text())
    names = {"augment": lambda p, own: own.random(), "np": np, "pictures": plain[:5]}
    drawn = eval(line, {**names, "rng": RowRandom(9, 3, np.arange(5))})
    again = eval(line, {**names, "rng": RowRandom(9, 3, np.arange(5)[::-1])})
    assert drawn == again[::-1]
    assert len(set(drawn)) == 5


def test_documented_tokenizers_make_numbers_of_texts() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    texts = np.array(["the cat sat", "the dog ran and ran and ran and ran"] * (STEPS * ROWS // 2), object)
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["[UNK]", "[PAD]"])
    tokenizer.train_from_iterator(texts, trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")
    tokenizer.enable_padding(pad_id=1, length=6)
    tokenizer.enable_truncation(6)
    ids = tokenizer.get_vocab()
    first = [ids[word] for word in ["the", "cat", "sat", "[PAD]", "[PAD]", "[PAD]"]]
    for name, made in (("encode_texts", tokenizer), ("tokenize_texts", whole)):
        function = run_documented(1, tokenizer=made, np=np)[name]
        rows = _transform(function, {"text": texts}, 1, wanted=("text",))[0].columns["text"]
        assert rows.shape == (ROWS, 6 if made is tokenizer else 128)
        assert rows[0, :6].tolist() == first
        assert rows[1, :3].tolist() == [ids[word] for word in ["the", "dog", "ran"]]


def test_all_processes_work_and_none_is_the_training_process() -> None:
    def note_process(columns: Columns) -> Columns:
        import time

        time.sleep(0.02)
        return {**columns, "pid": [os.getpid()] * len(columns["y"])}

    steps = _transform(note_process, {"y": np.arange(STEPS * ROWS)}, 2, wanted=("pid",))
    processes = {int(rows.columns["pid"][0]) for rows in steps}
    assert len(processes) == 2
    assert os.getpid() not in processes


def test_an_error_of_the_function_arrives_with_the_lines_of_its_process() -> None:
    def fail(columns: Columns) -> Columns:
        raise KeyError("colour")

    with pytest.raises(KeyError, match="colour") as raised:
        _transform(fail, {"y": np.arange(STEPS * ROWS)}, 1)
    assert "in fail" in raised.value.__notes__[0]


class Stubborn(Exception):
    """Pickles, and cannot be restored."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{reason} ({code})")


def test_an_error_that_cannot_be_restored_arrives_as_its_text() -> None:
    def fail(columns: Columns) -> Columns:
        raise Stubborn(3, "no such colour")

    with pytest.raises(RuntimeError, match=r"Stubborn: no such colour \(3\)"):
        _transform(fail, {"y": np.arange(STEPS * ROWS)}, 1)


def test_a_killed_process_is_one_sentence() -> None:
    def die(columns: Columns) -> Columns:
        os.kill(os.getpid(), signal.SIGKILL)
        return columns

    with pytest.raises(RuntimeError, match="a process of transformation_fn has ended with exit code -9"):
        _transform(die, {"y": np.arange(STEPS * ROWS)}, 2)


def test_an_abandoned_stream_leaves_the_workers_to_the_next() -> None:
    columns = _make_pictures()
    pool = TransformationPool(BatchTransformation(_decode_and_flip, ("picture", "y"), 9), 2, "process")
    with closing(pool):
        pool.start()
        started = {child.pid for child in psutil.Process().children()}
        stream: Any = Stream(columns)
        for step in pool.transform(stream, PLAN, ALONE, augments=True):
            if step.finish().step == 2:
                break
        again: Any = Stream(columns)
        steps = [step.finish().step for step in pool.transform(again, PLAN, ALONE, augments=True)]
        assert steps == list(range(STEPS))
        assert {child.pid for child in psutil.Process().children()} == started

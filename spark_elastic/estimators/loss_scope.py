"""Tries, on the driver, whether a loss depends on how the rows of a step are divided over workers (R9, scope of P2).

The loss of some rows is compared with the losses of two parts of them. A sum over rows, or their mean, gives the same
gradient in any division; a loss that compares rows (contrastive, triplets, Dice over a batch) gives other weights for
other numbers of workers, while its values look right. Knows no framework. The caller's thread.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from spark_elastic.data.loader import StepRows
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.two_rows import read_rows
from spark_elastic.training.spec import TrainSpec
from spark_elastic.training.trainer import describe_dependent_layers

log = logging.getLogger("spark_elastic")

# The rows of `read_rows` that a loss is tried on: each comes twice, so that labels that are compared have pairs.
_ROWS = np.array([0, 1, 0, 0, 2, 1, 3, 2])
_DRAWS = 8  # tries of a loss that draws random numbers
STEP_ADVICE = "set loss_scope='step' to compare all rows of each step"
TOLERANCE, TOLERANCE_16 = 1e-3, 3e-2  # of rounding, relative to the loss; the second for numbers of 16 bits


class PartLoss(NamedTuple):
    """The loss of some rows."""

    total: float  # as `LossResult` has it
    denominator: float  # likewise
    slope: float  # derivative of the total in one direction, the same for all parts

    @property
    def value(self) -> float:
        """As the user's function returned it."""
        return self.total / (self.denominator or 1.0)

    @property
    def value_slope(self) -> float:
        return self.slope / (self.denominator or 1.0)


@dataclass(frozen=True)
class Trial:
    """A loss that is to be tried on some rows."""

    # The loss of a part of the rows, given the seed for what it draws, and whether the outputs (or the weights) are
    # moved: where those of a new model are all zero, a loss that compares them shows nothing.
    measure: Callable[[slice, int, bool], PartLoss]
    # Finds the layer whose output for a row depends on other rows; None: there is none that is not warned of anyway.
    find_layer: Callable[[], str | None]
    # Whether `measure` computes the loss alone, of outputs that the model has computed of all rows.
    is_apart: bool
    tolerance: float  # how far equal losses may differ by rounding


class _Finding(NamedTuple):
    couples: bool  # whether rows are compared; else it is a sum, or a mean with other weights than the rows
    rows: int  # that showed it
    values: tuple[float, float, float]  # of these rows, and of two parts


def check_loss_scope(spec: TrainSpec, what: str, advice: str, prepare: Callable[[StepRows], Trial]) -> None:
    """Refuse a loss that compares rows unless `loss_scope` says whose; warn once of what else depends on the division.

    Args:
        what: the parameter that computes the loss.
        advice: what a user may do instead.

    Raises:
        InvalidInput: in one sentence, with the losses that show it.
    """
    config = spec.config
    most = min(len(_ROWS), config.batch_size)
    # With one worker, and with virtual shares, a step is cut alike for any number of workers.
    is_alike, over_step = bool(config.shares) or config.max_workers == 1, config.loss_scope == "step"
    sample = None if most == 1 or (is_alike and not over_step) else read_rows(spec)
    if sample is None:
        return
    columns = {name: each[_ROWS[:most]] for name, each in sample.items()}
    rows = StepRows(0, 0, most, np.arange(most), columns)
    finding, layer, is_tried = None, None, True
    try:
        trial = prepare(rows)
        for moved, count in product((False, True), sorted({2, most})):
            if finding is not None and finding.couples:
                break
            try:
                finding = _find_coupling(trial, count, moved) or finding
            except Exception as error:  # a loss may need more rows, or other outputs
                is_tried = False
                log.debug("the loss was not tried on parts of %d rows: %r", count, error)
        if trial.is_apart or (finding is not None and finding.couples):
            layer = trial.find_layer()
    except Exception as error:  # what fails on these rows, or in this process alone, says nothing
        if isinstance(error, InvalidInput) and over_step:
            raise
        log.debug("the loss was not tried on parts of rows: %r", error)
        return
    if layer is not None and not is_alike:
        log.warning("%s", describe_dependent_layers([(layer, "it mixes the rows of a batch")]))
    if over_step and finding is None and is_tried:
        log.warning(
            "loss_scope='step' is for a loss that compares rows, and %s does not, as far as a few rows show: leave it "
            "out, since it has outputs gathered and most of them computed twice",
            what,
        )
    if over_step or finding is None or (layer is not None and not trial.is_apart):
        return
    whole, first, rest = finding.values
    shown = f"of {finding.rows} rows of the data it is {whole:.5g}, of two parts of them {first:.5g} and {rest:.5g}"
    if finding.couples and config.loss_scope is None:
        raise InvalidInput(
            f"{what} compares the rows of a batch with each other ({shown}), so that the trained weights would depend "
            f"on the number of workers: {advice}, or set loss_scope='worker' to let each worker compare its own rows."
        )
    how = "is neither the mean of the rows' losses nor one for each"
    if finding.couples:
        how = "compares the rows of a batch"
    warning = "the trained weights depend on the number of workers through %s, which %s (%s)"
    log.warning(warning, what, how, shown)


def _find_coupling(trial: Trial, count: int, moved: bool) -> _Finding | None:
    """What the first `count` rows show: nothing if the losses of two parts of them, and their slopes, add up."""
    parts, tolerance = (slice(0, count), slice(0, count // 2), slice(count // 2, count)), trial.tolerance
    gaps: list[float] = []
    finding, measured = None, "total"
    for seed in range(_DRAWS):
        whole, first, rest = found = [trial.measure(part, seed, moved) for part in parts]
        if not gaps and tolerance < TOLERANCE_16:  # slopes of 16 bits are too rough
            measured = max("total", "slope", key=lambda name: abs(_compute_gap(found, name)))
        gap = _compute_gap(found, measured)
        if abs(gap) <= tolerance or (gaps and gap * gaps[0] < 0):
            return None
        if not gaps:
            if not math.isclose(trial.measure(parts[0], seed, moved).total, whole.total, rel_tol=1e-6):
                return None  # it counts calls, or draws from a generator of its own
            couples = not _is_mean_or_sum(whole, first, rest, tolerance)
            finding = _Finding(couples, count, (whole.value, first.value, rest.value))
        gaps.append(gap)
        if len(gaps) == 2 and abs(gap - gaps[0]) <= 1e-6:
            return finding  # it draws nothing
    is_clear = abs(statistics.fmean(gaps)) > 3 * statistics.stdev(gaps)
    return finding if is_clear else None


def _compute_gap(found: Sequence[PartLoss], measured: str) -> float:
    """How far the parts are from the whole, relative to all three; 0 if one of them is NaN or infinite."""
    whole, first, rest = (getattr(each, measured) for each in found)
    gap, scale = whole - first - rest, abs(whole) + abs(first) + abs(rest)
    return gap / scale if scale and math.isfinite(scale) else 0.0


def _is_mean_or_sum(whole: PartLoss, first: PartLoss, rest: PartLoss, tolerance: float) -> bool:
    """Whether the loss is a sum over rows, or a mean with weights that follow from the rows, such as those of classes:
    its slope then has the same weights. Those of Dice follow from the outputs."""
    apart = first.value - rest.value
    share = (whole.value - rest.value) / apart if apart else -1.0
    for one, other in ((1.0, 1.0), (share, 1.0 - share)):
        pairs = (
            (whole.value, one * first.value, other * rest.value),
            (whole.value_slope, one * first.value_slope, other * rest.value_slope),
        )
        rounding = [tolerance * sum(map(abs, each)) for each in pairs]
        gaps = [abs(all_ - a - b) for all_, a, b in pairs]
        if min(one, other) >= 0 and gaps[0] <= rounding[0] and gaps[1] <= rounding[1]:
            return True
    return False

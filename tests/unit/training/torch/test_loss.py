"""R8: any split of a batch has the gradient of the whole; what a loss is given, and how losses of outputs add up."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from spark_elastic.data.loader import StepRows
from spark_elastic.data.manifest import Column
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import START
from spark_elastic.training.batch import LocalBatch
from spark_elastic.training.torch.loss import ModelLoss, MultiOutputLoss, RowLoss
from spark_elastic.training.torch.spec import BatchBuilder
from tests.fake_group import FakeFabric

ROWS, CLASSES = 12, 4
DRAW = torch.Generator().manual_seed(5)
X = torch.randn(ROWS, 6, dtype=torch.float64, generator=DRAW)
CLASS = torch.tensor([0, 1, 2, 3, 0, -100, 2, 2, -100, 0, 1, 3])
FEW = CLASS.clamp(min=0)
BEYOND = torch.where(CLASS < 0, 255, CLASS)
REAL = torch.randn(ROWS, CLASSES, dtype=torch.float64, generator=DRAW)
SHARE = torch.rand(ROWS, CLASSES, dtype=torch.float64, generator=DRAW)
BY_CLASS = torch.tensor([1.0, 3.0, 0.5, 2.0], dtype=torch.float64)
WEIGHTS = torch.rand(ROWS, dtype=torch.float64, generator=DRAW) + 0.1
MODEL = nn.Linear(6, CLASSES, dtype=torch.float64)


def compute_row_loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output - label).abs().sum(1)


def mean_of_rows(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return compute_row_loss(output, label).mean()


class FocalLoss(nn.CrossEntropyLoss):
    """The user's own: it needs the loss of each row."""

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        each = F.cross_entropy(output, label, reduction="none")
        rows = (1 - torch.exp(-each)) ** 2 * each
        return rows if self.reduction == "none" else getattr(rows, self.reduction)()


# name -> (the user's loss, what one process takes for the whole batch, label)
Case = tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], torch.Tensor]
CASES: dict[str, Case] = {
    name: (loss, loss, label)
    for name, loss, label in (
        ("cross entropy, ignored rows", nn.CrossEntropyLoss(), CLASS),
        ("weighted cross entropy", nn.CrossEntropyLoss(weight=BY_CLASS), CLASS),
        ("smoothed", nn.CrossEntropyLoss(weight=BY_CLASS, label_smoothing=0.1), CLASS),
        ("ignored beyond the weights", nn.CrossEntropyLoss(weight=BY_CLASS, ignore_index=255), BEYOND),
        ("class probabilities", nn.CrossEntropyLoss(weight=BY_CLASS), SHARE),
        ("summed cross entropy", nn.CrossEntropyLoss(weight=BY_CLASS, reduction="sum"), CLASS),
        ("function cross_entropy", F.cross_entropy, CLASS),
        ("function nll_loss", F.nll_loss, CLASS),
        ("partial cross_entropy", partial(F.cross_entropy, weight=BY_CLASS, label_smoothing=0.1), CLASS),
        ("partial nll_loss", partial(F.nll_loss, weight=BY_CLASS), CLASS),
        ("partial of squares, summed", partial(F.mse_loss, reduction="sum"), REAL),
        ("partial of another, summed", partial(F.soft_margin_loss, reduction="sum"), REAL),
        ("the user's own class", FocalLoss(), FEW),
        ("mean squares", nn.MSELoss(), REAL),
        ("summed squares", nn.MSELoss(reduction="sum"), REAL),
        ("Huber", nn.HuberLoss(), REAL),
        ("binary", nn.BCEWithLogitsLoss(pos_weight=BY_CLASS), SHARE),
        ("divergence", nn.KLDivLoss(reduction="batchmean"), SHARE),
        ("margins", nn.MultiMarginLoss(weight=BY_CLASS), FEW),
        ("a mean of one's own", mean_of_rows, REAL),
    )
}
CASES["one loss per row"] = (compute_row_loss, mean_of_rows, REAL)
CASES["unreduced"] = (nn.MSELoss(reduction="none"), nn.MSELoss(), REAL)


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def compute_in_parts(
    loss: RowLoss, label: torch.Tensor, weights: torch.Tensor | None, cuts: Sequence[int]
) -> torch.Tensor:
    """As the ranks do it: sums scaled by the planned rows, divided by the true denominator at the end."""
    model = copy.deepcopy(MODEL)
    denominator = 0.0
    for first, last in pairwise([0, *cuts, ROWS]):
        if first < last:
            part = None if weights is None else weights[first:last]
            summed = loss(model(X[first:last]), (label[first:last],), part)
            (summed.total / ROWS).backward()  # type: ignore[no-untyped-call]
            denominator += summed.denominator
    return gradient(model) * (ROWS / (denominator or 1.0))


CUTS = st.lists(st.integers(0, ROWS), max_size=5).map(sorted)


@pytest.mark.parametrize("name", CASES)
@given(cuts=CUTS)
def test_r08_any_split_gives_the_gradient_of_the_whole_batch(name: str, cuts: list[int]) -> None:
    loss, reference, label = CASES[name]
    model = copy.deepcopy(MODEL)
    reference(model(X), label).backward()  # type: ignore[no-untyped-call]
    whole = gradient(model)
    parts = compute_in_parts(RowLoss(loss), label, None, cuts)
    assert (parts - whole).abs().max() <= 1e-12 * whole.abs().max()


@pytest.mark.parametrize(
    "name", ["weighted cross entropy", "mean squares", "function cross_entropy", "one loss per row"]
)
@given(cuts=CUTS)
def test_r08_sample_weights_enter_sum_and_denominator(name: str, cuts: list[int]) -> None:
    loss, _, label = CASES[name]
    model = copy.deepcopy(MODEL)
    if label is CLASS:
        by_class = BY_CLASS if name.startswith("weighted") else torch.ones(CLASSES, dtype=torch.float64)
        rows = F.cross_entropy(model(X), label, by_class, reduction="none")
        divisors = torch.where(label >= 0, by_class[label.clamp(min=0)], 0.0)
    else:
        output = model(X)
        of_rows = loss is compute_row_loss
        rows = compute_row_loss(output, label) if of_rows else (output - label).pow(2).mean(1)
        divisors = torch.ones(ROWS, dtype=torch.float64)
    ((rows * WEIGHTS).sum() / (divisors * WEIGHTS).sum()).backward()  # type: ignore[no-untyped-call]
    whole = gradient(model)
    parts = compute_in_parts(RowLoss(loss, weighted=True), label, WEIGHTS, cuts)
    assert (parts - whole).abs().max() <= 1e-12 * whole.abs().max()


@pytest.mark.parametrize(
    "loss", [nn.MSELoss(), nn.HuberLoss(), nn.BCELoss(), F.binary_cross_entropy], ids=str
)
@pytest.mark.parametrize("kind", [torch.int64, torch.bool])
def test_regression_losses_take_labels_of_any_number_type(loss: Any, kind: torch.dtype) -> None:
    output, label = torch.rand(4, 1, requires_grad=True), torch.tensor([0, 1, 1, 0])
    found = RowLoss(loss)(output, (label.to(kind),), None)
    expected = loss(output, label.unsqueeze(1).float())
    assert torch.allclose(found.total / found.denominator, expected)
    found.total.backward()  # type: ignore[no-untyped-call]


TOKENS = torch.tensor([[0, 1, 1, 1], [0, 0, -100, 1], [-100, 1, 0, 0]])


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])), nn.NLLLoss()])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bool])
@pytest.mark.parametrize("label", [torch.tensor([0, 1, 1, 1]), TOKENS])
def test_class_labels_may_have_any_number_type(loss: Any, kind: torch.dtype, label: torch.Tensor) -> None:
    """Spark's StringIndexer gives doubles; an array or a vector has those of tokens."""
    label = label.clamp(min=0) if kind is torch.bool else label
    output = torch.rand(len(label), 2, *label.shape[1:])
    found = RowLoss(loss)(output, (label.to(kind),), None)
    assert found.total / found.denominator == pytest.approx(float(loss(output, label)))


def test_token_class_labels_of_a_planned_divisor_must_be_whole_numbers() -> None:
    """It is agreed on before the forward pass, when they cannot be told from shares of classes."""
    loss = RowLoss(nn.CrossEntropyLoss(), label="words", ahead=True)
    says = r"column 'words' has arrays of classes as float64, .* cast it to array<int>"
    with pytest.raises(InvalidInput, match=says):
        loss(torch.rand(3, 2, 4), (torch.ones(3, 4, dtype=torch.float64),), None)
    assert loss(torch.rand(3, 2, 4), (torch.full((3, 2, 4), 0.5),), None).denominator == 3


@pytest.mark.parametrize("wrong", [0.5, float("nan")])
def test_a_class_label_that_is_no_whole_number_is_named_with_its_column(wrong: float) -> None:
    label = torch.tensor([0.0, wrong])
    says = f"column 'kind' has {wrong:g}, and CrossEntropyLoss takes whole numbers"
    with pytest.raises(InvalidInput, match=says):
        RowLoss(nn.CrossEntropyLoss(), label="kind")(torch.rand(2, 2), (label,), None)


def test_tokens_are_counted_not_rows() -> None:
    """(n, C, t) outputs: rows with many ignored tokens weigh less."""
    output = torch.randn(6, 3, 5, dtype=torch.float64, requires_grad=True)
    label = torch.randint(0, 3, (6, 5))
    label[1, 1:] = -100
    whole = torch.autograd.grad(nn.CrossEntropyLoss()(output, label), output)[0]
    loss = RowLoss(nn.CrossEntropyLoss())
    sums = [loss(output[part], (label[part],), None) for part in (slice(0, 2), slice(2, 6))]
    total = sum(s.total for s in sums) / sum(s.denominator for s in sums)
    assert torch.allclose(torch.autograd.grad(total, output)[0], whole, rtol=0, atol=1e-14)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ctc_loss_is_supported(reduction: str) -> None:
    """Output (n, t, C): the user's own wrapper turns it as CTC wants it."""

    class Ctc(nn.CTCLoss):
        def forward(self, output: Any, label: Any) -> Any:  # type: ignore[override]
            turned = output.log_softmax(2).transpose(0, 1)
            rows = len(label)
            return super().forward(turned, label, torch.full((rows,), 8), torch.full((rows,), 3))

    output = torch.randn(4, 8, 5, dtype=torch.float64, requires_grad=True)
    label = torch.randint(1, 5, (4, 3))
    whole = Ctc(reduction=reduction)(output, label)
    loss = RowLoss(Ctc(reduction=reduction))
    sums = [loss(output[part], (label[part],), None) for part in (slice(0, 1), slice(1, 4))]
    denominator = sum(s.denominator for s in sums) or 1.0
    mean = sum(float(s.total.detach()) for s in sums) / denominator
    assert mean == pytest.approx(float(whole.detach()), rel=1e-12)


def test_the_users_loss_object_is_not_changed() -> None:
    loss = nn.MSELoss()
    RowLoss(loss)(REAL, (SHARE,), None)
    assert loss.reduction == "mean"


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    ("loss", "output", "says"),
    [
        (lambda output, label: 3.0, REAL, "returned float"),
        (lambda output, label: output[:5, 0], REAL, "5 numbers for 12 rows"),
        (nn.MSELoss(), REAL[:, :1, None], r"made \(12, 1, 12\) out of the model's output \(12, 1, 1\)"),
        (lambda output, label: (output - label) ** 2, REAL[:, :1], r"made \(12, 12\) out of"),
    ],
)
def test_losses_of_a_wrong_shape_are_named(loss: Any, output: torch.Tensor, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        RowLoss(loss)(output, (REAL[:, 0],), None)


def test_sample_weights_need_a_loss_per_row() -> None:
    with pytest.raises(InvalidInput, match="sample_weight_col"):
        RowLoss(mean_of_rows, weighted=True)(REAL, (SHARE,), WEIGHTS)


@pytest.mark.parametrize("loss", [F.mse_loss, nn.HuberLoss(), nn.BCEWithLogitsLoss()])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_a_label_per_row_fits_an_output_of_one_column(loss: Any, weights: torch.Tensor | None) -> None:
    """Alone torch would compare each row's output with every row's label."""
    output, label = REAL[:, :1], SHARE[:, 0]
    ours = RowLoss(loss, weights is not None)(output, (label,), weights)
    theirs = RowLoss(loss, weights is not None)(output[:, 0], (label,), weights)
    assert torch.allclose(ours.total, theirs.total)
    assert ours.denominator == theirs.denominator


def test_a_partial_that_its_module_does_not_know_is_named() -> None:
    with pytest.raises(InvalidInput, match="a partial of mse_loss with beta, which MSELoss does not take"):
        RowLoss(partial(F.mse_loss, beta=2.0))


@pytest.mark.parametrize(
    "loss", [F.mse_loss, nn.HuberLoss(), nn.BCELoss(), F.binary_cross_entropy_with_logits]
)
def test_labels_of_numbers_get_the_type_of_the_output(loss: Any) -> None:
    """A model of 16 bits gets labels of 32, which some of torch's losses refuse."""
    output = SHARE.bfloat16().requires_grad_()
    found = RowLoss(loss)(output, (SHARE.float(),), None).total
    found.backward()
    assert torch.equal(found, RowLoss(loss)(output, (SHARE.bfloat16(),), None).total)


INPUT = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
PART = LocalBatch(4, np.arange(4), (INPUT,), (torch.zeros(4),), None)


class Pair(NamedTuple):
    far: torch.Tensor
    near: torch.Tensor


class NetReturning(torch.nn.Module):
    def __init__(self, structure: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.layer, self.structure = torch.nn.Linear(3, 1), structure

    def forward(self, x: torch.Tensor) -> Any:
        far = self.layer(x)[:, 0]
        return self.structure(far, far / 2)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize(
    ("structure", "far"),
    [
        (lambda far, near: (far, near), lambda output: output[0]),
        (Pair, lambda output: output.far),
        (lambda far, near: {"far": far, "near": near}, lambda output: output["far"]),
    ],
)
def test_a_loss_gets_the_structure_that_the_model_returns(structure: Any, far: Any, precision: Any) -> None:
    """In float32, whatever the forward pass was computed in; metrics are of each member."""
    seen: list[torch.Tensor] = []

    def loss(output: Any, label: torch.Tensor) -> torch.Tensor:
        seen.append(far(output))
        return (seen[-1] - label) ** 2

    scored = ModelLoss(loss, weighted=False, precision=precision)(NetReturning(structure), PART)
    assert seen[0].dtype is torch.float32
    assert torch.equal(scored.outputs[0], seen[0])
    assert torch.equal(scored.outputs[1], seen[0] / 2)


def test_outputs_by_name_are_labels_in_order() -> None:
    model = NetReturning(lambda far, near: {"far": far, "near": near})
    share = LocalBatch(4, np.arange(4), (INPUT,), (torch.zeros(4), torch.ones(4)), None)

    def score(*labels: str) -> Any:
        losses = MultiOutputLoss({label: (torch.nn.MSELoss(), 1.0) for label in labels}, weighted=False)
        losses.begin(FakeFabric(1).group(0), share, START)
        return losses(model, share)

    def score_means(*labels: str) -> dict[str, float]:
        return {name: total / divisor for name, (total, divisor) in score(*labels).logged.items()}

    logged = score_means("far", "near")
    far = model(INPUT)["far"].detach()
    expected = {"loss_far": float((far**2).mean()), "loss_near": float(((far / 2 - 1) ** 2).mean())}
    assert logged == pytest.approx(expected)
    assert score_means("a", "b")["loss_a"] == pytest.approx(logged["loss_far"])
    with pytest.raises(InvalidInput, match="the model returns far, near, and label_cols names near, far"):
        score("near", "far")
    model.structure = lambda far, near: {"far": far}
    with pytest.raises(InvalidInput, match="loss has 2 losses, but the model returned 1"):
        score("far", "near")


@pytest.mark.parametrize("at_once", [6, 4, 1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_r08_the_loss_of_each_output_does_not_depend_on_the_split(at_once: int, reduction: str) -> None:
    """Class weights and row weights: each row counts for something else."""
    x, y = torch.arange(18.0).reshape(6, 3).sin(), torch.tensor([0, 0, 1, 2, 2, 1])
    weights = torch.tensor([1.0, 2.0, 3.0, 1.0, 1.0, 5.0])
    loss = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0, 0.5]), reduction=reduction)
    share = LocalBatch(6, np.arange(6), (x,), (y, x[:, :1]), weights)
    model: Any = lambda x: (x, x[:, :1])  # noqa: E731 - stands for a module
    losses = MultiOutputLoss({"y": (loss, 1.0), "w": (torch.nn.MSELoss(), 0.5)}, weighted=True)
    losses.begin(FakeFabric(1).group(0), share, START)
    parts = [(part, losses(model, part)) for part in share.micro_batches(at_once)]
    logged = [scored.logged["loss_y"] for _, scored in parts]
    told = sum(total for total, _ in logged) / sum(divisor for _, divisor in logged)

    by_row = torch.nn.functional.cross_entropy(x, y, loss.weight, reduction="none") * weights
    divisor = (loss.weight[y] * weights).sum() if reduction == "mean" else 1.0
    assert told == pytest.approx(float(by_row.sum() / divisor), rel=1e-6)
    assert sum(float(scored.total) for _, scored in parts) / len(share) == pytest.approx(told, rel=1e-6)


def test_an_in_place_operation_on_a_feature_does_not_change_the_label() -> None:
    """An autoencoder that begins with an activation in place."""
    x = np.array([[-1.0, 2.0]], np.float32)
    columns = BatchBuilder((Column("x", "float32", (2,)),), ("x",), None, torch.float32)
    share = columns.build(StepRows(0, 0, 1, np.arange(1), {"x": x}))
    torch.nn.functional.relu_(share.features[0])
    assert share.labels[0].tolist() == [[-1.0, 2.0]]


def test_numbers_that_int64_does_not_hold_are_refused() -> None:
    columns = BatchBuilder((Column("id", "uint64"),), (), None, torch.float32)

    def build(number: int) -> list[int]:
        rows = StepRows(0, 0, 1, np.arange(1), {"id": np.array([number], np.uint64)})
        found: list[int] = columns.build(rows).features[0].tolist()
        return found

    assert build(2**63 - 1) == [2**63 - 1]
    says = "uint64 has 9223372036854775813, and the model's whole numbers are int64"
    with pytest.raises(InvalidInput, match=says):
        build(2**63 + 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_model_of_16_bits_gets_labels_and_weights_of_32(dtype: torch.dtype) -> None:
    """Else class 257 would be class 256, and a step's weights would not be read."""
    columns = BatchBuilder((Column("x", "float64"),), ("y",), "w", dtype)
    arrays = {"x": np.array([0.5, 1.5]), "y": np.array([257.0, 1001.0]), "w": np.array([0, 3])}
    share = columns.build(StepRows(0, 0, 2, np.arange(2), arrays))
    assert share.weights is not None
    assert (share.features[0].dtype, share.has_weight) == (dtype, True)
    for tensor in (share.labels[0], share.weights):
        assert tensor.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    assert share.labels[0].tolist() == [257.0, 1001.0]


@pytest.mark.parametrize("loss", [torch.nn.functional.huber_loss, torch.nn.functional.mse_loss])
def test_a_loss_of_the_user_s_gets_outputs_and_labels_of_one_type_from_a_model_of_16_bits(loss: Any) -> None:
    model = torch.nn.Linear(1, 1).bfloat16()
    columns = BatchBuilder((Column("x", "float64", (1,)),), ("y",), None, torch.bfloat16)
    arrays = {"x": np.array([[0.5], [1.5]]), "y": np.array([257.0, 1001.0])}
    part = columns.build(StepRows(0, 0, 2, np.arange(2), arrays))
    found = ModelLoss(lambda output, label: loss(output[:, 0], label, reduction="none"), False)(model, part)
    found.total.backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.bfloat16

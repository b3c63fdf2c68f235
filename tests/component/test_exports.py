"""Exported torch models give the predictions of the module, for any number of rows, in the libraries that load them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import tqdm
from safetensors import safe_open
from safetensors.torch import load_model

pytest.importorskip("pyspark")

from spark_elastic.data.manifest import Column
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.predictor import ModuleWithTransformation, TorchPredictor
from spark_elastic.estimators.saving import pack
from spark_elastic.estimators.torch_model import ElasticTorchModel
from spark_elastic.estimators.transformer import FitSummary
from spark_elastic.integrations.export import export_onnx, export_program, export_safetensors

# torch imports its tracer, and onnxscript what it translates.
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),  # torch's own exporter
]


@pytest.fixture(autouse=True)
def no_monitor_of_progress_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's exporter to ONNX shows bars, whose first one starts a thread that lives as long as the process."""
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)


COLUMNS = (Column("x", "float64", (4,)), Column("kind", "int32"))


class Net(torch.nn.Module):
    """Of numbers and a class; two outputs. Other predictions in training, by its dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = torch.nn.Embedding(3, 4)
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.ReLU())
        self.head, self.score = torch.nn.Linear(8, 2), torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.body(x + self.kinds(kind))
        return self.head(found), self.score(found)[:, 0]


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def _make_model(net: torch.nn.Module, *columns: Column) -> ElasticTorchModel:
    summary = FitSummary(run_id="r", data="version 3 of the Delta table t", data_digest="ab")
    return ElasticTorchModel(TorchPredictor(pack(net), columns or COLUMNS), summary)


def _make_rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(count)
    x = rng.normal(size=(count, 4)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(rng.integers(0, 3, count))


def test_an_exported_program_takes_any_number_of_rows(net: Net, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    torch.export.save(export_program(_make_model(net)), path)
    loaded = torch.export.load(path).module()
    for count in (1, 2, 7):
        rows = _make_rows(count)
        for ours, theirs in zip(loaded(*rows), net(*rows), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_an_onnx_file_gives_the_predictions_by_the_names_of_the_columns(net: Net, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    export_onnx(_make_model(net), path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for count in (1, 7):
        x, kind = _make_rows(count)
        found = session.run(["output_0", "output_1"], {"x": x.numpy(), "kind": kind.numpy()})
        for ours, theirs in zip(found, net(x, kind), strict=True):
            np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_safetensors_hold_the_weights_and_what_they_were_trained_on(net: Net, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    export_safetensors(_make_model(net), path)
    other = Net().eval()
    load_model(other, path)
    rows = _make_rows(3)
    torch.testing.assert_close(other(*rows), net(*rows))
    with safe_open(path, "pt") as file:
        assert file.metadata()["data"] == "version 3 of the Delta table t"


def test_a_transformation_needs_inputs_to_trace_the_module_with() -> None:
    module = torch.nn.Linear(3, 1)
    packed = pack(ModuleWithTransformation(module, dict), module)
    model = ElasticTorchModel(TorchPredictor(packed, (Column("x", "object"),)), FitSummary())
    with pytest.raises(InvalidInput, match=r"the model has a transformation_fn, .*: pass inputs"):
        export_program(model)
    with pytest.raises(InvalidInput, match="inputs need 2 rows or more"):
        export_program(model, [np.zeros((1, 3))])
    x = torch.randn(5, 3)
    torch.testing.assert_close(export_program(model, [np.zeros((2, 3))]).module()(x), module(x))

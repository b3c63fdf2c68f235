"""A fitted torch model in the forms that other programs load: torch.export, ONNX, safetensors.

The module itself is exported, in evaluation mode and on the CPU, with a number of rows that stays free. A
`transformation_fn` is not part of it: the module's inputs are then what that makes of the columns. Runs in the caller's
thread; `onnx`, `onnxscript` and `safetensors` are imported where they are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spark_elastic.checks import require_package
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.predictor import TorchPredictor
from spark_elastic.estimators.torch_model import ElasticTorchModel

ROWS = 2  # of the example that is traced; torch takes a dimension of 1 for a constant


def export_program(model: ElasticTorchModel, inputs: Sequence[Any] | None = None) -> Any:
    """A `torch.export.ExportedProgram`, for `torch.export.save`.

    Args:
        inputs: arrays of at least two rows, one for each input of the module; needed with a `transformation_fn`.

    Raises:
        InvalidInput: inputs are needed, or of fewer rows.
    """
    tensors = make_inputs(model, inputs)
    rows = torch.export.Dim("rows", min=1)
    return torch.export.export(model.getModel(), tensors, dynamic_shapes=tuple({0: rows} for _ in tensors))


def export_onnx(model: ElasticTorchModel, path: str | Path, inputs: Sequence[Any] | None = None) -> None:
    """Write an ONNX file. Its inputs have the names of the feature columns, its outputs "output_0", "output_1" ...

    inputs: as for `export_program`.
    """
    require_package("onnxscript", "export_onnx", "onnx onnxscript")
    program = export_program(model, inputs)
    outputs = len(program.graph_signature.user_outputs)
    torch.onnx.export(
        program,
        f=str(path),
        dynamo=True,
        input_names=[column.name for column in _get_predictor(model).columns],
        output_names=[f"output_{number}" for number in range(outputs)],
        external_data=False,
        verbose=False,
    )


def export_safetensors(model: ElasticTorchModel, path: str | Path) -> None:
    """Write the weights by name, as `state_dict` names them, and the fit's run and data as metadata."""
    safetensors = require_package("safetensors.torch", "export_safetensors", "safetensors")
    summary = model.summary
    about = {
        "format": "pt",
        "run_id": summary.run_id,
        "data": summary.data,
        "data_digest": summary.data_digest,
    }
    safetensors.save_model(model.getModel(), str(path), metadata=about)


def make_inputs(model: ElasticTorchModel, inputs: Sequence[Any] | None = None) -> tuple[torch.Tensor, ...]:
    """Tensors that the module takes: those given, or zeros in the shapes of the feature columns.

    Raises:
        InvalidInput: as `export_program`.
    """
    predictor = _get_predictor(model)
    if inputs is None:
        if predictor.needs_sample:
            raise InvalidInput(
                "the model has a transformation_fn, so its columns do not say what the module takes: pass inputs, the "
                f"arrays that transformation_fn makes of {ROWS} rows of the feature columns."
            )
        inputs = [np.zeros((ROWS, *column.shape), column.dtype) for column in predictor.columns]
    if any(len(each) < ROWS for each in inputs):
        raise InvalidInput(f"inputs need {ROWS} rows or more: torch takes a single row for a constant.")
    return tuple(predictor.make_tensor(np.asarray(each)) for each in inputs)


def _get_predictor(model: ElasticTorchModel) -> TorchPredictor:
    if not isinstance(model, ElasticTorchModel):
        raise InvalidInput(f"only an ElasticTorchModel can be exported; got {type(model).__name__}.")
    predictor = model._predictor
    assert isinstance(predictor, TorchPredictor)
    return predictor

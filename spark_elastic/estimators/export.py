"""Fitted torch models for other programs: the public name of `integrations.export`."""

from spark_elastic.integrations.export import export_onnx, export_program, export_safetensors

__all__ = ["export_onnx", "export_program", "export_safetensors"]

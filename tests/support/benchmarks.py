"""The scripts in benchmarks/, which import each other by their bare names, as modules."""

import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"
SUITES = (
    *("gemm_bf16", "gemm_models", "gemm_decode", "gemm_fp8", "gemm_fp8_layers", "fusion_dense"),
    *("gemm_layouts", "gemm_extremes", "gemm_unaligned", "gemm_other", "gemm_grouped"),
    *("gemm_grouped_fused", "gemm_few_columns"),
)


def script(name):
    """The module of one script."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)

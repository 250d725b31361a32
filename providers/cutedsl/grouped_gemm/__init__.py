"""Grouped GEMM families."""

from kernel_api.providers.cutedsl.grouped_gemm import sm80, sm90

__all__ = ["sm80", "sm90"]

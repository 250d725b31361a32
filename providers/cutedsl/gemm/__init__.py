"""Dense GEMM families."""

from kernel_api.providers.cutedsl.gemm import sm80, sm90, sm90_repacked

__all__ = ["sm80", "sm90", "sm90_repacked"]

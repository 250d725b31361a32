"""Dense GEMM families."""

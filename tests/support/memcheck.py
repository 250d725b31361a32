"""A small set of problems and kernels for compute-sanitizer, which is slow.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python tests/support/memcheck.py [PROBLEM]...

Sizes are no multiples of tiles, and nothing lies behind a tensor that is torch's to lend: what a
kernel reads or writes too far is in no allocation.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

import kernel_api as ka
from kernel_api import epilogue as ep
from kernel_api import fusions, masks
from kernel_api._description import described
from kernel_api.tuning._data import random_arguments

BF16, F32, F8, I8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8
#: Of what is run, so that a kernel that only checks pointers of the first tile is seen.
M, N, K, E, T = 133, 200, 272, 5, 197


def empty(*shape: int, element: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=element, device="meta")


def product(
    element: torch.dtype, out: torch.dtype, M: int = M, N: int = N, K: int = K, **options: Any
) -> Any:
    A, B = empty(M, K, element=element), empty(N, K, element=element).t()
    return ka.GemmArguments(A, B, empty(M, N, element=out), **options)


def turned(element: torch.dtype, out: torch.dtype, **options: Any) -> Any:
    """Of operands that 8-bit and tf32 tensor cores do not take as they lie."""
    A, B = empty(K, 144, element=element).t(), empty(K, 208, element=element)
    return ka.GemmArguments(A, B, empty(144, 208, element=out), **options)


def scaled(mode: ka.ScaleMode, *shape: int, of: torch.Tensor) -> ka.ScaledOperand:
    return ka.ScaledOperand(of, empty(*shape, element=F32), mode)


def by_blocks() -> Any:
    A, B = empty(M, K, element=F8), empty(N, K, element=F8).t()
    return ka.GemmArguments(
        scaled(ka.ScaleMode.BLOCK_1x128, M, 3, of=A),
        scaled(ka.ScaleMode.BLOCK_128x128, 3, 2, of=B),
        empty(M, N),
    )


def by_rows() -> Any:
    A, B = empty(M, K, element=F8), empty(N, K, element=F8).t()
    per_row = ka.ScaleMode.PER_ROW
    return ka.GemmArguments(scaled(per_row, M, of=A), scaled(per_row, N, of=B), empty(M, N))


def rows_of_groups(element: torch.dtype, anywhere: bool) -> Any:
    B = empty(E, N, K, element=element).mT
    out = empty(T, N, element=BF16 if element is not I8 else torch.int32)
    offsets = empty(E, element=torch.int32)
    return ka.GroupedGemmArguments(
        empty(T, K, element=element), list(B) if anywhere else B, out, offsets
    )


def sums_of_groups(anywhere: bool) -> Any:
    out = empty(E, K, N)
    return ka.GroupedGemmArguments(
        empty(T, K).t(), empty(T, N), list(out) if anywhere else out, empty(E, element=torch.int32)
    )


def attention(
    S_q: int,
    S_kv: int,
    element: torch.dtype = BF16,
    queries: torch.dtype | None = None,
    **options: Any,
) -> Any:
    """queries: The type of Q, if not that of K and V."""
    B, H, H_kv, D = 2, 4, 2, 64

    def heads(count: int, rows: int, element: torch.dtype = element) -> torch.Tensor:
        return empty(B, rows, count, D, element=element).transpose(1, 2)

    Q, out = heads(H, S_q, queries or element), empty(B, S_q, H, D).transpose(1, 2)
    lse = empty(B, H, S_q, element=F32)
    return ka.SdpaArguments(
        Q, K=heads(H_kv, S_kv), V=heads(H_kv, S_kv), out=out, lse=lse, **options
    )


def packed_in_pages() -> Any:
    """One sequence has several tiles of rows."""
    B, H, H_kv, D, pages, size = 5, 8, 2, 64, 40, 64
    T, integers = 133, functools.partial(empty, element=torch.int32)
    K, V = (empty(pages, size, H_kv, D).transpose(1, 2) for _ in range(2))
    return ka.SdpaArguments(
        *(empty(T, H, D), K, V, empty(T, H, D), empty(H, T, element=F32)),
        cu_seqlens_q=integers(B + 1),
        max_seqlen_q=100,
        page_table=integers(B, pages // B),
        seq_lens_kv=integers(B),
        mask=masks.Causal("bottom_right"),
    )


def latent_vectors() -> Any:
    B, H, S_kv, D, D_v = 2, 20, 1001, 576, 512
    K, out = empty(B, 1, S_kv, D), empty(B, H, 1, D_v)
    return ka.SdpaArguments(empty(B, H, 1, D), K, K[..., :D_v], out, empty(B, H, 1, element=F32))


def gradients() -> Any:
    args = attention(133, 197, mask=masks.Causal())
    given = {name: empty(*one.shape) for name, one in zip("QKV", args.operands, strict=False)}
    return ka.SdpaBackwardArguments(
        *(args.tensors[i] for i in range(4)),
        dO=torch.empty_like(args.out.tensor),
        lse=args.outputs["lse"].tensor,
        **{f"d{name}": one for name, one in given.items()},
        mask=masks.Causal(),
    )


def norm() -> Any:
    return ka.RmsNormArguments(empty(M, N), empty(M, N), empty(N), rstd=empty(M, element=F32))


def norm_gradients() -> Any:
    x, rstd, weight = empty(M, N), empty(M, element=F32), empty(N)
    return ka.RmsNormBackwardArguments(
        empty(M, N), x, empty(M, N), rstd, weight, dweight=empty(N, element=F32)
    )


def layer_norm_gradients() -> Any:
    x, mean, rstd = empty(M, N), empty(M, element=F32), empty(M, element=F32)
    return ka.LayerNormBackwardArguments(
        empty(M, N), x, empty(M, N), mean, rstd, empty(N), dbias=empty(N, element=F32)
    )


def elementwise() -> Any:
    epilogue = ka.EpilogueArguments(
        lambda x, bias: (x + bias, ep.sum(x, -1), ep.sum(x, -2)),
        bias=empty(N),
        rows=empty(M, element=F32),
        columns=empty(N, element=F32),
    )
    return ka.ElementwiseArguments(empty(M, N), empty(M, N), epilogue=epilogue)


def indexed(kind: Any) -> Any:
    matrices = empty(2 * T, N), empty(T, N)
    if kind is ka.ScatterRowsArguments:
        matrices = matrices[::-1]
    return kind(*matrices, empty(T, 3, element=torch.int32), empty(T, 3, element=F32))


def grouping() -> Any:
    places = (empty(*shape, element=torch.int32) for shape in ((E,), (T, 3), (3 * T,)))
    weights = empty(T, 3, element=F32), empty(3 * T, element=F32)
    return ka.GroupRowsArguments(empty(T, 3, element=torch.int64), *places, *weights)


PROBLEMS: dict[str, Callable[[], Any]] = {
    "grouped rows": grouping,
    "gathered rows": lambda: indexed(ka.GatherRowsArguments),
    "scattered rows": lambda: indexed(ka.ScatterRowsArguments),
    "product": lambda: product(BF16, BF16),
    "unaligned product": lambda: product(BF16, BF16, 67, 77, 53),
    "few rows": lambda: product(BF16, BF16, 3, 200, 1000),
    "one tile": lambda: product(BF16, F32, 67, 72, 4104),
    "tf32": lambda: product(F32, F32, fp32_precision="tf32"),
    "three times tf32": lambda: product(F32, F32, fp32_precision="tf32x3"),
    "turned tf32": lambda: turned(F32, F32, fp32_precision="tf32"),
    "turned 8 bits": lambda: turned(F8, BF16),
    "turned 8-bit integers": lambda: turned(I8, torch.int32),
    "8 bits by rows": by_rows,
    "8 bits by blocks": by_blocks,
    "8-bit integers": lambda: product(I8, torch.int32),
    "residual": lambda: fusions.gemm_residual(
        empty(M, K), empty(N, K).t(), out=empty(M, N), C=empty(M, N), bias=empty(N)
    ),
    "amax": lambda: fusions.gemm_amax(
        empty(M, K), empty(N, K).t(), out=empty(M, N), amax=empty(element=F32)
    ),
    "swiglu": lambda: fusions.gemm_swiglu(
        empty(M, K), empty(2 * 192, K).t(), out=empty(M, 192), preactivation=empty(M, 384)
    ),
    "groups": lambda: rows_of_groups(BF16, anywhere=False),
    "groups anywhere": lambda: rows_of_groups(BF16, anywhere=True),
    "groups of 8 bits": lambda: rows_of_groups(F8, anywhere=False),
    "groups of 8 bits anywhere": lambda: rows_of_groups(F8, anywhere=True),
    "groups of 8-bit integers": lambda: rows_of_groups(I8, anywhere=False),
    "sums of groups": lambda: sums_of_groups(anywhere=False),
    "sums of groups anywhere": lambda: sums_of_groups(anywhere=True),
    "attention": lambda: attention(133, 197, mask=masks.Causal()),
    "attention of 8 bits": lambda: attention(133, 197, F8),
    "few queries": lambda: attention(3, 1001),
    "few queries to 8 bits": lambda: attention(3, 1001, F8),
    "16-bit queries to 8 bits": lambda: attention(133, 197, F8, BF16),
    "few 16-bit queries to 8 bits": lambda: attention(3, 1001, F8, BF16),
    "few queries to latent vectors": latent_vectors,
    "packed queries in pages": packed_in_pages,
    "gradients of attention": gradients,
    "norm": norm,
    "norm and transform": lambda: ka.RmsNormArguments(
        empty(M, 208), empty(M, 208), empty(208), hadamard=True, global_amax=empty(element=F32)
    ),
    "layer norm": lambda: ka.LayerNormArguments(empty(M, N), empty(M, N), empty(N)),
    "norm in 8 bits": lambda: fusions.rmsnorm_quantize(
        empty(M, 384), out=empty(M, 384, element=F8), scale=empty(M, 3, element=F32)
    ),
    "layer norm in 8 bits": lambda: fusions.layernorm_quantize(
        empty(M, N), out=empty(M, N, element=F8), scale=empty(M, element=F32), mode="row"
    ),
    "rows in 8 bits": lambda: fusions.quantize(
        empty(M, 1000), out=empty(M, 1000, element=F8), scale=empty(M, element=F32), mode="row"
    ),
    "gradients of a norm": norm_gradients,
    "gradients of a layer norm": layer_norm_gradients,
    "element-wise": elementwise,
}


def chosen(args: Any, cc: Any) -> list[Any]:
    """The first kernel of every kind that is offered."""
    kinds: dict[Any, Any] = {}
    for kernel in ka.get_kernels(args, cc=cc, providers=["cutedsl"]):
        kinds.setdefault(_kind(kernel), kernel)
    return list(kinds.values())


def _kind(kernel: Any) -> tuple[Any, ...]:
    design = kernel.metadata.design
    cluster = [*getattr(design, "cluster_shape", ()), 1, 1, 1][:3]
    named = (
        *("schedule", "swap_ab", "stream_k", "even_k", "parallel", "scheduler", "stages_kv"),
        "cluster",
    )
    split = getattr(design, "split_k", 1) > 1
    return kernel.family, split, cluster[2], *(getattr(design, name, None) for name in named)


def drawn(args: Any) -> Any:
    """The same with random numbers, on the GPU."""
    return random_arguments(described(args), "cuda:0", 0)


def main(names: list[str]) -> None:
    for name in names or PROBLEMS:
        args = drawn(PROBLEMS[name]())
        for kernel in chosen(args, None):
            kernel.run(args)
            torch.cuda.synchronize()
            print(f"{name}: {kernel.metadata.kernel_name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

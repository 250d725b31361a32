"""Hypothesis strategies for the arguments of matrix products."""

from __future__ import annotations

import hypothesis.strategies as st
import torch

import kernel_api as ka
from kernel_api.dtypes import dtype
from support.data import FLOATS, INTEGERS, strided_empty, with_scales

#: What some kernel takes, more often; what none takes, now and then.
_COMMON = ("bfloat16", "float16", "float32")
_ODD = (*FLOATS, *INTEGERS, "bool", "complex64")

extents = st.one_of(st.integers(0, 70), st.sampled_from((127, 129, 255, 256, 513)))
element_types = st.one_of(st.sampled_from(_COMMON), st.sampled_from(_ODD))
pads = st.sampled_from((0, 0, 0, 1, 3, 8, 16))
offsets = st.sampled_from((0, 0, 0, 1, 4, 8, 64))


def _scales_of(*blocked: ka.ScaleMode) -> st.SearchStrategy[ka.ScaleMode | None]:
    return st.sampled_from((None, ka.ScaleMode.PER_TENSOR, ka.ScaleMode.PER_ROW, *blocked))


scales = st.one_of(
    st.just({}),
    st.just({}),
    st.sampled_from((ka.ScaleMode.PER_TENSOR, ka.ScaleMode.PER_ROW)).map(
        lambda mode: {"A": mode, "B": mode}
    ),
    st.fixed_dictionaries(
        {
            "A": _scales_of(ka.ScaleMode.BLOCK_1x128),
            "B": _scales_of(ka.ScaleMode.BLOCK_128x128),
            "out": _scales_of(),
        }
    ),
)


@st.composite
def aligned_extents(draw: st.DrawFn) -> int:
    return 16 * draw(st.integers(1, 8))


@st.composite
def gemm_signatures(draw: st.DrawFn) -> ka.GemmArguments:
    """Arguments of any type, rank, layout, padding, offset and size, on the CPU or meta."""
    device = draw(st.sampled_from(("meta", "meta", "cpu")))
    some = draw(st.sampled_from((extents, aligned_extents())))
    M, N, K = draw(some), draw(some), draw(some)
    batch = draw(st.sampled_from(((), (), (1,), (3,))))
    kind = draw(element_types)
    types = (
        kind,
        draw(st.sampled_from((kind, kind, kind, "float16"))),
        draw(st.sampled_from((kind, kind, "float32", "bfloat16"))),
    )
    shapes = ((*batch, M, K), (*batch, K, N), (*batch, M, N))
    plain = draw(st.booleans())
    tensors = [
        strided_empty(
            shape,
            dtype(element).torch,
            draw(st.sampled_from("tn")),
            pad=0 if plain else draw(pads),
            offset=0 if plain else draw(offsets),
            device=device,
        )
        for shape, element in zip(shapes, types, strict=True)
    ]
    if batch and draw(st.booleans()):
        tensors[1] = _broadcast(tensors[1])
    args = ka.GemmArguments(
        *tensors,
        draw(st.sampled_from((None, None, None, "float32", "float64"))),
        fp32_precision=draw(st.sampled_from((None, "tf32"))),
    )
    return with_scales(args, draw(scales))


def _broadcast(batched: torch.Tensor) -> torch.Tensor:
    return batched[:1].expand(batched.shape)

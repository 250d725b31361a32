"""Which Hopper products load columns beside those of their tile, and which ones cannot."""

import dataclasses

import pytest
import torch
from cutlass import BFloat16

import kernel_api as ka
from kernel_api.errors import CompileError
from kernel_api.implementations.sm90.gemm import Gemm
from kernel_api.implementations.sm90.grouped_gemm import GroupedGemm
from kernel_api.implementations.sm90.grouped_sum_gemm import GroupedSumGemm
from kernel_api.providers.cutedsl.gemm.sm90_design import Sm90GemmDesign

TYPES = {"a_type": BFloat16, "b_type": BFloat16, "output_types": (BFloat16,)}


def test_a_stage_has_room_for_them():
    plain, beside = (Gemm((128, 144, 64), loaded_columns=n, **TYPES) for n in (None, 192))
    assert (plain.loaded_columns, beside.loaded_columns) == (144, 192)
    assert (plain.stages, beside.stages) == (6, 5)


@pytest.mark.parametrize("loaded", [128, 257])
def test_they_are_the_tile_s_and_others_that_wgmma_can_describe(loaded):
    reason = f"those of the tile, 144, and others up to 256, not {loaded}"
    with pytest.raises(ValueError, match=reason):
        Gemm((128, 144, 64), loaded_columns=loaded, **TYPES)


@pytest.mark.parametrize("kind", [GroupedGemm, GroupedSumGemm])
def test_grouped_products_have_none(kind):
    with pytest.raises(ValueError, match="load the 144 columns of a tile alone, not 192"):
        kind((128, 144, 64), loaded_columns=192, **TYPES)


def test_columns_beside_a_tile_are_for_what_lies_along_them(monkeypatch):
    A = torch.empty(256, 256, dtype=torch.bfloat16, device="meta")
    args = ka.GemmArguments(A, A.new_empty(288, 256).t(), A.new_empty(256, 288))
    kernel = next(
        k for k in ka.get_kernels(args, cc="90a") if "tile192x144x64" in k.metadata.kernel_name
    )
    monkeypatch.setattr(Sm90GemmDesign, "loaded_columns", lambda design, contiguous: 192)
    stages = dataclasses.replace(kernel.metadata.design, stages=4)
    other = type(kernel)(dataclasses.replace(kernel.metadata, design=stages))
    with pytest.raises(CompileError, match="B is contiguous along K, the kernel is for columns"):
        other.compile(args, "90a")

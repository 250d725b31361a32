"""Heads whose columns are dealt out to tiles that do not hold whole ones, in the emulator."""

import pytest
import torch
from support.data import strided_empty
from support.fusion_cases import BF16, F16, on_meta
from support.ptx.gemm import storage_bytes
from support.ptx.kernel import EmulatedKernel
from support.sampling import some

import kernel_api as ka
from kernel_api import epilogue as ep
from kernel_api.verification import FACTOR_REORDERED, judge

pytestmark = pytest.mark.compile


def rotated(
    M, N, heads, *, batch=None, element=BF16, pad=8, layout="t", seed=0, by_count=False, **how
):
    """All heads but the last, as a row of booleans says or their number; cos and sin of a quarter
    of the pairs are 0 and 1, so that pairs with the wrong ones are seen."""
    drawn = torch.Generator().manual_seed(seed)
    L = () if batch is None else (batch,)
    A, B = (torch.randn((*L, n, 72), generator=drawn).to(element) for n in (M, N))
    width = how.get("width", heads - how.get("start", 0))
    angle = torch.randn((*L, M, width // 2), generator=drawn)
    cos, sin = angle.cos(), angle.sin()
    cos[..., ::4], sin[..., ::4] = 0, 1
    out = strided_empty((*L, M, N), element, layout=layout, pad=pad)
    storage_bytes(out)[:] = 0xFF
    operands = {"cos": cos, "sin": sin}
    if by_count:
        how["heads"] = N // heads - 1
    else:
        operands["is_rotated"] = (torch.arange(N) < N - heads).view(1, N)

    def by_angle(accum, cos, sin):
        return ep.rotate(accum, cos, sin, heads, **how)

    def by_column(accum, cos, sin, is_rotated):
        return ep.where(is_rotated, by_angle(accum, cos, sin), accum)

    epilogue = ka.EpilogueArguments(by_angle if by_count else by_column, **operands)
    return ka.GemmArguments(A, B.transpose(-1, -2), out, epilogue=epilogue)


def kernels(args):
    found = ka.get_kernels(on_meta(args), cc=90, providers=["cutedsl"])
    return [kernel for kernel in found if kernel.metadata.targets == ("sm_90a",)]


def with_tile(args, rows, columns, **how):
    """The kernel of such a tile."""
    for kernel in kernels(args):
        design = kernel.metadata.design
        named = all(getattr(design, name) == value for name, value in how.items())
        if design.tile_shape[:2] == (rows, columns) and named:
            return kernel
    raise AssertionError(f"no tile of {rows}x{columns}")


CASES = {
    "one and a half": (128, 192, {"M": 140, "N": 384, "heads": 128}),
    "by their number": (128, 192, {"M": 140, "N": 384, "heads": 128, "by_count": True}),
    "half of one": (64, 64, {"M": 13, "N": 256, "heads": 128, "batch": 2}),
    "ends in a tile": (128, 192, {"M": 70, "N": 256, "heads": 128, "element": F16}),
    "by threads": (128, 192, {"M": 70, "N": 384, "heads": 128, "pad": 3}),
    "transposed": (64, 64, {"M": 70, "N": 256, "heads": 128, "layout": "n", "batch": 2}),
    "wide": (128, 128, {"M": 70, "N": 512, "heads": 256}),
    "three consumers": (192, 192, {"M": 200, "N": 384, "heads": 128}),
    "three pairs": (64, 64, {"M": 13, "N": 192, "heads": 192, "element": F16}),
}


@pytest.mark.parametrize("name", some(CASES, 1))
def test_parts_of_heads_are_rotated_right(name):
    rows, columns, how = CASES[name]
    args = rotated(**how)
    compiled = EmulatedKernel.compile(with_tile(args, rows, columns), args)
    assert not compiled.artifact.resources.spill_bytes
    compiled.run(args, multiprocessors=2, seed=1)
    verdict = judge(args, FACTOR_REORDERED)
    assert verdict, f"{compiled.kernel.metadata.kernel_name}: {verdict}"


def test_what_is_read_beside_parts_of_heads_is_right():
    weight = torch.randn(384, generator=torch.Generator().manual_seed(3))
    args = with_epilogue(
        lambda accum, cos, sin, weight: ep.rotate(accum, cos, sin, 128) * weight, weight=weight
    )
    compiled = EmulatedKernel.compile(with_tile(args, 64, 64), args)
    compiled.run(args, multiprocessors=3, seed=2)
    assert judge(args, FACTOR_REORDERED), compiled.kernel.metadata.kernel_name


@pytest.mark.parametrize(
    "how",
    [
        {"style": "interleaved"},
        {"start": 64},
        {"width": 64},
    ],
    ids=str,
)
def test_tiles_hold_whole_heads_where_other_columns_are_pairs(how):
    found = kernels(rotated(70, 384, 128, **how))
    assert {kernel.metadata.design.tile_shape[1] % 128 for kernel in found} == {0}


def with_epilogue(fn, **read):
    A, B, out = rotated(72, 384, 128).tensors
    angle = torch.randn(72, 64)
    epilogue = ka.EpilogueArguments(fn, cos=angle.cos(), sin=angle.sin(), **read)
    return ka.GemmArguments(A, B, out, epilogue=epilogue)


def rotated_and_reduced(accum, cos, sin):
    x = ep.rotate(accum, cos, sin, 128)
    return x, ep.amax(x, None)


def test_tiles_hold_whole_heads_where_there_are_no_registers_for_more():
    """A matrix, many operations, or another output."""
    reading = with_epilogue(
        lambda accum, cos, sin, C: ep.rotate(accum, cos, sin, 128) + C, C=torch.ones(72, 384)
    )
    long = with_epilogue(lambda accum, cos, sin: ep.rotate(ep.gelu(accum), cos, sin, 128))
    reduced = with_epilogue(rotated_and_reduced, amax=torch.empty(()))
    for args in (reading, long, reduced):
        assert {kernel.metadata.design.tile_shape[1] % 128 for kernel in kernels(args)} == {0}


def test_kernels_without_room_for_all_that_is_read_are_not_offered():
    """192 accumulators beside what is read per row, or per batch, or written in 8 bits."""
    per_row = with_epilogue(
        lambda accum, cos, sin, b: ep.rotate(accum * b, cos, sin, 128), b=torch.ones(72, 1)
    )
    batched = rotated(70, 384, 128, batch=2)
    for args in (per_row, batched):
        assert (128, 192) not in {k.metadata.design.tile_shape[:2] for k in kernels(args)}
    plain = with_epilogue(lambda accum, cos, sin: ep.rotate(accum, cos, sin, 128))
    assert (128, 192) in {k.metadata.design.tile_shape[:2] for k in kernels(plain)}


def test_tiles_hold_whole_heads_where_columns_of_b_are_side_by_side():
    args = rotated(72, 384, 128)
    A, B, out = args.tensors
    operands = {name: one.tensor for name, one in args.epilogue.tensors.items()}
    found = kernels(args.rebuilt(A, B.contiguous(), out, **operands))
    assert {kernel.metadata.design.tile_shape[1] % 128 for kernel in found} == {0}

"""Parts of a tile that meet in a cluster: sums are right, and need every barrier."""

import dataclasses
import functools
import re

import pytest
import torch
from support.kernels import generated_by
from support.ptx import EmulationError
from support.ptx.kernel import EmulatedKernel
from support.ptx.orders import assert_same_in_any_order
from support.ptx.problems import awkward_arguments
from support.sampling import EVERY, some

import kernel_api as ka
from kernel_api import provider
from kernel_api.verification import FACTOR_REORDERED, judge

pytestmark = pytest.mark.compile

(CUTEDSL,) = provider.providers(["cutedsl"])


@functools.cache
def meeting(family):
    """Kernels of a family all of whose parts of a tile meet in a cluster."""
    (found,) = (one for one in CUTEDSL.families() if one.family == family)
    designs = ((k, k.metadata.design) for k in generated_by(found))
    return [k for k, design in designs if design.cluster_shape[2] > 1 and not design.even_k]


def kernel_of(family, pattern):
    return next(k for k in meeting(family) if re.search(pattern, k.metadata.kernel_name))


#: Family, kernel, (M, N, k tiles, batch): sizes end within a tile, and a few elements before the
#: last k tile does; parts have different numbers of k tiles.
CASES = [
    ("sm90.gemm", r"bf16_bf16_bf16.*tnt_tile128x64x64.*1x1x2.*16x16x2$", (129, 67, 5, None)),
    ("sm90.gemm", r"bf16_bf16_f32.*nnt_tile64x128x64.*1x1x4_.*stages\d+_split4", (70, 131, 4, 2)),
    ("sm90.gemm", r"f16_f16_f16.*tnn_tile128x96x64.*1x1x4", (140, 99, 9, 1)),
    ("sm90.gemm", r"bf16_bf16_f16.*ttt_tile128x128x64.*1x1x4", (1, 1, 5, 3)),
    ("sm90.gemm", r"f16_f16_f32.*nnn_tile128x128x64.*1x1x3", (150, 146, 7, None)),
    ("sm90.gemm", r"bf16_bf16_bf16.*tnt_tile32x64x128.*1x1x4_.*swap", (65, 140, 6, None)),
    ("sm90.gemm", r"f16_f16_f16.*tnt_tile16x64x128.*1x1x4_.*swap", (17, 66, 11, 3)),
    ("sm90.gemm", r"bf16_bf16_bf16.*tnt_tile64x64x128.*1x1x4", (67, 65, 13, None)),
    ("sm90.gemm", r"bf16_bf16_bf16.*tnt_tile128x128x64.*1x1x3", (131, 9, 15, None)),
    ("sm90.gemm", r"bf16_bf16_f32.*tnn_tile16x64x128.*1x1x2_.*swap", (5, 130, 8, 2)),
    ("sm90.gemm", r"f16_f16_f16.*ntt_tile32x64x128.*1x1x4_.*swap", (33, 70, 19, None)),
    ("sm90.gemm_tf32", r"tile64x128x32.*1x1x4_.*stages\d+_split4", (70, 131, 6, None)),
    ("sm90.gemm_tf32", r"tile16x64x64.*1x1x2_.*swap", (9, 66, 9, 2)),
    ("sm90.gemm_int8", r"i32_.*tile128x128x128.*1x1x4", (130, 140, 7, None)),
    ("sm90.gemm_int8", r"i32_.*tile16x64x256.*1x1x2_.*swap", (17, 66, 9, None)),
    ("sm90.gemm_fp8", r"bf16_f32_tnt_tile128x128x128.*1x1x4_.*align", (130, 131, 7, None)),
    ("sm90.gemm_fp8", r"f32_f32_tnt_tile64x64x128.*1x1x4", (67, 65, 9, 2)),
    ("sm90.gemm_fp8", r"bf16_f32_tnt_tile64x128x128.*1x1x4", (20, 200, 5, None)),
    ("sm90.gemm_fp8", r"f16_f32_tnt_tile16x64x128.*1x1x4_.*swap", (9, 65, 12, None)),
]


#: Of 16 bits some; of every other type one, and tiles that are swapped.
SAMPLE = range(len(CASES)) if EVERY else (5, 15)


def drawn(kernel, sizes, values, seed=0):
    M, N, k_tiles, batch = sizes
    tile_k = kernel.metadata.design.tile_shape[2]
    K = (k_tiles - kernel.metadata.design.split_k) * tile_k + 5  # more is added for a split
    return awkward_arguments(kernel, M, N, K, batch, values=values, seed=seed)


@pytest.mark.parametrize(
    "turn",
    SAMPLE,
    ids=[f"{CASES[turn][0]}-{CASES[turn][2]}" for turn in SAMPLE],
)
def test_integers_are_added_up_exactly(turn):
    family, pattern, sizes = CASES[turn]
    kernel = kernel_of(family, pattern)
    args = drawn(kernel, sizes, "integers", turn)
    compiled = EmulatedKernel.compile(kernel, args)
    assert not compiled.artifact.resources.spill_bytes
    compiled.run(args, multiprocessors=1 + turn % 3, seed=turn)
    assert judge(args, FACTOR_REORDERED), kernel.metadata.kernel_name
    if not args.scaled:
        wide = torch.float64 if args.A.tensor.dtype.is_floating_point else torch.int64
        product = args.A.tensor.to(wide) @ args.B.tensor.to(wide)
        assert torch.equal(args.out.tensor, product.to(args.out.tensor.dtype))


def redesigned(kernel, **design):
    changed = dataclasses.replace(kernel.metadata.design, **design)
    return type(kernel)(dataclasses.replace(kernel.metadata, design=changed))


@pytest.mark.parametrize(
    ("pattern", "parts", "sizes"),
    some(
        [
            (r"bf16_bf16_bf16.*tnt_tile16x64x128.*1x1x4_.*swap", 7, (9, 66, 8, None)),
            (r"f16_f16_f16.*tnt_tile128x96x64.*1x1x4", 5, (30, 99, 7, 2)),
        ],
        1,
    ),
)
def test_shares_of_parts_need_not_divide_a_tile(pattern, parts, sizes):
    known = kernel_of("sm90.gemm", pattern)
    kernel = redesigned(known, cluster_shape=(1, 1, parts), split_k=parts)
    args = drawn(kernel, sizes, "integers", parts)
    EmulatedKernel.compile(kernel, args).run(args, multiprocessors=1, seed=parts)
    assert judge(args, FACTOR_REORDERED), kernel.metadata.kernel_name


@pytest.mark.parametrize(
    "design",
    [
        {"cluster_shape": (1, 1, 4), "split_k": 2},
        {"cluster_shape": (2, 1, 4), "split_k": 4},
        {"cluster_shape": (1, 1, 4), "split_k": 1, "stream_k": True},
        {"cluster_shape": (1, 1, 16), "split_k": 16},
    ],
    ids=str,
)
def test_clusters_that_cannot_be_built_are_refused_with_the_rule(design):
    known = kernel_of("sm90.gemm", CASES[0][1])
    A, B = (torch.empty(256, 2560, dtype=torch.bfloat16, device="meta") for _ in range(2))
    args = ka.GemmArguments(A, B.t(), A.new_empty(256, 256))
    assert known.supports(args)
    status = redesigned(known, **design).supports(args)
    assert not status and "a cluster along K has the parts of one tile" in str(status)
    assert redesigned(known, **design).predict(args) > 0


@pytest.mark.parametrize("scale", some(["BLOCK", "ROW", "TENSOR"], 1))
def test_scales_are_those_of_a_part(scale):
    """Of blocks along K, a part begins with others."""
    kernel = next(
        k
        for k in meeting("sm90.gemm_fp8")
        if scale in str(k.metadata.operands.A.scale) and not k.metadata.design.swap_ab
    )
    args = drawn(kernel, (130, 131, 11, None), "random")
    EmulatedKernel.compile(kernel, args).run(args, seed=3)
    verdict = judge(args, FACTOR_REORDERED)
    assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"


@pytest.mark.parametrize("pattern", some([r"tile128x128x64.*1x1x3", r"tile128x96x64.*1x1x4"], 1))
def test_sums_do_not_depend_on_who_comes_when(pattern):
    kernel = kernel_of("sm90.gemm", f"bf16_bf16_f32.*tnt_{pattern}")
    args = drawn(kernel, (13, 99, 11, None), "random")
    assert_same_in_any_order(kernel, args)


def test_a_launch_of_another_k_may_have_fewer_k_tiles_than_parts():
    kernel = kernel_of("sm90.gemm", CASES[5][1])
    args = drawn(kernel, (9, 60, 9, None), "integers")
    A, B, out = args.tensors
    short = ka.GemmArguments(A[:, :136], B[:136], out)
    EmulatedKernel.compile(kernel, args).run(short, multiprocessors=1, seed=1)
    assert judge(short, FACTOR_REORDERED)


def test_nothing_is_asked_of_the_workspace_or_of_atomics():
    for family in ("sm90.gemm", "sm90.gemm_tf32", "sm90.gemm_int8", "sm90.gemm_fp8"):
        for kernel in meeting(family):
            design = kernel.metadata.design
            assert design.splits and kernel.reorders_accumulation
            assert design.workspace_bytes(4096, 4096, 4096, 3, 132) == 0
    kernel = kernel_of("sm90.gemm", CASES[0][1])
    compiled = EmulatedKernel.compile(kernel, drawn(kernel, CASES[0][2], "integers"))
    assert not re.search(r"\b(atom|red)\.", compiled.text)


# The emulator finds what these kernels could do wrong ---------------------------------------------


@pytest.fixture(scope="module")
def swapped():
    kernel = kernel_of("sm90.gemm", r"bf16_bf16_bf16.*tnt_tile32x64x128.*1x1x4_.*swap.*")
    args = drawn(kernel, (65, 140, 6, None), "integers")
    return EmulatedKernel.compile(kernel, args), args


MEETING = r"barrier\.cluster\.arrive;\s+barrier\.cluster\.wait;"
#: What the emulator says of memory that is read or written too early.
FAULTS = (
    r"no barrier in between|exited|never written|what an asynchronous copy (wrote|is on its way)"
)


@pytest.mark.parametrize("which", [0, 1])
def test_no_meeting_of_the_cluster_can_be_left_out(swapped, which):
    compiled, args = swapped
    places = list(re.finditer(MEETING, compiled.text))
    assert len(places) == 2
    one = places[which]
    for instead in ("", "barrier.cluster.arrive.relaxed; barrier.cluster.wait;"):
        text = compiled.text[: one.start()] + instead + compiled.text[one.end() :]
        with pytest.raises(EmulationError, match=FAULTS):
            for seed in range(8):
                compiled.with_text(text).run(args, seed=seed)


def test_groups_meet_before_they_write_where_others_multiply(swapped):
    """Behind the last products of all, in front of the first part."""
    compiled, args = swapped
    first = re.search(MEETING, compiled.text).start()
    *_, barrier = re.finditer(r"(bar|barrier\.cta)\.sync[^;]*;", compiled.text[:first])
    text = compiled.text[: barrier.start()] + compiled.text[barrier.end() :]
    with pytest.raises(EmulationError, match=r"still reads|another warp reads"):
        for seed in range(8):
            compiled.with_text(text).run(args, seed=seed)

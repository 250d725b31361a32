"""Tiles that are cut into as many equal parts as find room: in clusters that share a tile, whose
last one adds up, and with a kernel behind that does."""

import dataclasses
import functools
import re

import pytest
import torch
from support import fusion_cases as make
from support.data import arguments_for
from support.fusion_cases import F16, Case, on_meta
from support.kernels import generated_by
from support.ptx import EmulationError
from support.ptx.kernel import EmulatedKernel
from support.ptx.orders import assert_same_in_any_order
from support.ptx.problems import awkward_arguments
from support.sampling import EVERY, some

import kernel_api as ka
from kernel_api import provider
from kernel_api.verification import FACTOR_REORDERED, judge, poison

pytestmark = pytest.mark.compile

(CUTEDSL,) = provider.providers(["cutedsl"])
FAMILIES = ("sm90.gemm", "sm90.gemm_tf32", "sm90.gemm_int8")


@functools.cache
def even(family):
    (found,) = (one for one in CUTEDSL.families() if one.family == family)
    return [k for k in generated_by(found) if k.metadata.design.even_k]


def kernel_of(family, pattern):
    return next(k for k in even(family) if re.search(pattern, k.metadata.kernel_name))


#: Family, kernel, (M, N, k tiles, batch), multiprocessors: several tiles and one, K's rest within a
#: k tile; parts of different numbers of k tiles, one of each cluster, and more room than k tiles.
CASES = [
    ("sm90.gemm", r"bf16_bf16_bf16.*tnt_tile64x64x64.*2x2_.*parallel", (129, 70, 9, None), 40),
    ("sm90.gemm", r"bf16_bf16_f32.*tnn_tile64x128x64.*2x2_.*parallel", (66, 300, 7, 2), 53),
    ("sm90.gemm", r"f16_f16_f16.*ntt_tile128x128x64.*2x2_.*parallel", (264, 40, 5, None), 18),
    ("sm90.gemm", r"bf16_bf16_bf16.*tnt_tile16x64x128.*1x1x8_.*swap", (9, 66, 40, None), 54),
    ("sm90.gemm", r"f16_f16_f32.*nnt_tile64x64x128.*1x1x8_", (60, 70, 27, 2), 132),
    ("sm90.gemm", r"f16_f16_f16.*ttn_tile64x64x128.*1x1x8_", (8, 1, 9, None), 132),
    ("sm90.gemm_tf32", r"tile64x64x32.*2x2_.*parallel", (70, 129, 6, None), 70),
    ("sm90.gemm_int8", r"i32_.*tile64x128x128.*2x2_.*parallel", (130, 140, 7, None), 132),
    ("sm90.gemm_int8", r"i32_.*tile16x64x256.*1x1x8_.*swap", (17, 66, 19, None), 132),
    # Partial sums lie behind copies of both, or of one.
    ("sm90.gemm_repacked", r"bf16_bf16.*ntt_tile64x64x64.*align2x2x2", (66, 70, 5, None), 24),
    (
        "sm90.gemm_repacked",
        r"f16_f32.*tnt_tile64x128x64.*align16x2x2",
        (66, 30, 5, None),
        53,
    ),
    ("sm90.gemm_int8_repacked", r"i32_i32_ttt_tile64x64x128.*align16x1", (66, 30, 5, None), 53),
]
SAMPLE = range(len(CASES)) if EVERY else (3, 9)


def drawn(kernel, sizes, values, seed=0):
    M, N, k_tiles, batch = sizes
    design = kernel.metadata.design
    K = (k_tiles - design.split_k) * design.tile_shape[2] + 5  # more is added for a split
    return awkward_arguments(kernel, M, N, K, batch, values=values, seed=seed)


@pytest.mark.parametrize("turn", SAMPLE, ids=[f"{CASES[t][0]}-{CASES[t][2]}" for t in SAMPLE])
def test_integers_are_added_up_exactly(turn):
    family, pattern, sizes, multiprocessors = CASES[turn]
    kernel = kernel_of(family, pattern)
    args = drawn(kernel, sizes, "integers", turn)
    compiled = EmulatedKernel.compile(kernel, args)
    assert not compiled.artifact.resources.spill_bytes
    for again in range(2):  # counters of the workspace are as they were
        poison(args.out.tensor)
        compiled.run(args, multiprocessors=multiprocessors, seed=turn + again)
        assert judge(args, FACTOR_REORDERED), kernel.metadata.kernel_name
    wide = torch.float64 if args.A.tensor.dtype.is_floating_point else torch.int64
    product = args.A.tensor.to(wide) @ args.B.tensor.to(wide)
    assert torch.equal(args.out.tensor, product.to(args.out.tensor.dtype))


@pytest.mark.parametrize("pattern", some([r"tile64x64x64.*parallel", r"tile16x64x128.*1x1x8"], 1))
def test_sums_do_not_depend_on_who_comes_when(pattern):
    kernel = kernel_of("sm90.gemm", f"bf16_bf16_f32.*tnt_{pattern}")
    args = drawn(kernel, (13, 99, 21, None), "random")
    assert_same_in_any_order(kernel, args, multiprocessors=36)


def test_every_family_of_plain_products_has_both_kinds():
    for family in FAMILIES:
        kinds = {k.metadata.design.parallel for k in even(family)}
        assert kinds == {False, True}, family


def test_a_workspace_has_a_part_for_every_resident_cluster():
    parallel = kernel_of("sm90.gemm", r"tnt_tile64x128x64.*2x2_.*parallel").metadata.design
    meeting = kernel_of("sm90.gemm", r"tnt_tile64x64x128.*1x1x8_").metadata.design
    counters, resident = 65536, {4: 30, 8: 15}
    found = parallel.workspace_bytes(100, 100, 4096, 1, 132)
    assert found == counters + resident[4] * 4 * 64 * 128 * 4
    assert meeting.workspace_bytes(60, 60, 65536, 1, 132) == counters + resident[8] * 64 * 64 * 4


def test_tiles_that_leave_no_room_for_parts_are_refused():
    cases = ((r"tnt_tile64x64x64.*2x2_.*parallel", 15), (r"tnt_tile64x64x128.*1x1x8", 7))
    for pattern, most in cases:
        kernel = kernel_of("sm90.gemm", f"bf16_bf16_bf16.*{pattern}")
        rows = 64 * kernel.metadata.design.cluster_shape[0]
        for tiles in (most, most + 1):
            A = torch.empty(tiles * rows, 8192, dtype=torch.bfloat16, device="meta")
            B, out = A.new_empty(64, 8192), A.new_empty(tiles * rows, 64)
            status = kernel.supports(ka.GemmArguments(A, B.t(), out))
            assert bool(status) == (tiles == most), status
        assert f"half as many as these; there are {most + 1} for" in str(status)


@pytest.mark.parametrize(
    "design",
    [
        {"even_k": False},
        {"even_k": False, "stream_k": True},
        {"stream_k": True},
        {"split_k": 4},
        {"cluster_shape": (1, 1, 4), "split_k": 4},
    ],
    ids=str,
)
def test_ways_to_cut_that_exclude_each_other_are_refused(design):
    known = kernel_of("sm90.gemm", r"bf16_bf16_bf16.*tnt_tile64x64x64.*2x2_.*parallel")
    changed = dataclasses.replace(known.metadata.design, **design)
    args = arguments_for(known, 64, 64, 4096, device="meta")
    assert known.supports(args)
    status = type(known)(dataclasses.replace(known.metadata, design=changed)).supports(args)
    assert not status and status.rule.startswith("tiles are cut anywhere, evenly, or into so many")


FUSED = [
    Case("gemm", make.a_gemm, "parallel", {"M": 70, "N": 72, "K": 328, "batch": 2}),
    Case("bias gelu", make.a_bias_activation("gelu"), "parallel", {"M": 13, "N": 136, "K": 264}),
    Case("residual", make.a_residual, "parallel", {"M": 13, "N": 40, "K": 264, "element": F16}),
    Case("amax", make.an_amax, "meeting", {"M": 13, "N": 56, "K": 2056}),
    Case("swiglu", make.a_glu("swiglu"), "meeting", {"M": 13, "N": 64, "K": 2056}),
]
FUSED_SAMPLE = range(len(FUSED)) if EVERY else (3,)


@pytest.mark.parametrize("turn", FUSED_SAMPLE, ids=[FUSED[turn].name for turn in FUSED_SAMPLE])
def test_sums_go_through_an_epilogue(turn):
    args = FUSED[turn].drawn(turn)
    offered = ka.get_kernels(on_meta(args), cc=90, providers=["cutedsl"])
    parallel = FUSED[turn].design == "parallel"
    designs = ((k, k.metadata.design) for k in offered if k.family_name() == "sm90.gemm")
    kernel = next(k for k, one in designs if one.even_k and one.parallel == parallel)
    compiled = EmulatedKernel.compile(kernel, args)
    assert not compiled.artifact.resources.spill_bytes
    compiled.run(args, multiprocessors=20 if parallel else 18, seed=turn)
    verdict = judge(args, FACTOR_REORDERED)
    assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"


@pytest.mark.parametrize("scales", some(["per_tensor", "per_row"], 1))
def test_scales_are_applied_to_sums(scales):
    pattern = rf"i8_{scales}_i8_{scales}_bf16_.*tnt_tile64x64x128.*2x2_.*parallel"
    kernel = kernel_of("sm90.gemm_int8", pattern)
    args = drawn(kernel, (130, 72, 7, None), "random")
    EmulatedKernel.compile(kernel, args).run(args, multiprocessors=20, seed=1)
    verdict = judge(args, FACTOR_REORDERED)
    assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"


@pytest.mark.parametrize("fusion", [make.an_amax, make.a_glu("swiglu")])
def test_elements_that_look_at_others_are_not_for_a_kernel_behind(fusion):
    args = on_meta(Case("", fusion, "", {"M": 64, "N": 64, "K": 264, "pad": 16}).drawn(0))
    kernel = kernel_of("sm90.gemm", r"bf16_bf16_bf16.*tnt_tile64x64x64.*parallel")
    others = type(kernel).kernels_for(kernel.metadata.operands, args.epilogue.graph)
    status = next(k for k in others if k.metadata.design.parallel).supports(args)
    assert "adds up parts of tiles computes elements that stand alone" in str(status)


def test_blocks_of_a_cluster_without_rows_and_columns_do_not_overtake_others():
    """Of a matrix that one tile of a cluster of 2x2 holds, over more k tiles than stages."""
    kernel = kernel_of("sm90.gemm", r"bf16_bf16_bf16.*tnt_tile64x64x64.*2x2_.*parallel")
    args = drawn(kernel, (64, 64, 41, None), "integers")
    compiled = EmulatedKernel.compile(kernel, args)
    for seed in some(range(8), 3):
        compiled.run(args, multiprocessors=5, seed=seed)
        assert judge(args, FACTOR_REORDERED)


@pytest.mark.parametrize("k", some([8, 304], 1))
@pytest.mark.parametrize("pattern", [r"tile64x64x128.*1x1x8_", r"tile64x64x64.*2x2_.*parallel"])
def test_a_launch_of_another_k_may_have_fewer_k_tiles_than_parts(pattern, k):
    """As prepared launches may, whose sizes differ from those that they were prepared with."""
    kernel = kernel_of("sm90.gemm", f"bf16_bf16_f32.*tnt_{pattern}")
    args = drawn(kernel, (13, 60, 20, None), "integers")
    A, B, out = args.tensors
    short = ka.GemmArguments(A[:, :k], B[:k], out)
    EmulatedKernel.compile(kernel, args).run(short, multiprocessors=32, seed=k)
    assert judge(short, FACTOR_REORDERED)


# What these kernels could do wrong is found ------------------------------------------------------

MEETING = r"barrier\.cluster\.arrive;\s+barrier\.cluster\.wait;"


@pytest.fixture(scope="module")
def sharing():
    kernel = kernel_of("sm90.gemm", r"bf16_bf16_bf16.*tnt_tile16x64x128.*1x1x8_.*swap")
    args = drawn(kernel, (9, 60, 16, None), "integers")
    compiled = EmulatedKernel.compile(kernel, args)
    assert not is_wrong(compiled, args, compiled.text, seeds=2)
    return compiled, args


def is_wrong(compiled, args, text, seeds=8):
    """Whether an order of warps, of some, leads to a wrong result or to what a GPU may not do."""
    for seed in range(seeds):
        poison(args.out.tensor)
        try:  # two clusters
            compiled.with_text(text).run(args, multiprocessors=18, seed=seed)
        except EmulationError:
            return True
        if not judge(args, FACTOR_REORDERED):
            return True
    return False


@pytest.mark.parametrize("which", range(4))
def test_no_meeting_of_the_cluster_can_be_left_out(sharing, which):
    """Before and behind the sums of a cluster, behind what it is told, and behind the last sums."""
    compiled, args = sharing
    places = list(re.finditer(MEETING, compiled.text))
    assert len(places) == 4
    one = places[which]
    assert is_wrong(compiled, args, compiled.text[: one.start()] + compiled.text[one.end() :])


def test_a_kernel_behind_waits_for_the_one_before_it():
    kernel = kernel_of("sm90.gemm", r"bf16_bf16_bf16.*tnt_tile64x64x64.*2x2_.*parallel")
    args = drawn(kernel, (70, 66, 9, None), "integers")
    text = EmulatedKernel.compile(kernel, args).text
    _, behind = re.split(r"\.visible \.entry kernel_cutlass_kernel_ParallelSums", text)
    wait, first_read = behind.index("griddepcontrol.wait"), behind.index("ld.global")
    assert wait < first_read

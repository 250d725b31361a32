"""The Hopper GEMM families compute the right products: their PTX runs in the emulator, without GPU.

Warps go on in an order drawn from a seed, and so does what copies land when. A read or a write that
is not ordered behind what it depends on, a wait that never ends and an access outside of a tensor
are errors. The sample has every twelfth design of 16-bit operands, one of each other family, and
in turn all layouts, types, scales, alignments, ranks and kinds of problem. In the environment,
KERNEL_API_EMULATE=designs runs every design once, and KERNEL_API_EMULATE=all every kernel on every
kind of problem, with three seeds: for days.

Outputs are poisoned, padding is NaN.
"""

import functools
import itertools
import os
import re
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
import torch
from support.kernels import generated_by
from support.ptx import EmulationError
from support.ptx.kernel import EmulatedKernel
from support.ptx.problems import awkward_arguments
from support.sampling import some

from kernel_api import ScaledOperand, ScaleMode, provider
from kernel_api.arguments.scaled import in_vectors
from kernel_api.verification import FACTOR, FACTOR_REORDERED, judge

pytestmark = pytest.mark.compile

ASKED = os.environ.get("KERNEL_API_EMULATE")
EVERYTHING = ASKED == "all"

(CUTEDSL,) = provider.providers(["cutedsl"])
FAMILIES = [one for one in CUTEDSL.families() if one.family.startswith("sm90.gemm")]

#: Kinds of problem: a bit more than a tile in each mode; k tiles for the pipeline to wrap around;
#: an odd number of tiles; less than a tile; a single element.
PROBLEMS = ("edges", "deep", "three tiles", "small", "tiny")


def problem(kind, design, turn):
    """(M, N, K, batch, multiprocessors) for a design; the batch is None, 1 or 3."""
    tile_m, tile_n, tile_k = design.tile_shape
    split = getattr(design, "split_k", 1) > 1 or getattr(design, "stream_k", False)
    least = 4 * tile_k + 1 if split else 1
    clusters = 1 + turn % 2
    blocks = clusters * design.cluster_shape[0] * design.cluster_shape[1]
    if kind == "edges":
        return tile_m + 1 + turn % 7, tile_n + 3, max(tile_k + 5, least), None, blocks
    if kind == "deep":
        deep = (design.stages + 2) * tile_k - 8
        return tile_m - 1, tile_n // 2 + 1, max(deep, least), None, blocks
    if kind == "three tiles":
        return tile_m - 3, tile_n - 9, max(tile_k - 1, least), 3, blocks
    if kind == "small":
        return 13, 21, max(2 * tile_k + 8, least), 1, blocks
    return 1, 1, least, 3, blocks


@functools.cache
def features(kernel):
    """What the sample has all of."""
    operands = kernel.metadata.operands
    tensors = operands.tensors.values()
    return (
        ("layouts", tuple(tensor.unit_mode for tensor in tensors)),
        ("types", operands.A.dtype.name, operands.out.dtype.name),
        ("TMA stores", operands.out.alignment >= 16),
        ("scales", tuple(str(tensor.scale) for tensor in tensors)),
        ("schedule", kernel.metadata.design.schedule),
        ("swapped", kernel.metadata.design.swap_ab),
        ("split", kernel.metadata.design.split_k > 1, kernel.metadata.design.stream_k),
        ("parts meet", kernel.metadata.design.cluster_shape[2] > 1),
    )


def alike(design):
    """Designs that differ in the number of stages only, which follows from the element types."""
    return replace(design, stages=0)


@functools.cache
def sample():
    """(kernel, kind of problem, turn)"""
    chosen = []
    for family in FAMILIES:
        by_design = defaultdict(list)
        for kernel in generated_by(family):
            by_design[alike(kernel.metadata.design)].append(kernel)
        if EVERYTHING:
            everything = itertools.chain.from_iterable(by_design.values())
            chosen += [(k, p, turn) for k in everything for p in PROBLEMS for turn in range(3)]
            continue
        met: Counter[tuple] = Counter()
        every = 12 if family is FAMILIES[0] else len(by_design)
        if ASKED == "designs":
            every = 1
        for kernels in list(by_design.values())[::every]:
            turn = len(chosen)
            kernel = max(kernels, key=lambda one: sum(1 / (1 + met[f]) for f in features(one)))
            met.update(features(kernel))
            chosen.append((kernel, PROBLEMS[turn % len(PROBLEMS)], turn))
        if family is FAMILIES[0]:
            for kernel in itertools.chain.from_iterable(by_design.values()):
                if not met.keys() >= set(features(kernel)):
                    met.update(features(kernel))
                    turn = len(chosen)
                    chosen.append((kernel, PROBLEMS[turn % len(PROBLEMS)], turn))
    return chosen


def name(case):
    kernel, kind, turn = case
    return f"{kernel.metadata.kernel_name.removeprefix('sm90_')}-{kind.replace(' ', '_')}-{turn}"


@pytest.mark.parametrize("case", sample(), ids=name)
def test_products_are_right(case):
    kernel, kind, turn = case
    M, N, K, batch, blocks = problem(kind, kernel.metadata.design, turn)
    broadcast = (None, "A", "B")[turn % 3] if batch == 3 else None
    values = "random" if turn % 4 == 3 else "integers"
    args = awkward_arguments(kernel, M, N, K, batch, values=values, seed=turn, broadcast=broadcast)
    EmulatedKernel.compile(kernel, args).run(args, multiprocessors=blocks, seed=turn)
    factor = FACTOR_REORDERED if kernel.reorders_accumulation else FACTOR
    verdict = judge(args, factor)
    assert verdict, f"{M} x {N} x {K}: {verdict}"
    exact = values == "integers" and not args.scaled
    if exact:
        wide = torch.float64 if args.A.tensor.dtype.is_floating_point else torch.int64
        product = args.A.tensor.to(wide) @ args.B.tensor.to(wide)
        assert torch.equal(args.out.tensor, product.to(args.out.tensor.dtype))


@pytest.mark.parametrize(
    ("family", "N"),
    some(
        [
            ("sm90.gemm_fp8", 24),
            ("sm90.gemm_fp8", 21),
            ("sm90.gemm_int8", 21),
            ("sm90.gemm_int8", 24),
        ],
        2,
    ),
)
def test_no_scale_of_a_column_is_lost_where_columns_are_stored_side_by_side(family, N):
    """Then TMA stores any number of columns, and pairs of scales may end with half of one."""

    def fits(kernel):
        design, operands = kernel.metadata.design, kernel.metadata.operands
        small = design.tile_shape[0] == 64 and design.cluster_shape == (1, 1, 1)
        stored = operands.out.unit_mode == -2 and operands.out.alignment >= 16
        by_row = operands.B.scale is ScaleMode.PER_ROW
        return small and stored and by_row and not design.swap_ab and not design.splits

    (generated,) = (generated_by(one) for one in FAMILIES if one.family == family)
    kernel = next(filter(fits, generated))
    args = awkward_arguments(kernel, 16, N, 128, None, values="integers", seed=2)
    B = ScaledOperand(args.B.tensor, torch.rand(args.N) + 0.25, ScaleMode.PER_ROW)
    args = args.rebuilt(args.A, B, args.out)
    assert in_vectors(args.B) == (args.N == 24)
    EmulatedKernel.compile(kernel, args).run(args, multiprocessors=1)
    assert judge(args, FACTOR)


def test_the_sample_covers_the_family():
    kernels = [kernel for kernel, *_ in sample() if isinstance(kernel, FAMILIES[0])]
    offered = generated_by(FAMILIES[0])

    def seen(among):
        return set(itertools.chain.from_iterable(map(features, among)))

    assert seen(kernels) == seen(offered)
    assert {type(kernel) for kernel, *_ in sample()} == set(FAMILIES)


# The emulator finds what these kernels could do wrong ---------------------------------------------


@pytest.fixture(scope="module")
def cooperative():
    """With more subtiles of D than buffers, more k tiles than stages, several tiles per block: a
    whole one, and some at an edge of A, of B and of both, which have loops of their own."""
    plain = (
        r"sm90_gemm_bf16_bf16_bf16_.*_tile64x256x64_cluster1x1_cooperative_stages\d+_align16x16x16"
    )
    offered = generated_by(FAMILIES[0])
    kernel = next(one for one in offered if re.fullmatch(plain, one.metadata.kernel_name))
    stages, tile_k = kernel.metadata.design.stages, kernel.metadata.design.tile_shape[2]
    args = awkward_arguments(kernel, 70, 300, (stages + 1) * tile_k, None, values="integers")
    return EmulatedKernel.compile(kernel, args), args


BREAKS = [
    # pattern, what it becomes, what is found; the number of occurrences that do no harm
    (r"wgmma\.wait_group\.sync\.aligned\s+0;", "", "belongs to an unfinished wgmma", 0),
    (
        r"wgmma\.wait_group\.sync\.aligned\s+1;",
        "wgmma.wait_group.sync.aligned 2;",
        "writes what another warp reads|an unfinished wgmma still reads",
        0,
    ),
    (r"fence\.mbarrier_init\.release\.cluster;", "", "no fence behind its initialisation", 0),
    (r"mbarrier\.arrive\.expect_tx[^;]*;", "", "deadlock", 0),
    (r"mbarrier\.arrive\.shared\.b64[^;]*;", "", "deadlock", 0),
    # The first is behind the last store of the tile before, whose buffer comes later in the ring.
    (r"fence\.proxy\.async\.shared::cta;", "", "without fence.proxy.async", 1),
]


@pytest.mark.parametrize("which", range(len(BREAKS)))
def test_nothing_can_be_left_out(cooperative, which):
    compiled, args = cooperative
    pattern, replacement, message, harmless = BREAKS[which]
    found = list(re.finditer(pattern, compiled.text))
    assert len(found) > harmless
    survived = 0
    for one in (found[0], found[1 % len(found)], found[-1]):
        text = compiled.text[: one.start()] + replacement + compiled.text[one.end() :]
        try:
            compiled.with_text(text).run(args, multiprocessors=1)
        except EmulationError as error:
            assert re.search(message, str(error)), error
        else:
            survived += 1
    assert survived <= harmless

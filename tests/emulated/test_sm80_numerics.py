"""The sm80 GEMM families compute the right products: their PTX runs in the emulator, without a GPU.

Every design and all majors, at every alignment, are run with 16-bit operands, in turn bf16
and f16 with float32 output, with tf32 operands and with 8-bit integers. Ranks and sizes change from
case to case. Of the kernels that take more than operands there are all designs that split K, for
operands of every width, and scales of every kind. With KERNEL_API_EMULATE=all in the environment,
every kernel is run with both ranks, which takes hours; else one of five of what is sampled, on two
problems of three.

Outputs are poisoned, padding is NaN, and the emulator refuses every access outside of an operand,
be it in the padding between its rows, and every race between warps.
"""

import itertools
import os
import re

import pytest
import torch
from support.kernels import generated_by
from support.ptx import EmulationError, parse
from support.ptx.gemm import EmulatedGemm
from support.ptx.kernel import EmulatedKernel, poison
from support.ptx.problems import awkward_arguments

from kernel_api import provider
from kernel_api.verification import FACTOR, FACTOR_REORDERED, compare, judge

pytestmark = pytest.mark.compile

ASKED = os.environ.get("KERNEL_API_EMULATE")
EVERYTHING = ASKED == "all"
SPARSELY = 1 if ASKED else 5  # of what is sampled, one of so many is run, from FIRST on
FIRST = SPARSELY // 2
BF16, F16, TF32 = ("bfloat16", "bfloat16"), ("float16", "float32"), ("float32", "float32")  # A; out
I8 = ("int8", "int32")
WIDTHS = ((BF16, F16), (TF32,), (I8,))

(CUTEDSL,) = provider.providers(["cutedsl"])
FAMILIES = [one for one in CUTEDSL.families() if one.family.startswith("sm80.gemm")]
ALL = [kernel for one in FAMILIES for kernel in generated_by(one)]
KERNELS = [kernel for kernel in ALL if not kernel.takes_more]


def types_of(kernel):
    operands = kernel.metadata.operands
    return operands.A.dtype.name, operands.out.dtype.name


def layouts_of(kernel):
    return tuple(tensor.unit_mode for tensor in kernel.metadata.operands.tensors.values())


def alignment_of(kernel):
    return kernel.metadata.operands.A.alignment


def sample():
    """(kernel, rank)"""
    if EVERYTHING:
        return list(itertools.product(KERNELS, (2, 3)))
    chosen = []
    for width in WIDTHS:
        kernels_of_width = [k for k in KERNELS if types_of(k) in width]
        for turn, alignment in enumerate(sorted(set(map(alignment_of, kernels_of_width)))):
            kernels = [k for k in kernels_of_width if alignment_of(k) == alignment]
            designs = list(dict.fromkeys(kernel.metadata.design for kernel in kernels))
            for i in range(max(len(designs), 8)):
                types, design = width[(i + turn) % len(width)], designs[i % len(designs)]
                found = [k for k in kernels if types_of(k) == types and k.metadata.design == design]
                found = sorted(found, key=layouts_of)
                chosen.append((found[i % len(found)], 2 + (i // 2 + turn) % 2))
    return chosen


def name(case):
    kernel, rank = case
    return f"{kernel.metadata.kernel_name.removeprefix('sm80_')}-rank{rank}"


def arguments(kernel, M, N, K, rank, *, seed=0, broadcast=None, values):
    """A batch of two for rank 3, of which `broadcast` has but one. Random integers are of all
    sizes."""
    batch = 2 if rank == 3 else None
    how = {"values": values, "seed": seed, "broadcast": broadcast}
    args = awkward_arguments(kernel, M, N, K, batch, **how)
    if values == "random" and args.A.dtype.is_integer:
        generator = torch.Generator().manual_seed(seed)
        for tensor in (args.A.tensor, args.B.tensor):
            one = tensor[:1] if 0 in tensor.stride() else tensor
            one.random_(-128, 128, generator=generator)
    return args


def exact_product(args):
    return args.A.tensor.double() @ args.B.tensor.double()


def plain_product(args):
    """With the types of the operands and one rounding at the end."""
    a, b = args.A.tensor.float(), args.B.tensor.float()
    if args.fp32_precision == "tf32":
        a, b = rounded_to_tf32(a), rounded_to_tf32(b)
    return (a @ b).to(args.out.tensor.dtype)


def rounded_to_tf32(x):
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def problems(index, tile):
    """((M, N, K), values): on, behind and in front of edges of tiles and vectors; few blocks."""
    tile_m, tile_n, tile_k = tile
    large = (
        (63, 65, 129),
        (130, 7, 65),
        (1, 129, 63),
        (64, 96, 48),
        (129, 63, 7),
        (48, 16, 80),
        (32, 128, 32),
    )
    small = ((65, 130, 1), (7, 1, 130), (65, 1, 0), (1, 1, 1), (16, 8, 31))
    past = (tile_m + 1, 20 + index % 9) if index % 2 else (20 + index % 9, tile_n + 1)
    others = (
        ((large + small)[index % 12], "integers"),
        (large[(index // 2 + 3) % len(large)], "random"),
    )
    chosen = others if ASKED else (others[index // (2 * SPARSELY) % 2],)
    return (((*past, tile_k + index % 5), "integers"), *chosen)


@pytest.mark.parametrize(
    "case", list(enumerate(sample()))[FIRST::SPARSELY], ids=lambda case: name(case[1])
)
def test_products_are_right(case):
    index, (kernel, rank) = case
    compiled = EmulatedGemm.compile(kernel, arguments(kernel, 8, 8, 8, rank, values="integers"))
    broadcast = (None, "A", "B")[index % 3] if rank == 3 else None
    for (M, N, K), values in problems(index, kernel.metadata.design.tile_shape):
        args = arguments(kernel, M, N, K, rank, values=values, seed=index, broadcast=broadcast)
        compiled.run(args)
        out, exact = args.out.tensor, exact_product(args)
        if values == "integers" or args.out.dtype.is_integer:
            assert torch.equal(out, exact.to(out.dtype)), f"{M} x {N} x {K}"
        else:
            verdict = compare(out, exact, plain_product(args))
            assert verdict, f"{M} x {N} x {K}: {verdict}"


def test_the_sample_covers_the_family():
    kernels = [kernel for kernel, _ in sample()]
    offered = [kernel for kernel in KERNELS if types_of(kernel) in itertools.chain(*WIDTHS)]

    def seen(among, key):
        return {(k.metadata.operands.A.dtype.itemsize, alignment_of(k), key(k)) for k in among}

    for key in (layouts_of, lambda kernel: kernel.metadata.design):
        assert seen(kernels, key) == seen(offered, key)
    for key in (types_of, alignment_of):
        met = {(key(kernel), rank) for kernel, rank in sample()}
        assert met == set(itertools.product(map(key, offered), (2, 3)))


def test_what_is_run_has_all_layouts_and_each_type_with_all_its_alignments():
    run = [kernel for kernel, _ in sample()[FIRST::SPARSELY]]
    for key in (layouts_of, lambda kernel: (types_of(kernel), alignment_of(kernel))):
        assert set(map(key, run)) == {key(kernel) for kernel, _ in sample()}


# Kernels that take a workspace or scales: blocks at their own pace -------------------------------


def splits_into_few(kernel):
    """Parts are alike, however many there are; each takes the emulator its time."""
    return 1 < kernel.metadata.design.split_k <= (64 if EVERYTHING else 8)


def split_sample():
    """(kernel, rank): of every width all designs that split K; alignments and layouts in turn."""
    splitting = [k for k in ALL if splits_into_few(k) and not has_scales(k)]
    chosen = []
    for width in WIDTHS:
        kernels = [kernel for kernel in splitting if types_of(kernel) in width]
        for i, design in enumerate(dict.fromkeys(kernel.metadata.design for kernel in kernels)):
            found = [k for k in kernels if k.metadata.design == design]
            chosen.append((found[7 * (i + len(chosen)) % len(found)], 2 + len(chosen) % 2))
    return chosen


def has_scales(kernel):
    return any(tensor.scale for tensor in kernel.metadata.operands.tensors.values())


def scaled_sample():
    """(kernel, rank): all kinds of scales and types of out; every third one splits K, too."""
    chosen = []
    scaled = [kernel for kernel in ALL if has_scales(kernel)]
    kinds = dict.fromkeys((k.metadata.operands.A.scale, types_of(k)) for k in scaled)
    for i, kind in enumerate(kinds):
        found = [
            k
            for k in scaled
            if (k.metadata.operands.A.scale, types_of(k)) == kind
            and (splits_into_few(k) if i % 3 == 2 else not k.metadata.design.splits)
            and k.metadata.design.threads == 128
        ]
        chosen.append((found[11 * i % len(found)], 2 + i % 2))
    return chosen


def one_tile(kernel, rank, **how):
    """Arguments for a tile of each batch; K is enough for every part to have a tile of it, and for
    the parts to differ."""
    tile_m, tile_n, tile_k = kernel.metadata.design.tile_shape
    K = (kernel.metadata.design.split_k + 1) * tile_k + 5
    return arguments(kernel, tile_m - 3, tile_n - 5, K, rank, **how)


def factor_of(kernel):
    return FACTOR_REORDERED if kernel.reorders_accumulation else FACTOR


def emulated(kernel, args):
    return EmulatedKernel.compile(kernel, args, "sm_80")


@pytest.mark.parametrize(
    "case", list(enumerate(split_sample()))[::SPARSELY], ids=lambda case: name(case[1])
)
def test_products_of_several_blocks_are_right(case):
    index, (kernel, rank) = case
    broadcast = (None, "A", "B")[index % 3] if rank == 3 else None
    args = one_tile(kernel, rank, values="integers", seed=index, broadcast=broadcast)
    emulated(kernel, args).run(args, seed=index)
    assert torch.equal(args.out.tensor, exact_product(args).to(args.out.tensor.dtype))


@pytest.mark.parametrize(
    "case", list(enumerate(scaled_sample()))[::SPARSELY], ids=lambda case: name(case[1])
)
def test_scaled_products_are_right(case):
    index, (kernel, rank) = case
    args = one_tile(kernel, rank, values="integers", seed=index)
    emulated(kernel, args).run(args, seed=index)
    verdict = judge(args, factor_of(kernel))
    assert verdict, verdict


@pytest.fixture(scope="module")
def split():
    """A kernel with parts to add up, of which the last block to arrive is another each time; its
    output rounds no sum that another order would give."""
    chosen = next(
        kernel
        for kernel in ALL
        if kernel.metadata.design.tile_shape[0] == 16
        and kernel.metadata.design.split_k > 2
        and kernel.metadata.operands.out.dtype.name == "float32"
        and alignment_of(kernel) == 16
    )
    args = one_tile(chosen, 2, values="random")
    return emulated(chosen, args), args


def test_what_several_blocks_compute_does_not_depend_on_their_order(split):
    compiled, args = split
    results = []
    for seed in range(4):
        poison(args.out.tensor)
        compiled.run(args, seed=seed)
        results.append(args.out.tensor.clone())
    assert judge(args, factor_of(compiled.kernel))
    for result in results[1:]:
        assert torch.equal(result, results[0])


DISORDER = "nothing orders them|with no barrier in between|what was never written"


@pytest.mark.parametrize("pattern", [r"fence\.acq_rel\.gpu;", r"bar\.sync\s+0, \d+;"])
def test_no_fence_and_no_barrier_around_a_counter_can_be_left_out(split, pattern):
    compiled, args = split
    found = list(re.finditer(pattern, compiled.text))
    assert len(found) == 2
    for one in found:
        broken = compiled.with_text(compiled.text[: one.start()] + compiled.text[one.end() :])
        with pytest.raises(EmulationError, match=DISORDER):
            for seed in range(4):
                broken.run(args, seed=seed)


# The emulator finds what these kernels could do wrong -------------------------------------------


@pytest.fixture(scope="module")
def pipelined():
    """One kernel that copies asynchronously, and sizes that fill its pipeline."""
    chosen = next(
        kernel
        for kernel in KERNELS
        if types_of(kernel) == BF16
        and alignment_of(kernel) == 16
        and kernel.metadata.design.tile_shape[0] == 32
    )
    args = arguments(chosen, 33, 65, 400, 2, values="integers")
    return EmulatedGemm.compile(chosen, args), args


def broken(compiled, pattern, replacement, occurrence):
    """The kernel with one occurrence of a pattern replaced."""
    found = list(re.finditer(pattern, compiled.text))[occurrence]
    text = compiled.text[: found.start()] + found.expand(replacement) + compiled.text[found.end() :]
    return EmulatedGemm(compiled.kernel, text, parse(text), compiled.shared_bytes)


def occurrences(compiled, pattern):
    return range(len(re.findall(pattern, compiled.text)))


def test_no_barrier_can_be_left_out(pipelined):
    compiled, args = pipelined
    barrier = r"bar\.sync\s+0;"
    assert len(occurrences(compiled, barrier)) >= 3
    for i in occurrences(compiled, barrier):
        with pytest.raises(EmulationError, match="with no barrier in between"):
            broken(compiled, barrier, "", i).run(args)


def test_no_wait_can_be_shorter(pipelined):
    compiled, args = pipelined
    wait = r"cp\.async\.wait_group\s+(\d+);"
    assert len(occurrences(compiled, wait)) >= 2
    for i in occurrences(compiled, wait):
        pending = int(re.findall(wait, compiled.text)[i])
        with pytest.raises(EmulationError, match="what a copy is on its way to"):
            broken(compiled, wait, f"cp.async.wait_group {pending + 1};", i).run(args)


def test_no_edge_can_be_forgotten(pipelined):
    compiled, args = pipelined
    for pattern, replacement in (
        (r"(cp\.async\.cg[^;]*), %r\d+;", r"\1;"),  # whole vectors, whatever is inside
        (r"@%p\d+ (st\.global)", r"\1"),
    ):
        assert len(occurrences(compiled, pattern)) >= 2
        for i in occurrences(compiled, pattern):
            with pytest.raises(EmulationError, match="what is no element of an"):
                broken(compiled, pattern, replacement, i).run(args)

"""Which kernels of the GPU are offered for groups whose matrices lie anywhere, with and without
scales, for rows that are scattered, and which take tiles as they become free."""

import dataclasses

import pytest
import torch
from support.sampling import EVERY, some

import kernel_api as ka
from kernel_api import epilogue as ep
from kernel_api._workspaces import ZEROED
from kernel_api.providers.cutedsl.gemm.sm90_design import SHARED_MEMORY_BYTES

BF16, F8, F32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
T, N, K, E = 40, 128, 256, 3


def empty(*shape, element=BF16):
    return torch.empty(shape, dtype=element, device="meta")


def index():
    return empty(T, element=torch.int32)


OFFSETS = empty(E, element=torch.int32)


def families(args, cc="sm_90a"):
    found = ka.get_kernels(args, cc=cc, providers=["cutedsl"])
    return {kernel.family_name(): kernel for kernel in reversed(found)}


def reason(args, family):
    told = ka.explain(args, cc="sm_90a", providers=["cutedsl"])
    return next(one.reason for one in told.rejected if one.family == family)


def of_rows(epilogue=None, columns=N, discrete=False, **options):
    weights = [empty(N, K).t() for _ in range(E)]
    B = weights if discrete else empty(E, N, K).mT
    return ka.GroupedGemmArguments(
        empty(T, K), B, empty(T, columns), OFFSETS, epilogue=epilogue, **options
    )  # fmt: skip


def test_an_epilogue_names_its_operands_as_it_likes_where_experts_lie_anywhere():
    bias = empty(N)
    epilogue = ka.EpilogueArguments(
        lambda accum, B_columns, B_pitch: accum + B_columns * B_pitch, B_columns=bias, B_pitch=bias
    )
    args = of_rows(epilogue, discrete=True)
    for kernel in families(args).values():
        described, pitch, *others = kernel.more_values(args).values()
        assert (described, pitch) == (N, K)
        assert all(one is bias for one in others)
        assert len(others) == 2


# Scales of experts that lie anywhere -----------------------------------------------------


def eight_bits(of_A, B_scale, **options):
    A = empty(T, K, element=F8)
    if of_A is not None:
        mode, *shape = of_A
        A = ka.ScaledOperand(A, empty(*shape, element=F32), ka.ScaleMode(mode))
    B = [empty(N, K, element=F8).t() for _ in range(E)]
    scale = None if B_scale is None else empty(*B_scale, element=F32)
    return ka.GroupedGemmArguments(A, B, empty(T, N), OFFSETS, B_scale=scale, **options)


@pytest.mark.parametrize(
    ("of_A", "B_scale"),
    [
        (None, None),
        (("per_tensor",), (E,)),
        (("per_tensor",), ()),
        (("per_row", T), (E, N)),
        (("block_1x128", T, 2), (E, 2, 1)),
    ],
)
def test_eight_bits_are_offered_with_every_scale(of_A, B_scale):
    args = eight_bits(of_A, B_scale)
    kernels = families(args)
    assert list(kernels) == ["sm90.grouped_gemm_fp8_pointers"]
    kernel = kernels["sm90.grouped_gemm_fp8_pointers"]
    assert kernel.get_workspace_size(args) == kernel.workspace_for(*args.tensors)
    assert reason(args, "sm90.grouped_gemm_fp8") == (
        "B is given as matrices that lie anywhere; the kernel takes one tensor"
    )


def test_scales_of_blocks_go_with_no_others():
    args = eight_bits(("block_1x128", T, 2), (E,))
    assert families(args) == {}
    assert "scale" in reason(args, "sm90.grouped_gemm_fp8_pointers")
    for of_A in (("per_row", T), ("per_tensor",)):
        for of_B in ((E,), (E, N)):
            assert families(eight_bits(of_A, of_B))


def test_rows_are_gathered_with_their_scales_in_blocks_and_with_no_others():
    picked = {"row_index": empty(T, element=torch.int32)}
    by_row = eight_bits(("per_row", T), (E, N), **picked)
    assert families(by_row) == {}
    assert reason(by_row, "sm90.grouped_gemm_fp8_pointers").endswith("A carries one per row")
    assert families(eight_bits(("per_tensor",), (E,), **picked))
    assert families(eight_bits(("block_1x128", T, 2), (E, 2, 1), **picked))


# Parts of K -----------------------------------------------------------------------------


def is_cut(metadata):
    return getattr(metadata.design, "split_k", 1) > 1


def groups_of(T, E, K):
    A, B, out = empty(T, K), empty(E, 4096, K).mT, empty(T, 4096)
    return ka.GroupedGemmArguments(A, B, out, empty(E, element=torch.int32))


def cut(T, E, K):
    """The kernels whose clusters have the parts of a tile along K, by their design."""
    found = ka.get_kernels(groups_of(T, E, K), is_cut, cc="sm_90a")
    return {kernel.metadata.design: kernel for kernel in found}


def test_few_tiles_are_cut_along_k():
    found = cut(16, 1, 4096)
    assert len(found) == 5
    for design, kernel in found.items():
        assert design.cluster_shape == (1, 1, design.split_k)
        assert not design.takes_tiles
        assert kernel.reorders_accumulation
        tensors = empty(16, 4096), empty(1, 4096, 4096), empty(16, 4096), OFFSETS
        assert kernel.workspace_for(*tensors) == 0


def test_as_many_tiles_as_offsets_may_make_are_counted():
    def tiles(T, E):
        return {design.tile_shape[:2] for design in cut(T, E, 4096)}

    # Of two parts each: 4 and 7 times 32 are less than 512, 4 times 64 are not.
    assert tiles(448, 1) == {(128, 128), (64, 128)}
    # 5 times 32 are, 8 times 32 are not.
    assert tiles(448, 2) == {(128, 128)}
    assert not cut(200, 200, 4096)
    for kernel in cut(16, 1, 4096).values():
        answer = kernel.supports(groups_of(200, 200, 4096))
        assert not answer
        assert "there would be " in str(answer)


def test_every_part_has_a_step():
    assert {design.tile_shape[2] for design in cut(64, 1, 72)} == {64}
    for kernel in cut(64, 1, 4096).values():
        answer = kernel.supports(groups_of(64, 1, 64))
        assert not answer
        assert "K is 64 (would match with K of" in str(answer)


# Sums that lie anywhere ------------------------------------------------------------------


def of_sums(epilogue=None, columns=N, **options):
    out = [empty(K, columns) for _ in range(E)]
    return ka.GroupedGemmArguments(
        empty(T, K).t(), empty(T, N), out, OFFSETS, epilogue=epilogue, **options
    )  # fmt: skip


@pytest.mark.parametrize("accumulate", [False, True])
def test_sums_are_written_anywhere_on_hopper(accumulate):
    args = of_sums(accumulate=accumulate)
    names = {"sm90.grouped_gemm_sum_pointers", "sm80.grouped_gemm_sum_pointers"}
    assert set(families(args)) == names
    kernel = families(args)["sm90.grouped_gemm_sum_pointers"]
    assert kernel.get_workspace_size(args) == kernel.workspace_for(*args.tensors)
    assert set(families(args, cc=80)) == {"sm80.grouped_gemm_sum_pointers"}


def spread(granularity):
    return ka.EpilogueArguments(lambda a: ep.interleave(a, a * a, granularity=granularity))


def test_sums_in_halves_are_one_tensor():
    assert "sm90.grouped_gemm_sum_pointers" in families(of_sums(spread(32), 2 * N))
    args = of_sums(spread("halves"), 2 * N)
    assert "sm90.grouped_gemm_sum_pointers" not in families(args)
    assert reason(args, "sm90.grouped_gemm_sum_pointers") == (
        "columns of out are dealt out in halves where it is one tensor"
    )


# Rows that are scattered -----------------------------------------------------------------


def test_rows_that_are_scattered_are_not_dealt_out_in_halves():
    assert "sm90.grouped_gemm" in families(of_rows(spread("halves"), 2 * N))
    assert "sm90.grouped_gemm" in families(of_rows(spread(32), 2 * N, out_row_index=index()))
    args = of_rows(spread("halves"), 2 * N, out_row_index=index())
    assert "sm90.grouped_gemm" not in families(args)
    assert reason(args, "sm90.grouped_gemm") == (
        "columns of out that are dealt out in halves are in rows that lie side by side"
    )


# Pairs of columns where tokens are few ---------------------------------------------------


def gated(granularity="halves", fn=None):
    def pairs(accum):
        gate, up = ep.glu_pair(accum, granularity=granularity)
        return ep.silu(gate) * up

    return ka.EpilogueArguments(fn or pairs)


def transposed(args):
    found = ka.get_kernels(args, cc="sm_90a", providers=["cutedsl"])
    return {k.family_name() for k in found if getattr(k.metadata.design, "swap_ab", False)}


@pytest.mark.parametrize("granularity", [32, "halves"])
@pytest.mark.parametrize("discrete", [False, True])
def test_transposed_tiles_take_pairs_of_columns(granularity, discrete):
    family = "sm90.grouped_gemm_pointers" if discrete else "sm90.grouped_gemm"
    assert transposed(of_rows(gated(granularity), N // 2, discrete)) == {family}
    assert not transposed(of_rows(gated(1), N // 2, discrete))


def test_transposed_tiles_take_pairs_of_8_bits():
    B = empty(E, N, K, element=F8).mT
    A, out = empty(T, K, element=F8), empty(T, N // 2)
    args = ka.GroupedGemmArguments(A, B, out, OFFSETS, epilogue=gated())
    assert transposed(args) == {"sm90.grouped_gemm_fp8"}


@pytest.mark.parametrize("indices", ["row_index", "out_row_index"])
def test_transposed_tiles_neither_gather_nor_scatter_tokens(indices):
    args = of_rows(gated(32), N // 2, **{indices: index()})
    assert "sm90.grouped_gemm" in families(args)
    assert not transposed(args)


@pytest.mark.parametrize("granularity", [32, "halves"])
def test_few_tokens_of_pairs_prefer_the_transposed_product(granularity):
    def first(tokens):
        experts, wide = 8, 28672
        A, B = empty(experts * tokens, 4096), empty(experts, wide, 4096).mT
        args = ka.fusions.grouped_gemm_glu(
            A, B, empty(experts, element=torch.int32),
            out=empty(experts * tokens, wide // 2), granularity=granularity,
        )  # fmt: skip
        return ka.get_kernels(args, cc="sm_90a", providers=["cutedsl"])[0].metadata.design

    assert all(first(tokens).swap_ab for tokens in (1, 2, 8))
    assert not any(first(tokens).swap_ab for tokens in (512, 4096))


# Tiles that are taken --------------------------------------------------------------------


def hopper(args):
    found = ka.get_kernels(args, cc="sm_90a", providers=["cutedsl"])
    return [one for one in found if one.family_name().startswith("sm90")]


def schedulers(kernels):
    return [one.metadata.design.scheduler for one in kernels]


def picked_and_scattered():
    return of_rows(row_index=index(), out_row_index=index())


def with_sums():
    amax, sums = empty(E, element=F32), empty(E, N, element=F32)
    epilogue = ka.EpilogueArguments(
        lambda a: (a, ep.amax(a, None), ep.sum(a, -2)), amax=amax, sums=sums
    )
    return of_rows(epilogue)


PROBLEMS = {
    "rows": of_rows,
    "rows, picked": picked_and_scattered,
    "rows with sums": with_sums,
    "experts anywhere": lambda: of_rows(discrete=True),
    "8 bits": lambda: eight_bits(None, None),
    "8 bits in blocks": lambda: eight_bits(("block_1x128", T, 2), (E, 2, 1)),
    "sums": lambda: ka.GroupedGemmArguments(empty(T, K).t(), empty(T, N), empty(E, K, N), OFFSETS),
    "sums anywhere": lambda: of_sums(accumulate=True),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_some_designs_take_tiles_and_others_have_a_static_share_of_them(problem):
    args = PROBLEMS[problem]()
    named = {one.metadata.kernel_name: one.metadata for one in hopper(args)}
    assert set(schedulers(hopper(args))) == {"static", "dynamic"}
    for name, metadata in named.items():
        assert ("_dynamic" in name) == (metadata.design.scheduler == "dynamic")
        static = dataclasses.replace(metadata.design, scheduler="static")
        assert static.label() == metadata.design.label().replace("_dynamic", "")
        assert type(metadata).from_json(metadata.to_json()) == metadata


@pytest.mark.parametrize(
    ("rows", "tile"), [(4, (16, 128)), (64, (128, 256)), (128, (128, 128)), (512, (128, 128))]
)
@pytest.mark.parametrize("fused", [False, True])
def test_tiles_are_taken_where_a_group_may_end_in_any_of_them(rows, tile, fused):
    A, B, offsets = (
        empty(8 * rows, 4096),
        empty(8, 4096, 4096).mT,
        empty(8, element=torch.int32),
    )
    args = ka.GroupedGemmArguments(A, B, empty(8 * rows, 4096), offsets)
    if fused:
        args = ka.fusions.grouped_gemm_glu(A, B, offsets, out=empty(8 * rows, 2048))
    design = hopper(args)[0].metadata.design
    assert (design.tile_shape[:2], design.scheduler) == (tile, "dynamic")


@pytest.mark.parametrize("rows", [128, 1024, 4096])
def test_blocks_that_count_on_those_beside_them_begin_on_an_empty_gpu_and_are_not_first(rows):
    B, offsets = empty(8, 4096, 4096).mT, empty(8, element=torch.int32)
    args = ka.GroupedGemmArguments(empty(8 * rows, 4096), B, empty(8 * rows, 4096), offsets)
    first, *others = (one.metadata.design for one in hopper(args))
    assert first.cluster_shape[1] == 2
    independent = [one for one in others if not one.dependent_launch]
    assert {one.tile_shape[:2] for one in independent} == {(64, 256), (64, 192)}
    assert all(one.cluster_shape[:2] == (1, 1) and one.scheduler == "static" for one in independent)


def test_tiles_that_wait_for_what_they_read_are_taken_in_large_groups():
    B, offsets = empty(8, 4096, 14336), empty(8, element=torch.int32)
    for rows in (512, 1024, 4096):
        dy, z = empty(8 * rows, 4096), empty(8 * rows, 28672)
        args = ka.fusions.grouped_gemm_dglu(
            dy, B, offsets, out=empty(8 * rows, 28672), preactivation=z, granularity="halves"
        )
        assert schedulers(hopper(args))[0] == "dynamic"


@pytest.mark.parametrize(("rows", "scheduler"), [(256, "static"), (2048, "dynamic")])
def test_tiles_of_sums_are_taken_first_where_groups_are_long(rows, scheduler):
    A, B, offsets = empty(8 * rows, 4096).t(), empty(8 * rows, 4096), empty(8, element=torch.int32)
    args = ka.GroupedGemmArguments(A, B, empty(8, 4096, 4096), offsets)
    assert schedulers(hopper(args))[0] == scheduler


@pytest.mark.parametrize("problem", PROBLEMS)
def test_who_takes_tiles_needs_a_counter_in_the_workspace(problem):
    args = PROBLEMS[problem]()
    for kernel in hopper(args):
        size = kernel.get_workspace_size(args)
        assert size == kernel.workspace_for(*args.tensors)
        assert size >= ZEROED or kernel.metadata.design.scheduler == "static"
    sizes = {kernel.get_workspace_size(args) for kernel in hopper(of_rows())}
    assert sizes == {0, ZEROED}


def test_reductions_leave_the_last_counter_to_the_tiles():
    rows = 64 * (ZEROED // 4)  # with a counter for each 64
    wide = empty(rows, element=F32)
    for taken in (0, 1):
        args = ka.GroupedGemmArguments(
            empty(rows - 128 * taken, K),
            empty(1, N, K).mT,
            empty(rows - 128 * taken, N),
            empty(1, element=torch.int32),
            epilogue=ka.EpilogueArguments(
                lambda a: (a, ep.sum(a, -1)), sums=wide[: rows - 128 * taken]
            ),
        )
        found = [one for one in hopper(args) if one.metadata.design.tile_shape[0] == 128]
        assert ("dynamic" in schedulers(found)) == bool(taken)
        assert "static" in schedulers(found)
    args = ka.GroupedGemmArguments(
        empty(rows, K), empty(1, N, K).mT, empty(rows, N), empty(1, element=torch.int32),
        epilogue=ka.EpilogueArguments(lambda a: (a, ep.sum(a, -1)), sums=wide),
    )  # fmt: skip
    kernel = next(one for one in found if one.metadata.design.scheduler == "dynamic")
    assert str(kernel.supports(args).error) == (
        "the epilogue's reductions take 16384 counters of 16383"
    )


@pytest.mark.compile
@pytest.mark.parametrize("problem", PROBLEMS)
def test_designs_that_take_tiles_are_built_as_described(problem):
    args = PROBLEMS[problem]()
    for kernel in hopper(args):
        design, built = kernel.metadata.design, kernel.implementation_for(args)
        assert (built.dynamic, built.stages) == (design.scheduler == "dynamic", design.stages)
        assert built.shared_memory_bytes <= SHARED_MEMORY_BYTES


@pytest.mark.compile
@pytest.mark.parametrize("problem", some(PROBLEMS, 4))
def test_designs_that_take_tiles_do_not_spill(problem):
    args = PROBLEMS[problem]()
    taking = [one for one in hopper(args) if one.metadata.design.scheduler == "dynamic"]
    for kernel in taking if EVERY else taking[:1]:
        resources = kernel.compile(args, "sm_90a").resources
        assert resources.spill_bytes == 0, kernel.metadata.kernel_name
        assert resources.shared_memory_bytes <= SHARED_MEMORY_BYTES


@pytest.mark.compile
def test_other_schedulers_are_refused():
    from kernel_api.implementations.sm90.scheduled import ScheduledGemm

    with pytest.raises(ValueError, match="scheduler is static or dynamic, not 'eager'"):
        ScheduledGemm((128, 128, 64), scheduler="eager")


def test_a_design_counts_the_ring_that_the_kernel_has():
    from kernel_api.implementations.sm90 import tile_queue
    from kernel_api.providers.cutedsl.gemm import sm90_design

    assert sm90_design._RING_BYTES == tile_queue.BYTES


def test_the_model_knows_when_a_tile_is_asked_for():
    from kernel_api.implementations.sm90 import tile_queue
    from kernel_api.providers.cutedsl.gemm import model

    assert model._FEW_STEPS == tile_queue.EARLY


def test_the_ring_has_room_for_the_tiles_of_all_stages():
    from cutlass import BFloat16

    from kernel_api.implementations.sm90.grouped_gemm import GroupedGemm
    from kernel_api.implementations.sm90.tile_queue import MOST_STAGES

    how = {"a_type": BFloat16, "b_type": BFloat16, "output_types": (BFloat16,)}
    GroupedGemm((64, 64, 32), stages=MOST_STAGES, scheduler="dynamic", **how)
    GroupedGemm((64, 64, 32), stages=MOST_STAGES + 1, **how)
    with pytest.raises(ValueError, match=r"15 stages may hold 15 tiles that .* for 14"):
        GroupedGemm((64, 64, 32), stages=MOST_STAGES + 1, scheduler="dynamic", **how)
    # Where one block shares nothing with the leader, it may be twice as far behind.
    square = {"cluster_shape": (2, 2), "scheduler": "dynamic", **how}
    GroupedGemm((64, 64, 32), stages=MOST_STAGES // 2, **square)
    with pytest.raises(ValueError, match=r"8 stages may hold 16 tiles"):
        GroupedGemm((64, 64, 32), stages=MOST_STAGES // 2 + 1, **square)

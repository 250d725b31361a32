"""What the attention families for Hopper offer: which tiles, what is refused, compiled code."""

import math
import random
import subprocess
import sys

import pytest
import torch
from support.cute_on_cpu import LENT, lender
from support.kernels import EVERY_KERNEL
from support.sass import sass
from support.sdpa import Draw
from support.sdpa_offered import (
    BANDS,
    DECODE,
    DROPOUT,
    EVERY_ROOM,
    FORWARD,
    FP8,
    OPTIONS,
    ROOMS,
    blocks,
    meta,
    offered,
    paged,
    some,
)

import kernel_api as ka
from kernel_api import _workspaces, masks
from kernel_api.implementations.sm90.sdpa_workspace import first_of_packed

WHY = "random numbers of dropout leave registers for fewer scores at once"


def tiles(name, room, **options):
    """Of blocks that have a multiprocessor for themselves."""
    designs = [kernel.metadata.design for kernel in offered(name, room, **options)]
    return {design.tile_shape for design in designs if getattr(design, "resident", 1) == 1}


@pytest.mark.parametrize(("name", "room"), EVERY_ROOM)
def test_dropout_is_served_by_tiles_with_registers_left(name, room):
    every, found = tiles(name, room), tiles(name, room, dropout=DROPOUT)
    assert found
    taken = {math.prod(tile) for tile in every - found}
    assert all(math.prod(tile) < scores for tile in found for scores in taken)


def test_dropout_takes_wide_tiles_away_and_it_is_told():
    every, found = tiles(FORWARD, (128, 128)), tiles(FORWARD, (128, 128), dropout=DROPOUT)
    assert every - found == {(128, 160), (128, 176)}
    args = meta(FORWARD, (128, 128), dropout=DROPOUT)
    (wide, *_) = [
        kernel
        for kernel in offered(FORWARD, (128, 128))
        if kernel.metadata.design.tile_shape == (128, 176)
    ]
    status = wide.supports(args)
    assert not status
    assert str(status.error).endswith(f"{WHY}; there are 16384 at most")
    assert wide.supports(meta(FORWARD, (128, 128), mask=masks.Causal()))


@pytest.mark.parametrize("name", ROOMS)
def test_what_is_empty_is_refused(name):
    element = "float8_e4m3fn" if name == FP8 else "bfloat16"
    draw = Draw(2, 4, 2, 0, 512, 64, 64, element=element, device="meta")
    args = draw.arguments(out=draw.results(read=False).bfloat16())
    (told,) = [r for r in ka.explain(args, cc="sm_90a").rejected if r.family == name]
    assert "no mode is empty" in told.reason


@pytest.mark.parametrize("dim", (72, 80, 96))
def test_decode_takes_a_head_dimension_by_its_own_tiles(dim):
    draw = Draw(2, 8, 1, 1, 4096, dim, dim, element="bfloat16", device="meta")
    args = draw.arguments(out=draw.results(read=False).bfloat16())
    kernels = ka.get_kernels(args, cc="sm_90a", providers=["cutedsl"])
    own = [kernel for kernel in kernels if kernel.family == DECODE]
    assert {kernel.metadata.design.head_dim for kernel in own} == {(128, 128)}


@pytest.mark.parametrize(("dim", "tile"), [(72, (192, 96)), (80, (128, 128)), (88, (192, 96))])
def test_rows_that_begin_apart_are_for_tiles_of_many_queries(dim, tile):
    """TMA takes longer for a row that begins at no multiple of 32 bytes."""
    draw = Draw(8, 16, 16, 1024, 1024, dim, dim, element="bfloat16", device="meta")
    args = draw.arguments(out=draw.results(read=False))
    first = ka.get_kernels(args, cc="sm_90a", providers=["cutedsl"])[0]
    assert (first.family_name(), first.metadata.design.tile_shape) == (FORWARD, tile)


def test_fp8_takes_a_head_dimension_by_its_own_tiles():
    own = offered(FP8, (80, 80))
    assert {kernel.metadata.design.head_dim for kernel in own} == {(128, 128)}


def packed_fp8(room=(128, 128), **options):
    """Three sequences of 8 bits, one behind the other."""
    draw = Draw(1, 4, 2, 300, 500, *room, element="float8_e4m3fn", device="meta")
    tensors = {"Q": draw.queries(), "K": draw.keys(), "V": draw.values()}
    tensors["out"] = draw.results(read=False).bfloat16()
    ends = torch.zeros(4, dtype=torch.int32, device="meta")
    return ka.SdpaArguments(
        **{name: one[0].transpose(0, 1) for name, one in tensors.items()},
        lse=draw.lse()[0],
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends.clone(),
        max_seqlen_q=200,
        max_seqlen_kv=300,
        descale_v=torch.ones(3, 2, device="meta"),
        **options,
    )


def offered_packed_fp8(room=(128, 128), **options):
    kernels = ka.get_kernels(packed_fp8(room, **options), cc="sm_90a", providers=["cutedsl"])
    return [kernel for kernel in kernels if kernel.family == FP8]


@pytest.mark.parametrize("room", ROOMS[FP8])
def test_fp8_takes_packed_sequences_by_every_tile(room):
    packed = offered_packed_fp8(room)
    assert {kernel.metadata.design.tile_shape for kernel in packed} == tiles(FP8, room)


def offered_paged(name=FP8, *given, **options):
    kernels = ka.get_kernels(paged(name, *given, **options), cc="sm_90a", providers=["cutedsl"])
    return [kernel for kernel in kernels if kernel.family == name]


@pytest.mark.parametrize(("name", "room"), EVERY_ROOM)
@pytest.mark.parametrize("size", [8, 16, 32, 64, 128, 256])
def test_pages_are_taken_by_tiles_that_they_fit(name, room, size):
    designs = [kernel.metadata.design for kernel in offered_paged(name, room, size)]
    found = {one.tile_shape for one in designs if getattr(one, "resident", 1) == 1}
    every = tiles(name, room) - {(128, 176), (128, 224)}
    assert found == {t for t in every if t[1] % size == 0 or size % t[1] == 0}


@pytest.mark.parametrize(
    ("name", "tile", "most"), [(FORWARD, (128, 176), 128 * 160), (FP8, (128, 224), 128 * 192)]
)
def test_pages_take_the_widest_tile_away_and_it_is_told(name, tile, most):
    wide = [k for k in offered(name, (128, 128)) if k.metadata.design.tile_shape == tile]
    assert wide
    words = f"numbers of pages leave registers for fewer scores at once; there are {most} at most"
    for kernel in wide:
        assert str(kernel.supports(paged(name, size=8)).error).endswith(words)


def reasons(args):
    """Why the forward family has no kernel of 16 bits for something."""
    return " ".join(r.reason for r in ka.explain(args, cc="sm_90a").rejected if r.family == FORWARD)


def test_the_largest_head_dimension_that_there_is_is_told():
    q = torch.empty(1, 4, 128, 264, dtype=torch.bfloat16, device="meta")
    (told,) = [
        one
        for one in ka.explain(ka.SdpaArguments(q, q, q, q.clone()), cc="sm_90a").rejected
        if one.family == FORWARD
    ]
    assert told.reason == "the head dimensions have room; they are (264, 264) of (256, 256)"
    assert told.nearest == "would match with 256 of Q and K and 256 of V at most"


def test_pages_and_a_bias_are_for_tiles_with_registers_left_and_it_is_told():
    bias = torch.empty(1, 8, 300, 256, dtype=torch.float32, device="meta")  # does not come by TMA
    served = {room: offered_paged(FORWARD, room, 16, bias=bias) for room in ROOMS[FORWARD]}
    found = {room: {k.metadata.design.tile_shape for k in own} for room, own in served.items()}
    assert {r: t for r, t in found.items() if t} == {(96, 96): {(192, 96)}, (256, 256): {(128, 80)}}
    other = bias.bfloat16()
    assert all(offered_paged(FORWARD, room, 16, bias=other) for room in ROOMS[FORWARD])
    words = "numbers of pages and a bias leave registers to some tiles alone"
    assert words in reasons(paged(FORWARD, size=16, bias=bias))


def test_pages_and_dropout_are_for_tiles_with_registers_left_and_it_is_told():
    served = {r for r in ROOMS[FORWARD] if offered_paged(FORWARD, r, 16, dropout=DROPOUT)}
    assert served == {*ROOMS[FORWARD]} - {(128, 128)}
    words = "numbers of pages and dropout leave no registers to tiles of 128 columns"
    assert words in reasons(paged(FORWARD, size=16, dropout=DROPOUT))


@pytest.mark.parametrize("name", ROOMS)
@pytest.mark.parametrize("size", [12, 384 + 8])
def test_pages_that_do_not_fit_are_refused_and_it_is_told(name, size):
    rejected = ka.explain(paged(name, size=size), cc="sm_90a").rejected
    told = [r.reason for r in rejected if r.family == name]
    assert told
    words = f"pages hold a part of a tile's keys, or several tiles; they hold {size}"
    assert all(words in reason for reason in told)


@pytest.mark.parametrize("size", [16, 64, 256])
@pytest.mark.parametrize("band", BANDS)
def test_many_queries_to_keys_in_pages_are_for_hopper_first(band, size):
    args = paged(FORWARD, (128, 128), size, most=4096 // size, mask=BANDS[band])
    kernels = ka.get_kernels(args, cc="sm_90a", providers=["cutedsl"])
    assert {kernel.family for kernel in kernels} == {FORWARD, DECODE, "sm80.sdpa_forward"}
    assert kernels[0].family in (FORWARD, DECODE)


def test_packed_sequences_have_whole_tiles_of_their_own():
    choice = random.Random(0)
    for tile in {tile[1] for room in ROOMS[FP8] for tile in tiles(FP8, room)}:
        assert tile % 16 == 0
        for _ in range(200):
            lengths = [choice.choice((0, 1, tile - 1, tile, 3 * tile + 2)) for _ in range(6)]
            lengths = [max(0, length + choice.randint(-2, 2)) for length in lengths]
            keys, end = 0, 0
            for sequence, length in enumerate(lengths):
                begin = first_of_packed(keys, sequence, tile)
                assert begin >= end
                assert begin % tile == 0
                keys, end = keys + length, begin + -(-length // tile) * tile
            assert end <= first_of_packed(keys, len(lengths), tile)


def test_fp8_borrows_room_by_how_many_sequences_there_are(monkeypatch):
    borrowed, calls = [], []
    monkeypatch.setattr(_workspaces, "lender", lender(borrowed))
    args = packed_fp8()
    values = dict(args.launch_values)
    for kernel in offered_packed_fp8():
        tile = kernel.metadata.design.tile_shape[1]
        size = kernel.get_workspace_size(args)
        assert size == _workspaces.ZEROED + 2 * 128 * ((500 + 3 * tile) // tile * tile)
        # Else a launch for known sizes would not ask how many there are.
        assert size != kernel.workspace_for(*args.tensors)
        launch = kernel._with_more(lambda *given: calls.append(given), 0, tuple(values))
        launch(*args.tensors, 132, **values)
        assert borrowed[-1] == size
        more, address, count = calls[-1][4:]
        assert (len(more), address, count) == (len(values), LENT, 132)


@pytest.mark.parametrize("most", [16, 20])  # of which 20 are as many as there are pages
def test_fp8_borrows_room_by_the_table_of_pages(most, monkeypatch):
    borrowed = []
    monkeypatch.setattr(_workspaces, "lender", lender(borrowed))
    args = paged(most=most)
    values = dict(args.launch_values)
    (kernel, *_) = offered_paged(most=most)
    size = kernel.get_workspace_size(args)
    assert size == _workspaces.ZEROED + 2 * 2 * 128 * most * 32
    launch = kernel._with_more(lambda *given: None, 0, tuple(values))
    launch(*args.tensors, 132, **values)
    longer = {**values, "page_table": torch.zeros(3, 7, dtype=torch.int32, device="meta")}
    launch(*args.tensors, 132, **longer)
    assert borrowed == [size, _workspaces.ZEROED + 3 * 2 * 128 * 7 * 32]


def few(form, make):
    """Arguments of few queries, dense or in pages."""
    draw = Draw(2, 8, 2, 3, 512, 128, 128, element="bfloat16", device="meta")
    given = make(draw)
    if form == "paged":
        pages = torch.empty(40, 2, 32, 128, dtype=torch.bfloat16, device="meta")
        integers = {"dtype": torch.int32, "device": "meta"}
        given |= {"K": pages, "V": pages.clone()}
        given |= {"page_table": torch.zeros(2, 16, **integers)}
        given |= {"seq_lens_kv": torch.zeros(2, **integers)}
    return draw.arguments(**given)


@pytest.mark.parametrize("form", ["dense", "paged"])
@pytest.mark.parametrize("option", OPTIONS)
def test_few_queries_are_served_with_every_option(option, form):
    args = few(form, OPTIONS[option])
    kernels = ka.get_kernels(args, cc="sm_90a", providers=["cutedsl"])
    assert kernels[0].family == DECODE


def test_few_queries_are_refused_with_dropout():
    args = few("dense", lambda d: {"dropout": DROPOUT})
    (told,) = [r for r in ka.explain(args, cc="sm_90a").rejected if r.family == DECODE]
    assert "dropout is for one head: rows side by side are of several" in told.reason


def scalings(**options):
    return {kernel.metadata.design.scaling for kernel in offered(FORWARD, (128, 128), **options)}


def test_scaling_is_late_where_scores_are_plain_and_it_is_told():
    assert scalings() == scalings(mask=BANDS["window"]) == {"at_once", "late", "seldom"}
    assert scalings(softcap=5.0) == {"at_once"}
    first, masked = (
        next(k.metadata.design for k in found if k.metadata.design.resident == 1)
        for found in (
            offered(FORWARD, (128, 128)),
            offered(FORWARD, (128, 128), mask=ka.masks.Causal()),
        )
    )
    assert first.scaling == "late"
    assert masked.scaling == "at_once"
    args = meta(FORWARD, (128, 128), softcap=5.0)
    for kernel in offered(FORWARD, (128, 128)):
        if kernel.metadata.design.scaling != "at_once":
            assert "leave no registers to scale late" in str(kernel.supports(args).error)


def measured(**options):
    """With the largest scores and the sums of exponentials."""
    rows = {n: torch.empty(2, 4, 512, device="meta") for n in ("score_max", "score_sum_exp")}
    return {**rows, **options}


@pytest.mark.parametrize("name", ["score_max", "score_sum_exp"])
def test_scaling_seldom_keeps_no_largest_score_and_it_is_told(name):
    rows = {name: torch.empty(2, 4, 512, device="meta")}
    assert scalings(**rows) == {"at_once", "late"}
    args = meta(FORWARD, (128, 128), **rows)
    for kernel in offered(FORWARD, (128, 128)):
        status = kernel.supports(args)
        if kernel.metadata.design.scaling == "seldom":
            assert str(status.error).endswith(
                f"scaling seldom, the largest score of a row is not kept; {name} is given"
            )
        else:
            assert status


def test_torch_is_refused_where_statistics_are_asked_for_and_it_is_told():
    args = meta(FORWARD, (128, 128), **measured())
    told = [r for r in ka.explain(args, cc="sm_90a").rejected if r.family.startswith("torch.")]
    words = "torch gives no largest scores and no sums of exponentials; score_max is given"
    families = {r.family for r in told if words in r.reason}
    assert {"torch.sdpa_cudnn", "torch.sdpa_flash", "torch.flex_attention"} <= families
    assert not ka.get_kernels(args, cc="sm_90a", providers=["torch"])


def test_a_table_with_small_entries_takes_wide_tiles_away_and_it_is_told():
    small, large = (blocks(512, 512, shape) for shape in ((128, 128), (256, 256)))
    assert tiles(FORWARD, (128, 128), mask=small) == {(128, 128)}
    assert tiles(FORWARD, (128, 128), mask=large) == tiles(FORWARD, (128, 128))
    (wide,) = [
        kernel
        for kernel in offered(FORWARD, (128, 128))
        if kernel.metadata.design.tile_shape == (128, 176)
    ][:1]
    status = wide.supports(meta(FORWARD, (128, 128), mask=small))
    assert str(status.error).endswith(
        "several entries of a table leave registers for fewer scores at once; there are 16384 at "
        "most"
    )


def test_as_many_entries_are_expected_as_a_tile_may_meet():
    from kernel_api.implementations.common.attention.blocks import _met

    for tile in (64, 80, 128):
        for entry in range(1, 300):
            firsts = range(0, 8 * tile * entry // math.gcd(tile, entry), tile)
            met = max((first + tile - 1) // entry - first // entry + 1 for first in firsts[:300])
            assert met <= _met(tile, entry) <= met + 1


def test_the_size_of_a_workspace_loads_no_compiler():
    code = (
        "import sys\n"
        "from kernel_api.implementations.sm90.sdpa_workspace import keys_with_room, part_bytes\n"
        "assert (keys_with_room(17), part_bytes(64, 128, 1)) == (32, 64 * 129 * 4)\n"
        "assert 'cutlass' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Compiled --------------------------------------------------------------------------------


def dropping():
    """Every tile that serves dropout with a band, or without; else the first of some rooms."""
    if not EVERY_KERNEL:
        return [(FORWARD, (64, 64), "causal", offered(FORWARD, (64, 64), dropout=DROPOUT)[0])]
    return [
        (name, room, band, kernel)
        for name, room in EVERY_ROOM
        for band, mask in BANDS.items()
        for kernel in offered(name, room, dropout=DROPOUT, mask=mask)
        # There is no smaller tile.
        if (name, room) != (FP8, (256, 256))
        if kernel.metadata.operands.Q.dtype != torch.float16
    ]


@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "room", "band", "kernel"),
    dropping(),
    ids=lambda one: one.metadata.kernel_name if isinstance(one, ka.Kernel) else str(one),
)
def test_dropout_spills_nothing(name, room, band, kernel):
    args = meta(name, room, dropout=DROPOUT, mask=BANDS[band])
    assert kernel.compile(args, cc="90a").resources.spill_bytes == 0


@pytest.mark.compile
@pytest.mark.parametrize("room", ROOMS[FORWARD] if EVERY_KERNEL else [(256, 256)])
def test_late_scaling_spills_nothing(room):
    args = meta(FORWARD, room, mask=masks.Causal())
    found = offered(FORWARD, room, mask=args.mask)
    for kernel in some([one for one in found if one.metadata.design.scaling != "at_once"]):
        assert kernel.compile(args, cc="90a").resources.spill_bytes == 0


@pytest.mark.compile
@pytest.mark.parametrize(("name", "room"), EVERY_ROOM if EVERY_KERNEL else [(FORWARD, (256, 256))])
def test_statistics_spill_nothing(name, room):
    options = measured(mask=masks.Causal())
    args = meta(name, room, **options)
    for kernel in some(offered(name, room, **options)):
        if spilled := kernel.compile(args, cc="90a").resources.spill_bytes:
            plain = kernel.compile(meta(name, room, mask=masks.Causal()), cc="90a").resources
            assert spilled <= plain.spill_bytes


@pytest.mark.compile
@pytest.mark.parametrize("room", ROOMS[FORWARD] if EVERY_KERNEL else [(64, 64)])
def test_a_table_of_blocks_spills_nothing(room):
    args = meta(FORWARD, room, mask=blocks(512, 512) & masks.Causal())
    for kernel in some(offered(FORWARD, room, mask=args.mask)):
        assert kernel.compile(args, cc="90a").resources.spill_bytes == 0


@pytest.mark.compile
@pytest.mark.parametrize("option", ["alibi", "blocks"] if EVERY_KERNEL else ["blocks"])
@pytest.mark.parametrize("form", ["dense", "paged"] if EVERY_KERNEL else ["paged"])
def test_options_of_few_queries_spill_nothing(option, form):
    args = few(form, OPTIONS[option])
    kernels = ka.get_kernels(args, cc="sm_90a", providers=["cutedsl"])
    for kernel in some([kernel for kernel in kernels if kernel.family == DECODE]):
        assert kernel.compile(args, cc="90a").resources.spill_bytes == 0


@pytest.mark.compile
@pytest.mark.parametrize("dim", (64, 128) if EVERY_KERNEL else (128,))
def test_parts_that_meet_leave_room_for_a_block_of_the_next_kernel(dim):
    draw = Draw(1, 8, 1, 1, 4096, dim, dim, element="bfloat16", device="meta")
    args = draw.arguments(out=draw.results(read=False).bfloat16())
    kernels = ka.get_kernels(args, cc="sm_90a", providers=["cutedsl"])
    meeting = [k for k in kernels if k.family == DECODE and k.metadata.design.cluster > 1]
    assert len(meeting) == 2
    for kernel in some(meeting):
        needed = kernel.compile(args, cc="90a").resources
        assert 2 * needed.registers * needed.threads <= 1 << 16
        assert 2 * (needed.shared_memory_bytes + 1024) <= 228 * 1024
        assert needed.spill_bytes == 0


@pytest.mark.compile
@pytest.mark.parametrize("form", ["dense", "paged"])
def test_keys_are_asked_for_while_the_kernels_before_run(form):
    """Where they lie is known then; numbers of pages may still be written, so they are read from
    L2, and again."""
    args = few(form, lambda draw: {"out": draw.results(read=False).bfloat16()})
    kernels = ka.get_kernels(args, cc="sm_90a", providers=["cutedsl"])
    own = [kernel for kernel in kernels if kernel.family == DECODE]
    for kernel in own if EVERY_KERNEL else own[:1]:
        launched = sass(kernel.compile(args, cc="90a")).split("\n.text.")
        (code,) = [one for one in launched if "UTMALDG" in one]
        asks, waits = code.find("UTMAPF"), code.find("ACQBULK")
        assert 0 < asks < waits
        early = [line for line in code[:waits].splitlines() if " LDG." in line]
        assert bool(early) == (form == "paged") and all("STRONG.GPU" in line for line in early)


def test_few_keys_are_read_by_parts_that_meet():
    def first(batches, keys):
        shapes = (batches, 64, 1, 128), (batches, 8, keys, 128)
        Q, K = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
        args = ka.SdpaArguments(Q, K, K.clone(), Q.clone())
        return ka.get_kernels(args, cc="sm_90a", providers=["cutedsl"])[0].metadata.design

    assert first(1, 1024).cluster > 1
    assert first(1, 1 << 14).cluster == first(4, 4096).cluster == 1
    assert first(16, 1024).cluster > 1  # tiles are no parts, and the next kernel's find room
    assert first(64, 1 << 16).cluster == 1


@pytest.mark.compile
@pytest.mark.parametrize("room", ROOMS[FP8] if EVERY_KERNEL else [(256, 256)])
def test_packed_sequences_of_8_bits_spill_nothing(room):
    mask = masks.Causal("bottom_right")
    for kernel in some(offered_packed_fp8(room, mask=mask)):
        resources = kernel.compile(packed_fp8(room, mask=mask), cc="90a").resources
        assert resources.spill_bytes == 0


@pytest.mark.compile
@pytest.mark.parametrize(("name", "room"), EVERY_ROOM if EVERY_KERNEL else [(FP8, (128, 128))])
@pytest.mark.parametrize("size", [16, 32, 256] if EVERY_KERNEL else [16])
def test_pages_spill_nothing(name, room, size):
    others = (masks.Causal("bottom_right"),) if EVERY_KERNEL else ()
    for mask in (BANDS["window"], *others):
        for kernel in some(offered_paged(name, room, size, mask=mask)):
            resources = kernel.compile(paged(name, room, size, mask=mask), cc="90a").resources
            assert resources.spill_bytes == 0


@pytest.mark.compile
def test_pages_and_a_bias_spill_nothing():
    for room in ((96, 96), (256, 256)) if EVERY_KERNEL else ((256, 256),):
        for mask in BANDS.values() if EVERY_KERNEL else (BANDS["window"],):
            bias = torch.empty(1, 8, 300, 256, dtype=torch.bfloat16, device="meta")
            given = {"bias": bias, "mask": mask}
            for kernel in some(offered_paged(FORWARD, room, 16, **given)):
                resources = kernel.compile(paged(FORWARD, room, 16, **given), cc="90a").resources
                assert resources.spill_bytes == 0

"""What the family of attention gradients for Hopper offers: which tiles, dBias, compiled code."""

import random
import time

import pytest
import torch
from support.kernels import EVERY_KERNEL
from support.sdpa import BACKWARD, Draw

import kernel_api as ka
from kernel_api import masks
from kernel_api.arguments import Dropout
from kernel_api.implementations.sm90.sdpa_backward_shares import Blocks, costs_of, shares_of

FAMILY = "sm90.sdpa_backward"
ROOMS = ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256))
NARROW = ROOMS[:2]
CAUSAL = masks.Causal()
WINDOW = masks.SlidingWindow(50, 9) & masks.SlidingWindow(None, 12, "bottom_right")
#: Of processor time, for one kernel; what the compiler takes of it to start with is not counted.
#: A machine that is slow or shared may take longer, but no more of what a plain kernel takes.
MOST_SECONDS, MOST_OF_PLAIN = 5.0, 6.0


PARITY = masks.MaskMod(lambda b, h, q, kv: (q + kv) % 2 == 0)


def table(draw, size=128, element=torch.bool):
    shape = -(-draw.S_q // size), -(-draw.S_kv // size)
    entries = torch.ones(1, 1, *shape, dtype=element, device="meta")
    return masks.BlockSparse(entries, (size, size))


def full_table(draw):
    """That tells where a function shows all."""
    return table(draw, element=torch.uint8) & PARITY & CAUSAL


def bias(draw):
    return draw.random(1, draw.H, draw.S_q, draw.S_kv)


def wide_bias(draw):
    """That is read where it lies."""
    return bias(draw).float()


DROPOUT, SOFTCAP = {"dropout": Dropout(0.1, 1, 2)}, {"softcap": 5.0}
BIAS, ALIBI = {"bias": bias}, {"alibi": lambda d: d.wides(d.H)}
EVERYTHING = {
    **DROPOUT, **SOFTCAP, **BIAS, **ALIBI, "mask": lambda d: WINDOW & table(d), "dBias": bias,
    **dict.fromkeys(("sink", "dSink"), lambda d: d.wides(d.H)),
}  # fmt: skip


def meta(room, length=512, heads=(4, 2), **options):
    draw = Draw(2, *heads, length, length, *room, element="bfloat16", device="meta")
    given = {name: make(draw) if callable(make) else make for name, make in options.items()}
    read = draw.queries(), draw.keys(), draw.values(), draw.results(), draw.results(), draw.lse()
    return BACKWARD(*read, *(one.clone() for one in read[:3]), **given)


def offered(args):
    kernels = ka.get_kernels(args, cc="sm_90a", providers=["cutedsl"])
    return [kernel for kernel in kernels if kernel.family == FAMILY]


def keys(args):
    """At once, of the tiles that serve, the best in front."""
    return list(dict.fromkeys(kernel.metadata.design.tile_shape[1] for kernel in offered(args)))


# The query -------------------------------------------------------------------------------


@pytest.mark.parametrize("room", NARROW)
@pytest.mark.parametrize("options", [{}, SOFTCAP, {"bias": wide_bias}, ALIBI])
@pytest.mark.parametrize("length", (64, 512, 4096))
def test_narrow_heads_have_128_keys_at_once(room, options, length):
    found = keys(meta(room, length, **options))
    assert {*found} == {128, 64}
    assert found[0] == (128 if length == 4096 else 64)  # with few blocks, more of them


@pytest.mark.parametrize("room", NARROW)
def test_numbers_of_dropout_are_drawn_for_128_keys_at_once(room):
    assert keys(meta(room, 4096, **DROPOUT)) == [128, 64]
    assert {*keys(meta(room, **DROPOUT, mask=CAUSAL))} == {128, 64}


@pytest.mark.parametrize("room", NARROW)
def test_warps_that_keep_turns_draw_no_numbers(room):
    assert keys(meta(room, **DROPOUT, deterministic=True)) == [64]


def test_everything_together_leaves_the_wider_room_64_keys_at_once():
    found = {room: set(keys(meta(room, **EVERYTHING))) for room in NARROW}
    assert found == {(64, 64): {128, 64}, (128, 128): {64}}


@pytest.mark.parametrize("room", NARROW)
@pytest.mark.parametrize("options", [DROPOUT, {**DROPOUT, "deterministic": True}, EVERYTHING])
def test_dropout_is_best_served_by_the_family(room, options):
    args = meta(room, **options)
    assert ka.get_kernels(args, cc="sm_90a", providers=["cutedsl"])[0].family == FAMILY


@pytest.mark.parametrize(
    ("room", "options", "found"),
    [
        ((64, 64), ALIBI, False),
        ((128, 128), ALIBI, True),
        ((128, 128), {"mask": PARITY}, True),
        ((128, 128), SOFTCAP, False),
        ((128, 128), DROPOUT, False),
        ((128, 128), {"mask": table}, False),
        ((192, 192), {"mask": table}, True),
        ((192, 192), ALIBI, False),
        ((256, 256), ALIBI, False),
        ((256, 256), {}, True),
    ],
)
def test_scores_are_issued_early_where_that_gains(room, options, found):
    first = offered(meta(room, 4096, **options))[0]
    assert ("scores" in first.metadata.design.early) == found


def test_the_widest_heads_have_fewer_keys_at_once_where_all_comes_together():
    assert keys(meta((256, 256), **EVERYTHING)) == [48]
    assert set(keys(meta((256, 256), **DROPOUT, **SOFTCAP, **BIAS))) == {64, 48}
    assert set(keys(meta((256, 256)))) == {80, 64, 48}


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({**SOFTCAP, **ALIBI}, {64}),
        ({"bias": wide_bias, "mask": WINDOW}, {64}),
        ({**BIAS, "mask": WINDOW}, {128, 64}),
        ({**BIAS, **SOFTCAP}, {64}),
        ({**SOFTCAP, "deterministic": True}, {128, 64}),
        ({"bias": wide_bias, "deterministic": True}, {64}),
        ({**SOFTCAP, "mask": CAUSAL}, {64}),
        ({"mask": table}, {128, 64}),
        ({"mask": lambda d: table(d) & PARITY}, {128, 64}),
        ({"mask": lambda d: table(d, 64)}, {64}),
        ({"mask": table, "deterministic": True}, {128, 64}),
        ({"mask": lambda d: table(d) & PARITY, "deterministic": True}, {128, 64}),
        ({"mask": table, **SOFTCAP}, {64}),
        ({**ALIBI, "mask": WINDOW}, {128, 64}),
        ({**DROPOUT, "mask": WINDOW}, {64}),
        ({**DROPOUT, **ALIBI}, {64}),
        ({**DROPOUT, "bias": bias}, {64}),
        ({"mask": WINDOW, "deterministic": True}, {128, 64}),
    ],
)
def test_128_columns_leave_registers_for_one_change_of_scores(options, found):
    assert set(keys(meta((128, 128), **options))) == found


@pytest.mark.parametrize(("deterministic", "found"), [(False, 64), (True, 128)])
def test_small_tiles_are_no_choice_in_a_fixed_order(deterministic, found):
    args = meta((128, 128), 500, heads=(32, 4), mask=CAUSAL, deterministic=deterministic)
    assert keys(args)[0] == found


def test_a_band_of_packed_sequences_of_192_columns_begins_scores_early():
    def packed(**options):
        draw = Draw(1, 4, 2, 512, 512, 192, 192, element="bfloat16", device="meta")
        ends = torch.empty(3, dtype=torch.int32, device="meta")
        lengths = {f"cu_seqlens_{side}": ends for side in ("q", "kv")}
        lengths |= {f"max_seqlen_{side}": 300 for side in ("q", "kv")}
        read = draw.queries(), draw.keys(), draw.values(), draw.results(), draw.results()
        read = [one[0].transpose(0, 1) for one in read]
        written = [one.clone() for one in read[:3]]
        found = offered(BACKWARD(*read, draw.lse()[0], *written, **lengths, **options))
        return {bool(kernel.metadata.design.early) for kernel in found}

    assert packed() == {True, False}
    assert packed(mask=CAUSAL) == {True}
    assert packed(mask=CAUSAL, **SOFTCAP) == {False}


def test_what_takes_wide_tiles_away_is_told():
    wide = max(offered(meta((128, 128), **BIAS)), key=lambda k: k.metadata.design.tile_shape[1])
    status = wide.supports(meta((128, 128), **DROPOUT))
    assert not status and "leave fewer keys at once" in str(status.error)


@pytest.mark.parametrize("room", ROOMS)
def test_the_gradient_of_a_bias_comes_before_that_of_older_gpus(room):
    args = meta(room, **BIAS, dBias=bias)
    found = ka.get_kernels(args, cc="sm_90a", providers=["cutedsl"])
    assert found[0].family == FAMILY
    without = meta(room, **BIAS)
    assert found[0].get_workspace_size(args) == found[0].get_workspace_size(without)


def python_select(condition, one, other):
    return one if condition else other


@pytest.mark.parametrize(
    ("blocks", "sharing", "found"),
    [(16, 4, 4), (50, 6, 2), (16, 17, 1), (8, 32, 16), (132, 4, 1), (66, 4, 2), (20, 7, 1)],
)
def test_blocks_share_keys_evenly_as_long_as_there_are_multiprocessors(blocks, sharing, found):
    costs = costs_of((64, 128), (128, 128), ("seq_lens_q",))
    assert shares_of(Blocks(blocks, sharing, 100), costs, python_select) == found


class Wrapping(int):
    """A number of 32 bits, as the host code of kernels has it."""

    def __new__(cls, value):
        return super().__new__(cls, (int(value) + 2**31) % 2**32 - 2**31)


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    for _side in ("", "r"):
        _of_int = getattr(int, f"__{_side}{_name}__")
        setattr(
            Wrapping, f"__{_side}{_name}__", lambda a, b, of=_of_int: Wrapping(of(int(a), int(b)))
        )


@pytest.mark.parametrize("names", [(), ("right",), ("seq_lens_q",)])
def test_kernels_count_in_32_bits_what_workspaces_are_made_for(names):
    draw = random.Random(0)
    costs, found = costs_of((64, 128), (128, 128), names), set()
    fixed = [Blocks(1000, 128, 8192), Blocks(2000, 512, 4096), Blocks(1000, 256, 1 << 20)]
    for _ in range(3000):
        sharing = draw.choice((1, 2, 3, 4, 7, 8, 16, 24, 64, 128, 256, 512, 4096))
        blocks = Blocks(*(int(2 ** draw.uniform(0, top)) for top in (20, 0, 24)))
        fixed.append(blocks._replace(sharing=sharing))
    for blocks in fixed:
        right = shares_of(blocks, costs, python_select)
        assert shares_of(Blocks(*map(Wrapping, blocks)), costs, python_select) == right, blocks
        found.add(right)
    assert len(found) > 5


@pytest.mark.parametrize(
    ("blocks", "sharing", "tiles", "found"),
    [(412, 4, 128, 2), (128, 4, 32, 1), (256, 4, 64, 1), (320, 4, 79, 2), (20, 7, 8, 7)],
)
def test_blocks_share_keys_where_multiprocessors_would_have_different_numbers_of_them(
    blocks, sharing, tiles, found
):
    costs = costs_of((64, 128), (128, 128), ())
    assert shares_of(Blocks(blocks, sharing, tiles), costs, python_select) == found


@pytest.mark.parametrize(
    ("blocks", "sharing", "tiles", "found"),
    [(128, 4, 32, 2), (64, 4, 16, 4), (412, 4, 128, 1), (256, 4, 64, 1), (1 << 20, 16, 64, 1)],
)
def test_blocks_share_keys_where_the_longest_would_be_waited_for(blocks, sharing, tiles, found):
    costs = costs_of((64, 128), (128, 128), ("right",))
    assert shares_of(Blocks(blocks, sharing, tiles), costs, python_select) == found


def test_what_blocks_that_share_keys_leave_has_room():
    """In the workspace, if a design has what it takes."""
    for room in NARROW:
        shared, apart = (meta(room, 256, heads=(8, H_kv)) for H_kv in (2, 8))
        for kernel in offered(shared):
            _, keys = kernel.metadata.design.tile_shape
            left = 2 * 8 * -(-256 // keys) * keys * sum(room) * 4
            further = kernel.get_workspace_size(shared) - kernel.get_workspace_size(apart)
            if room == (64, 64) and keys == 128:
                assert further == 0
            else:
                assert left <= further <= left + 16


# Compiled --------------------------------------------------------------------------------


def compiled(room, options):
    """The artifact of the first kernel that serves, and the processor time that it took."""
    args = meta(room, **options)
    kernel = offered(args)[0]
    before = time.process_time()
    artifact = kernel.compile(args, cc="sm_90a")
    return artifact, time.process_time() - before


COMPILED = {
    "dBias": {**BIAS, "dBias": bias, "mask": CAUSAL},
    "dropout": {**DROPOUT, "mask": CAUSAL},
    "dropout, a window": {**DROPOUT, "mask": WINDOW},
    "alibi": {**ALIBI, "mask": CAUSAL},
    "everything": EVERYTHING,
    "softcap, in order": {**SOFTCAP, "deterministic": True},
    "full blocks": {"mask": full_table},
    "full blocks, in order": {"mask": full_table, "deterministic": True},
}


@pytest.mark.compile
@pytest.mark.parametrize("room", ROOMS if EVERY_KERNEL else [(128, 128)])
@pytest.mark.parametrize("name", COMPILED if EVERY_KERNEL else ["everything"])
def test_options_spill_nothing_and_are_soon_compiled(room, name):
    compiled(NARROW[0], BIAS)  # what is loaded once
    artifact, seconds = compiled(room, COMPILED[name])
    assert artifact.resources.spill_bytes == 0
    assert seconds < MOST_SECONDS or seconds < MOST_OF_PLAIN * compiled(room, {})[1]

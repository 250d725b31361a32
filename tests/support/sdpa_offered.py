"""What the attention families for Hopper offer for which arguments."""

import math

import torch

import kernel_api as ka
from kernel_api import masks
from kernel_api.arguments import Dropout
from support.kernels import EVERY_KERNEL
from support.sdpa import Draw

FORWARD, FP8, DECODE = "sm90.sdpa_forward", "sm90.sdpa_forward_fp8", "sm90.sdpa_decode"
ROOMS = {
    FORWARD: ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)),
    FP8: ((64, 64), (128, 128), (256, 256)),
}
EVERY_ROOM = [(name, room) for name, rooms in ROOMS.items() for room in rooms]
BANDS = {
    "": None,
    "causal": masks.Causal(),
    "window": masks.SlidingWindow(70, 3, "bottom_right"),
}
DROPOUT = Dropout(0.1, 1, 2)


def meta(name, room, **options):
    """Arguments of a family."""
    element = "float8_e4m3fn" if name == FP8 else "bfloat16"
    draw = Draw(2, 4, 2, 512, 512, *room, element=element, device="meta")
    return draw.arguments(out=draw.results(read=False).bfloat16(), **options)


def offered_of(args):
    return ka.get_kernels(args, cc="sm_90a", providers=["cutedsl"])


def offered(name, room, **options):
    return [k for k in offered_of(meta(name, room, **options)) if k.family == name]


def paged(name=FP8, room=(128, 128), size=32, most=16, **options):
    """Two sequences in pages, for a family."""
    element = "float8_e4m3fn" if name == FP8 else "bfloat16"
    draw = Draw(2, 8, 2, 300, most * size, *room, element=element, device="meta")
    for name, columns in zip("KV", room, strict=True):
        options[name] = torch.empty(40, 2, size, columns, dtype=draw.element, device="meta")
    options["page_table"] = torch.zeros(2, most, dtype=torch.int32, device="meta")
    options["seq_lens_kv"] = torch.zeros(2, dtype=torch.int32, device="meta")
    return draw.arguments(out=draw.results(read=False).bfloat16(), **options)


#: What the scores of few queries may be made of.
OPTIONS = {
    "bias": lambda d: {"bias": d.random(1, d.H, d.S_q, d.S_kv)},
    "alibi": lambda d: {"alibi": d.wides(d.H), "sink": d.wides(d.H), "softcap": 5.0},
    "score_mod": lambda d: {"score_mod": lambda score, b, h, q, kv: 2 * score},
    "mask_mod": lambda d: {"mask": masks.MaskMod(lambda b, h, q, kv: kv >= 2 * q)},
    "blocks": lambda d: {"mask": blocks(d.S_q, d.S_kv) & masks.Causal("bottom_right")},
}


def blocks(S_q, S_kv, shape=(128, 128)):
    rows, columns = -(-S_q // shape[0]), -(-S_kv // shape[1])
    return masks.BlockSparse(
        torch.ones(1, 1, rows, columns, dtype=torch.bool, device="meta"), shape
    )


def some(kernels):
    """All of them, or one of the largest tiles, which have the fewest registers left."""
    if EVERY_KERNEL:
        return kernels
    return sorted(kernels, key=lambda one: math.prod(one.metadata.design.tile_shape))[-1:]

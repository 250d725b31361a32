"""A bias that comes to shared memory with keys: which designs take which bias."""

import pytest
import torch
from support.kernels import EVERY_KERNEL
from support.sass import sass
from support.sdpa import Draw
from support.sdpa_offered import BANDS, FORWARD, ROOMS, meta, offered, offered_of, paged

import kernel_api as ka
from kernel_api import masks
from kernel_api.errors import ArgumentError
from kernel_api.providers.cutedsl.sdpa.base import AttentionKernel

WHY = "a bias comes with keys if it has 16 bits"
FULL, OF_HEADS, OF_KEYS = (2, 4, 512, 512), (1, 4, 512, 512), (2, 1, 1, 512)


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def ways(**options):
    return {kernel.metadata.design.bias for kernel in offered(FORWARD, (128, 128), **options)}


@pytest.mark.parametrize(
    ("shape", "expected"),
    [(FULL, "tiles"), (OF_HEADS, "tiles"), (OF_KEYS, "rows"), ((512,), "rows"),
     ((512, 512), "tiles"), ((2, 1, 512, 512), "tiles")],
)  # fmt: skip
@pytest.mark.parametrize("room", ROOMS[FORWARD])
def test_a_bias_comes_with_keys_and_that_is_the_first_choice(room, shape, expected):
    found = offered(FORWARD, room, bias=empty(*shape))
    assert {kernel.metadata.design.bias for kernel in found} == {"read", expected}
    args = meta(FORWARD, room, bias=empty(*shape))
    first = ka.get_kernels(args, cc="sm_90a", providers=["cutedsl"])[0]
    assert (first.family, first.metadata.design.bias) == (FORWARD, expected)
    assert f"_bias_{expected}_" in first.metadata.kernel_name


@pytest.mark.parametrize(
    ("bias", "words"),
    [
        (None, "there is none"),
        (empty(*FULL, dtype=torch.float32), "bias is float32"),
        (empty(*FULL, dtype=torch.float8_e4m3fn), "bias is float8_e4m3fn"),
        (empty(2, 4, 512, 1), "bias has 512 x 1 for 512 queries and 512 keys"),
        (empty(2, 4, 512, 516)[..., :512], "bias is "),
        (empty(2, 4, 512, 520)[..., 4:516], "bias is "),
        (empty(2, 4, 512, 512).mT, "bias is "),
    ],
)
def test_others_are_read_where_they_lie_and_it_is_told(bias, words):
    options = {} if bias is None else {"bias": bias}
    assert ways(**options) == {"read"}
    (one,) = [
        kernel
        for kernel in offered(FORWARD, (128, 128), bias=empty(*FULL))
        if kernel.metadata.design.bias == "tiles"
    ]
    error = str(one.supports(meta(FORWARD, (128, 128), **options)).error)
    assert WHY in error
    assert words in error


def test_keys_that_are_no_whole_vectors_are_read_where_they_lie():
    draw = Draw(2, 4, 2, 512, 508, 64, 64, element="bfloat16", device="meta")
    args = draw.arguments(out=draw.results(read=False), bias=empty(2, 4, 512, 512)[..., :508])
    found = {k.metadata.design.bias for k in offered_of(args) if k.family == FORWARD}
    assert found == {"read"}


def test_queries_that_share_a_row_by_a_stride_of_0_have_one():
    assert ways(bias=empty(2, 1, 1, 512).expand(2, 4, 512, 512)) == {"read", "rows"}
    assert ways(bias=empty(1, 1, 512, 512).expand(2, 4, 512, 512)) == {"read", "tiles"}


def test_a_prepared_launch_keeps_what_its_bias_is_like(monkeypatch):
    launched = []

    def recorder(kernel, args, artifact):
        return lambda *tensors, **others: launched.append(others)

    monkeypatch.setattr(AttentionKernel, "_launcher", recorder)
    for shape, other, words in (
        (FULL, OF_KEYS, "a row for each query"),
        (OF_KEYS, OF_HEADS, "one row for all queries"),
    ):
        args = meta(FORWARD, (128, 128), bias=empty(*shape))
        (kernel,) = (
            kernel
            for kernel in offered(FORWARD, (128, 128), bias=empty(*shape))
            if kernel.metadata.design.bias != "read"
        )
        launch = kernel._launcher(args, None)
        launch(bias=empty(*shape))
        with pytest.raises(ArgumentError, match=f"the launch is prepared for {words}"):
            launch(bias=empty(*other))
    assert len(launched) == 2


def test_wide_tiles_have_no_registers_for_a_bias_and_bounds():
    found = offered(FORWARD, (64, 64), bias=empty(*FULL))
    (wide,) = (
        kernel
        for kernel in found
        if kernel.metadata.design.bias == "tiles" and kernel.metadata.design.tile_shape[0] == 192
    )
    args = meta(FORWARD, (64, 64), bias=empty(*FULL), mask=masks.Causal())
    assert str(wide.supports(args).error).endswith(
        "no registers to look for bounds; there is right"
    )


def test_pages_and_a_bias_of_float32_are_told_what_would_match():
    bias = empty(2, 8, 300, 512, dtype=torch.float32)
    told = ka.explain(paged(FORWARD, (128, 128), 32, bias=bias), cc="90a", providers=["cutedsl"])
    (reason,) = (one.reason for one in told.rejected if one.family == FORWARD)
    assert "bias" in reason and "would match with a bias of bfloat16" in str(told)


def test_designs_of_one_bias_refuse_the_other():
    (rows,) = [
        kernel
        for kernel in offered(FORWARD, (128, 128), bias=empty(*OF_KEYS))
        if kernel.metadata.design.bias == "rows"
    ]
    args = meta(FORWARD, (128, 128), bias=empty(*FULL))
    assert "bias has 512 x 512 for 512 queries" in str(rows.supports(args).error)


def cases():
    for room in ROOMS[FORWARD] if EVERY_KERNEL else [(256, 256)]:
        for shape in (FULL, OF_KEYS):
            for band, mask in BANDS.items() if EVERY_KERNEL else [("", None)]:
                for kernel in offered(FORWARD, room, bias=empty(*shape), mask=mask):
                    if kernel.metadata.design.bias != "read":
                        name = f"{kernel.metadata.kernel_name}-{band}"
                        yield pytest.param(kernel, room, shape, mask, id=name)


@pytest.mark.compile
@pytest.mark.parametrize(("kernel", "room", "shape", "mask"), list(cases()))
def test_a_bias_that_comes_with_keys_spills_next_to_nothing(kernel, room, shape, mask):
    artifact = kernel.compile(meta(FORWARD, room, bias=empty(*shape), mask=mask), cc="90a")
    # Where blocks end at a bound, two values of a tile are kept outside the loop.
    assert artifact.resources.spill_bytes <= (0 if mask is None else 8)
    code = sass(artifact)
    tiles = kernel.metadata.design.bias == "tiles"
    assert ("LDSM" in code) == tiles
    assert code.count("UTMALDG") >= 4  # of Q, K, V and the bias


@pytest.mark.compile
def test_pages_take_it_too():
    bias = empty(2, 8, 300, 512)
    args = paged(FORWARD, (128, 128), 32, bias=bias, mask=masks.Causal("bottom_right"))
    (kernel,) = [k for k in offered_of(args) if k.family == FORWARD]
    assert kernel.metadata.design.bias == "tiles"
    assert kernel.compile(args, cc="90a").resources.spill_bytes <= 8

"""A bias that comes to shared memory with queries, and what its gradient is made of: which designs
of Hopper's attention gradient take which."""

import pytest
import torch
from support.kernels import EVERY_KERNEL
from support.sdpa import BACKWARD, Draw
from support.sdpa_offered import BANDS

import kernel_api as ka
from kernel_api import masks
from kernel_api.errors import ArgumentError
from kernel_api.providers.cutedsl.sdpa.base import AttentionKernel

FAMILY = "sm90.sdpa_backward"
FULL, OF_HEADS, OF_KEYS = (2, 4, 512, 512), (1, 4, 512, 512), (2, 1, 1, 512)
F32 = torch.float32


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def meta(D=64, S=512, **options):
    draw = Draw(2, 4, 2, S, S, D, D, element="bfloat16", device="meta")
    read = draw.queries(), draw.keys(), draw.values(), draw.results(), draw.results(), draw.lse()
    return BACKWARD(*read, *(one.clone() for one in read[:3]), **options)


def biased(shape, gradient=None, **options):
    """gradient: Its shape, or that of the bias if it is none."""
    dBias = gradient if isinstance(gradient, torch.Tensor) else empty(*(gradient or shape))
    return {"bias": empty(*shape), "dBias": dBias, **options}


def offered(args):
    kernels = ka.get_kernels(args, cc="sm_90a", providers=["cutedsl"])
    return [kernel for kernel in kernels if kernel.family == FAMILY]


def ways(args):
    """(how the bias comes, how its gradient is made) of those that serve, the best in front."""
    designs = (kernel.metadata.design for kernel in offered(args))
    return list(dict.fromkeys((one.bias, one.bias_gradient) for one in designs))


READ, AGAIN, TILES, SUMS = ("read", "again"), *(("tiles", x) for x in ("again", "tiles", "sums"))


@pytest.mark.parametrize("D", (64, 128))
@pytest.mark.parametrize(
    ("options", "found"),
    [
        (biased(FULL), {READ, AGAIN, TILES, SUMS}),
        (biased(OF_HEADS), {READ, AGAIN, SUMS}),
        (biased((512, 512)), {READ, AGAIN, SUMS}),
        (biased(OF_KEYS), {READ}),
        (biased(FULL, empty(2, 4, 512, 515)[..., :512]), {READ, AGAIN, SUMS}),
        (biased(FULL, empty(*FULL, dtype=torch.float16)), {READ, AGAIN, SUMS}),
        (biased(FULL, empty(*FULL, dtype=F32)), {READ, AGAIN}),
        (biased(FULL, softcap=5.0), {READ, AGAIN}),
        ({"bias": empty(*FULL)}, {READ, AGAIN}),
        ({"bias": empty(*FULL, dtype=F32), "dBias": empty(*FULL)}, {READ}),
        ({}, {READ}),
    ],
)
def test_a_gradient_is_made_of_what_blocks_have_where_that_is_enough(D, options, found):
    assert set(ways(meta(D, **options))) == found


@pytest.mark.parametrize("D", (64, 128))
def test_the_first_choice_makes_no_scores_again(D):
    def first(shape, S, **options):
        return ways(meta(D, S, **biased((*shape[:2], S, S)), **options))[0]

    for S in (1024, 4096):
        assert first(FULL, S) == first(FULL, S, mask=masks.Causal()) == TILES
        assert first(OF_HEADS, S) == first(OF_HEADS, S, deterministic=True) == SUMS


def test_other_heads_read_a_bias_where_it_lies():
    for D in (192, 256):
        assert ways(meta(D, **biased(FULL))) == [READ]


def refusal(args, bias, gradient):
    (kernel, *_) = (
        kernel
        for kernel in offered(meta(**biased(FULL)))
        if (kernel.metadata.design.bias, kernel.metadata.design.bias_gradient) == (bias, gradient)
    )
    return str(kernel.supports(args).error)


@pytest.mark.parametrize(
    ("options", "way", "words"),
    [
        ({}, AGAIN, "comes with queries if it has 16 bits, a row for each of them"),
        (biased(OF_KEYS), AGAIN, "bias has 1 x 512 for 512 queries and 512 keys"),
        ({"bias": empty(*FULL)}, SUMS, "all tiles are computed, and the gradient has 16 bits"),
        (biased(FULL, softcap=5.0), TILES, "scores are changed before"),
        (biased(FULL, empty(*FULL, dtype=F32)), SUMS, "dBias is float32"),
        (biased(OF_HEADS), TILES, "dBias has shape (1, 4, 512, 512); scores have (2, 4, 512, 512)"),
        (biased(FULL, empty(*FULL, dtype=torch.float16)), TILES, "dBias is float16"),
        (biased(FULL, empty(2, 4, 512, 515)[..., :512]), TILES, "rows of multiples of 16 bytes"),
        (biased(FULL, mask=masks.BlockSparse(empty(1, 1, 4, 4, dtype=torch.bool))), SUMS,
         "there is a table of blocks"),
    ],
)  # fmt: skip
def test_what_does_not_serve_is_told(options, way, words):
    assert words in refusal(meta(**options), *way)


def test_what_blocks_leave_is_bounded():
    shape = 1, 1, 16384, 16384
    args = meta(S=16384, **biased(shape))
    assert set(ways(args)) == {READ, AGAIN}
    assert "takes 2 GiB at most; it would take 4.0 GiB" in refusal(args, *SUMS)


def test_the_workspace_has_room_for_what_blocks_leave():
    args = meta(**biased(OF_HEADS))
    found = {
        kernel.metadata.design.bias_gradient: kernel.get_workspace_size(args)
        for kernel in offered(args)
        if kernel.metadata.design.tile_shape == (64, 128) and kernel.metadata.design.bias != "read"
    }
    left = 2 * 4 * 512 * 512 * 2
    assert left <= found["sums"] - found["again"] <= left + 16


def test_a_prepared_launch_keeps_what_its_bias_is_like(monkeypatch):
    launched = []

    def recorder(kernel, args, artifact):
        return lambda *tensors, **others: launched.append(others)

    monkeypatch.setattr(AttentionKernel, "_launcher", recorder)
    args = meta(**biased(FULL))
    stored = next(k for k in offered(args) if k.metadata.design.bias_gradient == "tiles")
    launch, tensors = stored._launcher(args, None), args.tensors
    launch(*tensors, **biased(FULL))
    with pytest.raises(ArgumentError, match="prepared for a row for each query"):
        launch(*tensors, **biased(OF_KEYS, FULL))
    words = r"dBias has shape \(1, 4, 512, 512\); the launch is prepared for one of all scores"
    with pytest.raises(ArgumentError, match=words):
        launch(*tensors, **biased(OF_HEADS))
    assert len(launched) == 1


def cases():
    for D in (64, 128) if EVERY_KERNEL else (128,):
        for shape in (FULL, OF_HEADS):
            for band, mask in BANDS.items() if EVERY_KERNEL else [("window", BANDS["window"])]:
                options = biased(shape, mask=mask, deterministic=bool(band))
                for kernel in offered(meta(D, **options)):
                    design = kernel.metadata.design
                    made = EVERY_KERNEL or design.bias_gradient != "again"
                    if design.bias != "read" and made:
                        yield pytest.param(kernel, D, options, id=f"{design.label()}-{band}")


@pytest.mark.compile
@pytest.mark.parametrize(("kernel", "D", "options"), [*cases()])
def test_designs_spill_nothing(kernel, D, options):
    artifact = kernel.compile(meta(D, **options), cc="sm_90a")
    assert artifact.resources.spill_bytes == 0

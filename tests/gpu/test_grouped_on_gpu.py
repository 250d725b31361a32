"""Grouped products on this GPU: every form and fusion in the kernels of each family, against the
reference; groups of any size, rows behind the last group untouched."""

import random

import pytest
import torch
from support.fusion_cases import same_bits

import kernel_api as ka
from kernel_api import epilogue as ep
from kernel_api import fusions
from kernel_api.arguments.experts import memory_of

pytestmark = [pytest.mark.gpu, pytest.mark.compile, pytest.mark.timeout(600)]

BF16, F16, F32, F8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
DRAWN_FROM = (0, 1, 7, 63, 64, 65, 127, 129, 1000)
SIZES = {
    "empty first": (0, 65, 7, 129),
    "empty middle": (127, 0, 0, 64, 1),
    "empty last": (63, 129, 0),
    "all empty": (0, 0, 0),
    "one expert": (1000,),
    **{f"random {i}": tuple(random.Random(i).choices(DRAWN_FROM, k=3 + 11 * i)) for i in range(4)},
}
KERNELS = 3  # of a family, for a case


class Draw:
    """Operands of a problem: groups of these sizes, and some rows behind them."""

    def __init__(self, sizes, N=192, K=136, element=BF16, layout="t", pad=0, slack=5, seed=0):
        self.generator = torch.Generator("cuda").manual_seed(seed)
        self.E, self.T, self.N, self.K = len(sizes), sum(sizes) + slack, N, K
        self.element, self.pad = element, pad
        self.offsets = torch.tensor(sizes, device="cuda").cumsum(0).int()
        self.A = self.matrix(self.T, K)
        self.B = self.matrix(self.E, N, K).mT if layout == "t" else self.matrix(self.E, K, N)

    def matrix(self, *shape, element=None):
        return self.values(*shape[:-1], shape[-1] + self.pad).to(element or self.element)[
            ..., : shape[-1]
        ]

    def values(self, *shape):
        return torch.randn(shape, generator=self.generator, device="cuda")

    def out(self, *shape, element=None):
        return self.matrix(*shape, element=element)

    def both(self):
        return {"alpha": self.values(self.E), "prob": self.values(self.T)}


def plain(d):
    return ka.GroupedGemmArguments(d.A, d.B, d.out(d.T, d.N), d.offsets)


def wide(d):
    return ka.GroupedGemmArguments(d.A, d.B, d.out(d.T, d.N, element=F32), d.offsets)


def weighted(d):
    how = {**d.both(), "bias": d.matrix(d.E, d.N)}
    return fusions.grouped_gemm(d.A, d.B, d.offsets, out=d.out(d.T, d.N), **how)


def picked(d):
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(40, (d.T,), generator=generator).int().cuda()
    places = torch.randperm(d.T + 9, generator=generator)[: d.T].int().cuda()
    return fusions.grouped_gemm(
        d.matrix(40, d.K), d.B, d.offsets, out=d.out(d.T + 9, d.N), prob=d.values(d.T),
        row_index=rows, out_row_index=places,
    )  # fmt: skip


def listed(d):
    return fusions.grouped_gemm(
        d.A, [one.clone(memory_format=torch.preserve_format) for one in d.B], d.offsets,
        out=d.out(d.T, d.N), **d.both(),
    )  # fmt: skip


def glu(d, discrete=False, **how):
    B = list(d.B) if discrete else d.B
    return fusions.grouped_gemm_glu(
        d.A, B, d.offsets, out=d.out(d.T, d.N // 2), preactivation=d.out(d.T, d.N),
        bias=d.matrix(d.E, d.N), amax=d.values(d.E), **d.both(), **how,
    )  # fmt: skip


def swiglu_of_neighbours(accum):
    gate, up = ep.glu_pair(accum, granularity=1)
    return ep.silu(gate) * up


def scattered_pairs(d):
    generator = torch.Generator().manual_seed(1)
    places = torch.randperm(d.T + 9, generator=generator)[: d.T].int().cuda()
    return ka.GroupedGemmArguments(
        d.A, d.B, d.out(d.T + 9, d.N // 2), d.offsets, out_row_index=places,
        epilogue=ka.EpilogueArguments(swiglu_of_neighbours),
    )  # fmt: skip


def dglu(d, **how):
    return fusions.grouped_gemm_dglu(
        d.A, d.B, d.offsets, out=d.out(d.T, 2 * d.N), preactivation=d.matrix(d.T, 2 * d.N),
        dprob=d.values(d.T), dbias=d.values(d.E, 2 * d.N), amax=d.values(d.E, 2),
        beta=d.values(d.E), **d.both(), **how,
    )  # fmt: skip


def srelu(d):
    return fusions.grouped_gemm_srelu(
        d.A, d.B, d.offsets, out=d.out(d.T, d.N), preactivation=d.out(d.T, d.N),
        amax=d.values(d.E), limit=2.5, **d.both(),
    )  # fmt: skip


def dsrelu(d):
    return fusions.grouped_gemm_dsrelu(
        d.A, d.B, d.offsets, out=d.out(d.T, d.N), preactivation=d.matrix(d.T, d.N),
        dprob=d.values(d.T), dbias=d.values(d.E, d.N), amax=d.values(d.E), **d.both(),
    )  # fmt: skip


def hadamard(d):
    return fusions.grouped_gemm_glu_hadamard(
        d.A, d.B, d.offsets, out=d.out(d.T, d.N // 2), amax=d.values(d.E), normalised=True,
        signs=d.values(16).sign(), **d.both(),
    )  # fmt: skip


def quantized(d):
    return fusions.grouped_gemm_quantize(
        d.A, d.B, d.offsets, out=d.out(d.T, d.N).to(F8), scale=d.values(1)[0].abs() + 0.1,
        row_scale=d.values(d.T), amax=d.values(d.E), **d.both(),
    )  # fmt: skip


def summed(d, **how):
    A, B = d.matrix(d.T, d.N).mT, d.A
    out = how.pop("out", d.out(d.E, d.N, d.K))
    return fusions.grouped_gemm_wgrad(A, B, d.offsets, out=out, **how)


CASES = {
    "plain": plain,
    "float32 out": wide,
    "weighted": weighted,
    "picked": picked,
    "listed": listed,
    "listed swiglu": lambda d: glu(d, discrete=True),
    "listed swiglu of halves": lambda d: glu(d, discrete=True, granularity="halves"),
    "scattered pairs": scattered_pairs,
    "swiglu": glu,
    "geglu of halves": lambda d: glu(d, kind="geglu", granularity="halves"),
    "geglu, clamped": lambda d: glu(d, kind="geglu_clamped", limit=1.5, offset=0.7),
    "dswiglu": dglu,
    "dreglu": lambda d: dglu(d, kind="reglu", order="up_gate", alpha_power=2),
    "srelu": srelu,
    "dsrelu": dsrelu,
    "hadamard": hadamard,
    "quantized": quantized,
    "summed": summed,
    "summed, listed": lambda d: summed(d, out=list(d.out(d.E, d.N, d.K))),
    "accumulated, listed": lambda d: summed(
        d, accumulate=True, out=list(d.out(d.E, d.N, d.K, element=F32))
    ),
    "summed, scaled": lambda d: summed(d, alpha=d.values(d.E)),
    "accumulated": lambda d: summed(d, accumulate=True, out=d.out(d.E, d.N, d.K, element=F32)),
    "accumulated in 16 bits": lambda d: summed(d, accumulate=True),
}
SETTINGS = {
    "aligned": {"layout": "t"},
    "columns of B": {"layout": "n", "element": F16},
    "padded": {"pad": 8, "N": 320, "K": 72},
    "odd": {"K": 77, "pad": 1},
}


def parts_of(args):
    """(name, tensor) of all that is written."""
    return [
        (f"{name} {place}", part)
        for name, one in args.outputs.items()
        for place, part in enumerate(memory_of(one))
    ]


def packed(tensor):
    return tensor.clone(memory_format=torch.contiguous_format)


def cases():
    found = []
    for turn, (name, make) in enumerate(CASES.items()):
        for place, (setting, how) in enumerate(SETTINGS.items()):
            for number, (sizes, groups) in enumerate(SIZES.items()):
                if (turn + 2 * place + number) % 5 == 0:
                    of = f"{name}-{setting}-{sizes}"
                    found.append(pytest.param(make, groups, how, turn + number, id=of))
    return found


@pytest.mark.parametrize(("make", "sizes", "how", "turn"), cases())
def test_groups_are_what_the_reference_computes(make, sizes, how, turn):
    args = make(Draw(sizes, seed=turn, **how))
    families = {}
    for kernel in ka.get_kernels(args, providers=["cutedsl"]):
        families.setdefault(kernel.family_name(), []).append(kernel)
    assert families, str(ka.explain(args))
    for kernels in families.values():
        for kernel in kernels[turn % len(kernels) :: max(1, len(kernels) // KERNELS)][:KERNELS]:
            verdict = ka.verify(kernel, args)
            assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"
            if getattr(args, "accumulate", False):
                continue
            first = {name: part.tensor.clone() for name, part in parts_of(args)}
            kernel.run(args)
            for name, part in parts_of(args):
                same = same_bits(*(packed(x) for x in (part.tensor, first[name])))
                assert same, f"{kernel.metadata.kernel_name}: {name} differs when repeated"


def glu_of_8_bits(d, B, **how):
    out = d.out(d.T, d.N // 2)
    return fusions.grouped_gemm_glu(d.A.to(F8), B, d.offsets, out=out, **how)


FEW_TOKENS = {
    "all beside": glu,
    "all beside, listed": lambda d: glu(d, discrete=True),
    "halves": lambda d: glu(d, granularity="halves", order="up_gate", kind="geglu"),
    "halves, listed": lambda d: glu(d, discrete=True, granularity="halves"),
    "alone": lambda d: fusions.grouped_gemm_glu(
        d.A, d.B, d.offsets, out=d.out(d.T, d.N // 2), granularity="halves"
    ),
    "8 bits": lambda d: glu_of_8_bits(d, d.B.mT.to(F8).mT, prob=d.values(d.T)),
    "8 bits, halves, listed": lambda d: glu_of_8_bits(
        d, [one.mT.to(F8).mT for one in d.B], granularity="halves", **d.both()
    ),
}


@pytest.mark.parametrize("sizes", [(1,), (0, 7, 0, 33, 1, 16, 0), (64, 65, 3, 0), (0, 0)])
@pytest.mark.parametrize("name", FEW_TOKENS)
def test_pairs_of_few_tokens_are_right_in_every_transposed_tile(name, sizes):
    args = FEW_TOKENS[name](Draw(sizes, N=448, K=272, seed=len(sizes)))
    kernels = ka.get_kernels(args, providers=["cutedsl"])
    found = [k for k in kernels if getattr(k.metadata.design, "swap_ab", False)]
    assert bool(found) == (torch.cuda.get_device_capability() == (9, 0))
    for kernel in found:
        verdict = ka.verify(kernel, args)
        assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"


def scaled(mode, sizes, N, K, out, listed=False):
    d = Draw(sizes, N, K)
    A, B = d.A.to(F8), d.matrix(d.E, N, K).to(F8).mT
    positive = torch.rand
    if mode == "tensor":
        A = ka.ScaledOperand(A, positive((), device="cuda"), ka.ScaleMode.PER_TENSOR)
        B = ka.ScaledOperand(B, positive(d.E, device="cuda"), ka.ScaleMode.PER_TENSOR)
    elif mode == "rows":
        A = ka.ScaledOperand(A, positive(d.T, device="cuda"), ka.ScaleMode.PER_ROW)
        B = ka.ScaledOperand(B, positive(d.E, N, device="cuda"), ka.ScaleMode.PER_ROW)
    elif mode == "blocks":
        blocks = -(-K // 128), -(-N // 128)
        scales = positive(d.T, blocks[0], device="cuda"), positive(d.E, *blocks, device="cuda")
        A = ka.ScaledOperand(A, scales[0], ka.ScaleMode.BLOCK_1x128)
        B = ka.ScaledOperand(B, scales[1], ka.ScaleMode.BLOCK_128x128)
    options = {}
    if listed:
        options["B_scale"] = getattr(B, "scale", None)
        B = list(getattr(B, "tensor", B))
    return ka.GroupedGemmArguments(A, B, d.out(d.T, N, element=out), d.offsets, **options)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("mode", ["none", "tensor", "rows", "blocks"])
@pytest.mark.parametrize("sizes", ["empty first", "empty middle", "all empty", "random 2"])
def test_8_bit_floats_are_scaled_by_group(mode, sizes, listed):
    out = F16 if sizes == "empty first" else BF16
    args = scaled(mode, SIZES[sizes], 264, 272, out, listed)
    if torch.cuda.get_device_capability() != (9, 0):
        assert not ka.get_kernels(args, providers=["cutedsl"])
        return
    for kernel in ka.get_kernels(args, providers=["cutedsl"]):
        verdict = ka.verify(kernel, args)
        assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"


def whole(*shape):
    return torch.randint(-3, 4, shape, device="cuda").to(BF16)


def test_sums_over_groups_of_odd_sizes_are_exact_for_integers():
    sizes = (1, 7, 0, 63, 65, 129, 31)
    offsets = torch.tensor(sizes, device="cuda").cumsum(0).int()
    T = sum(sizes) + 3
    A, B = whole(T, 136), whole(T, 264)
    ends = offsets.tolist()
    exact = torch.stack(
        [A[s:e].double().T @ B[s:e].double() for s, e in zip([0, *ends], ends, strict=False)]
    )
    A[ends[-1] :], B[ends[-1] :] = float("nan"), float("nan")
    for kernel in ka.get_kernels(args := ka.GroupedGemmArguments(
        A.T, B, torch.empty(len(sizes), 136, 264, device="cuda"), offsets
    ), providers=["cutedsl"]):  # fmt: skip
        args.out.tensor.fill_(float("nan"))
        kernel.run(args)
        assert torch.equal(args.out.tensor.double(), exact), kernel.metadata.kernel_name


HOPPER = (9, 0)
FALLING = tuple(3000 // (1 + i) for i in range(20))  # as popular experts have tokens
TAKEN_SIZES = {
    "falling": FALLING,
    "rising, with holes": (*(0, 1, 64, 0, 65), *FALLING[::-1]),
    "many": tuple(random.Random(7).choices(DRAWN_FROM, k=150)),
    "all empty": (0, 0, 0),
}
TAKEN = ("plain", "weighted", "picked", "listed", "swiglu", "dswiglu", "summed", "summed, scaled")
ADDED_TO = ("accumulated", "accumulated, listed")


def check_and_repeat(kernel, args):
    """It is right, and gives the same bits 50 times."""
    verdict = ka.verify(kernel, args)
    assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"
    first = {name: packed(part.tensor) for name, part in parts_of(args)}
    artifact = kernel.compile(args)
    for _ in range(50):
        kernel.run(args, artifact)
    for name, part in parts_of(args):
        same = same_bits(packed(part.tensor), first[name])
        assert same, f"{kernel.metadata.kernel_name}: {name} differs when repeated"


def takers(args):
    """The kernels whose clusters take tiles as they become free."""
    found = ka.get_kernels(args, providers=["cutedsl"])
    taking = [k for k in found if getattr(k.metadata.design, "scheduler", None) == "dynamic"]
    assert bool(taking) == (torch.cuda.get_device_capability() == HOPPER)
    return taking


@pytest.mark.parametrize("sizes", TAKEN_SIZES)
@pytest.mark.parametrize("case", TAKEN)
def test_results_do_not_depend_on_who_takes_which_tile(case, sizes):
    args = CASES[case](Draw(TAKEN_SIZES[sizes], N=1152, K=520))
    for kernel in takers(args):
        check_and_repeat(kernel, args)


@pytest.mark.parametrize("sizes", TAKEN_SIZES)
@pytest.mark.parametrize("case", ADDED_TO)
def test_sums_whose_tiles_are_taken_are_added_to(case, sizes):
    args = CASES[case](Draw(TAKEN_SIZES[sizes], N=640, K=520))
    for kernel in takers(args):
        verdict = ka.verify(kernel, args)
        assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"


@pytest.mark.parametrize("mode", ["none", "tensor", "rows", "blocks"])
def test_tiles_of_8_bit_floats_are_taken(mode):
    args = scaled(mode, FALLING, 1152, 528, BF16)
    for kernel in takers(args):
        for _ in range(3):
            verdict = ka.verify(kernel, args)
            assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"


CUT_SIZES = {"one": (65,), "few": (0, 130, 7, 0), "empty": (0, 0)}
CUT = (*TAKEN[:5], "listed swiglu", "dswiglu", "hadamard", "quantized")


def cutters(args):
    """The kernels whose clusters have the parts of a tile along K."""
    found = ka.get_kernels(args, providers=["cutedsl"])
    cutting = [k for k in found if k.metadata.design.cluster_shape[2] > 1]
    assert bool(cutting) == (torch.cuda.get_device_capability() == HOPPER)
    return cutting


@pytest.mark.parametrize("sizes", CUT_SIZES)
@pytest.mark.parametrize("case", CUT)
def test_clusters_add_up_the_parts_of_their_tile(case, sizes):
    args = CASES[case](Draw(CUT_SIZES[sizes], N=320, K=2056))
    for kernel in cutters(args):
        check_and_repeat(kernel, args)


@pytest.mark.parametrize("mode", ["none", "tensor", "rows", "blocks"])
def test_clusters_add_up_parts_of_8_bit_floats(mode):
    args = scaled(mode, (0, 130, 7, 0), 320, 4112, BF16)
    for kernel in cutters(args):
        verdict = ka.verify(kernel, args)
        assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"


def test_kernels_that_take_tiles_share_a_workspace_with_those_that_reduce():
    args = glu(Draw(FALLING, N=1152, K=520))
    static = next(k for k in ka.get_kernels(args, providers=["cutedsl"]))

    def written(kernel):
        for _, part in parts_of(args):
            part.tensor.zero_()  # rows behind the groups stay as they are
        kernel.run(args)
        return {name: packed(part.tensor) for name, part in parts_of(args)}

    for kernel in takers(args):
        expected = written(kernel)
        for _ in range(5):
            static.run(args)
            for name, found in written(kernel).items():
                same = same_bits(found, expected[name])
                assert same, f"{kernel.metadata.kernel_name}: {name}"


def test_a_graph_of_sums_whose_tiles_are_taken_is_replayed_with_other_offsets():
    T, M, N, E = 3000, 776, 1160, 8
    A, B = torch.randn(T, M, device="cuda").to(BF16), torch.randn(T, N, device="cuda").to(BF16)
    offsets, out = torch.zeros(E, device="cuda").int(), torch.empty(E, M, N, device="cuda")
    args = ka.GroupedGemmArguments(A.T, B, out, offsets)
    for kernel in takers(args):
        artifact = kernel.compile(args)
        kernel.run(args, artifact)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                kernel.run(args, artifact)
        for sizes in (
            (3000, 0, 0, 0, 0, 0, 0, 0),
            (1, 2, 63, 64, 65, 1000, 5, 1800),
            (0,) * 8,
            (0, 0, 0, 0, 0, 0, 7, 2000),
        ):
            ends = torch.tensor(sizes).cumsum(0).tolist()
            offsets.copy_(torch.tensor(ends))
            out.fill_(float("nan"))
            graph.replay()
            for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
                exact = A[start:end].double().T @ B[start:end].double()
                error = (out[e].double() - exact).norm()
                assert error <= 1e-4 * exact.norm(), f"{kernel.metadata.kernel_name}: {sizes}"


@pytest.mark.parametrize(
    ("family", "scheduler"),
    [
        ("sm90.grouped_gemm", "static"),
        ("sm90.grouped_gemm", "dynamic"),
        ("sm80.grouped_gemm", "static"),
    ],
)
def test_a_graph_is_replayed_with_other_offsets(family, scheduler):
    T, K, N, E = 700, 136, 192, 6
    A, B = torch.randn(T, K, device="cuda").to(BF16), torch.randn(E, K, N, device="cuda").to(BF16)
    offsets, out = torch.zeros(E, device="cuda").int(), torch.empty(T, N, device="cuda").to(BF16)
    amax = torch.empty(E, device="cuda")
    args = fusions.grouped_gemm_srelu(A, B, offsets, out=out, amax=amax)
    kernels = [
        k
        for k in ka.get_kernels(args)
        if k.family_name() == family
        and getattr(k.metadata.design, "scheduler", "static") == scheduler
    ]
    here = family == "sm80.grouped_gemm" or torch.cuda.get_device_capability() == (9, 0)
    assert bool(kernels) == here
    if not here:
        return
    artifact = kernels[0].compile(args)
    kernels[0].run(args, artifact)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels[0].run(args, artifact)
    for sizes in ((100, 0, 64, 65, 1, 300), (0, 0, 0, 0, 0, 0), (700, 0, 0, 0, 0, 0)):
        ends = torch.tensor(sizes).cumsum(0).tolist()
        offsets.copy_(torch.tensor(ends))
        out.fill_(float("nan"))
        amax.fill_(float("nan"))
        graph.replay()
        for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            exact = (A[start:end].double() @ B[e].double()).relu().square()
            found = out[start:end].double()
            assert (found - exact).norm() <= 0.01 * exact.norm() + 1e-30
            largest = exact.max() if end > start else exact.new_zeros(())
            assert abs(float(amax[e]) - float(largest)) <= 0.01 * float(largest)
        assert out[ends[-1] :].isnan().all()

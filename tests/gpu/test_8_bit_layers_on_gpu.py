"""Quantisation in blocks, and the layer of experts of 8 bits, on this GPU."""

import pytest
import torch
from support.sequences import ATorchMode, check_gradients_as_one, repeated

import kernel_api as ka
from kernel_api import _again, _launches
from kernel_api.verification import judge

pytestmark = [pytest.mark.gpu, pytest.mark.compile, pytest.mark.timeout(600)]

BF16, F8 = torch.bfloat16, torch.float8_e4m3fn


def drawn(*shape, seed=0):
    random = torch.Generator("cuda").manual_seed(seed)
    values = torch.randn(shape, generator=random, device="cuda")
    values[..., 0, :] = 0
    return values.to(BF16)


@pytest.mark.parametrize("shape", [(1, 128), (7, 384), (3, 5, 1024), (129, 7168), (2000, 256)])
@pytest.mark.parametrize("mode", ["tensor", "row", "block", "mx"])
def test_a_matrix_is_quantised_as_on_the_cpu(mode, shape):
    x = drawn(*shape)
    found, expected = (ka.ops.quantize(one, mode) for one in (x, x.cpu()))
    verdict = judge(ka.fusions.quantize(x, out=found.out, scale=found.scale, mode=mode))
    assert verdict, str(verdict)
    torch.testing.assert_close(found.scale.cpu().float(), expected.scale.float(), rtol=1e-6, atol=0)
    apart = found.out.cpu().view(torch.int8).int() - expected.out.view(torch.int8).int()
    assert apart.abs().max() <= 1  # a tie that a rounding of the scale decides
    assert (apart != 0).float().mean() < 1e-2


@pytest.mark.parametrize("name", ["gemm_quantize", "gemm_swiglu"])
@pytest.mark.parametrize("M", [1, 13, 129, 1000])
def test_products_quantise_in_blocks(name, M):
    A, B = drawn(M, 264, seed=1), drawn(512, 264, seed=2).t()
    columns = 256 if name == "gemm_swiglu" else 512
    out, scale = A.new_empty(M, columns, dtype=F8), A.new_empty(M, columns // 128).float()
    how = {} if name == "gemm_swiglu" else {"mode": "block"}
    args = getattr(ka.fusions, name)(A, B, out=out, scale=scale, **how)
    kernels = ka.get_kernels(args, providers=["cutedsl"])
    assert kernels, str(ka.explain(args))
    for kernel in kernels[:: max(1, len(kernels) // 6)]:
        verdict = ka.verify(kernel, args)
        assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"


def gated_groups(sizes, picked, granularity, N=1024, K=400):
    """A gated product of groups, of operands in blocks, that is quantised in blocks."""
    random = torch.Generator("cuda").manual_seed(len(sizes))
    T, E, blocks = sum(sizes) + 5, len(sizes), -(-K // 128)

    def uniform(*shape):
        return torch.rand(shape, generator=random, device="cuda") + 0.25

    def normal(*shape):
        return torch.randn(shape, generator=random, device="cuda").to(F8)

    rows = 31 if picked else T
    A = ka.ScaledOperand(normal(rows, K), uniform(rows, blocks), ka.ScaleMode.BLOCK_1x128)
    of_B = uniform(E, blocks, N // 128)
    B = ka.ScaledOperand(normal(E, N, K).mT, of_B, ka.ScaleMode.BLOCK_128x128)
    index = torch.randint(31, (T,), generator=random, device="cuda").int() if picked else None
    return ka.fusions.grouped_gemm_glu(
        *(A, B, torch.tensor(sizes, device="cuda").cumsum(0).int()),
        out=torch.empty(T, N // 2, device="cuda", dtype=F8),
        scale=torch.empty(T, N // 256, device="cuda"),
        prob=uniform(T),
        granularity=granularity,
        row_index=index,
    )


@pytest.mark.parametrize("granularity", [32, "halves"])
@pytest.mark.parametrize("picked", [False, True])
@pytest.mark.parametrize("sizes", [(1,), (0, 7, 65, 0, 129), (300, 1, 0), (0, 0)])
def test_gated_groups_quantise_in_blocks(sizes, picked, granularity):
    args = gated_groups(sizes, picked, granularity)
    kernels = ka.get_kernels(args, providers=["cutedsl"])
    assert bool(kernels) == (torch.cuda.get_device_capability() == (9, 0))
    for kernel in kernels:
        verdict = ka.verify(kernel, args)
        assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"


def quantized(weight):
    """(E, N, K) in blocks of 128 x 128, as (E, K, N)."""
    blocks = weight.unflatten(1, (-1, 128)).unflatten(3, (-1, 128))
    scale = blocks.abs().amax((2, 4), keepdim=True) / 448
    stored = (blocks / scale).view(weight.shape).to(F8)
    return ka.ScaledOperand(stored.mT, scale[:, :, 0, :, 0].mT, ka.ScaleMode.BLOCK_128x128)


def on_cpu(operand):
    if isinstance(operand, torch.Tensor):
        return operand.cpu()
    return ka.ScaledOperand(operand.tensor.cpu(), operand.scale.tensor.cpu(), operand.mode)


def by_rows(weight, mode=ka.ScaleMode.PER_ROW, element=F8):
    """The same with a scale per column or expert."""
    modes = 2 if mode is ka.ScaleMode.PER_ROW else (1, 2)
    scale = weight.abs().amax(modes, keepdim=True) / (448 if element is F8 else 127)
    stored = weight / scale
    stored = (stored if element is F8 else stored.round()).to(element)
    return ka.ScaledOperand(stored.mT, scale.flatten(1).squeeze(1), mode)


PER_TENSOR = ka.ScaleMode.PER_TENSOR
EXPERTS = {
    "blocks": (quantized, quantized),
    "rows": (by_rows, by_rows),
    "tensors": (lambda weight: by_rows(weight, PER_TENSOR),) * 2,
    "integers": (
        lambda weight: by_rows(weight, element=torch.int8),
        lambda weight: by_rows(weight, PER_TENSOR, torch.int8),
    ),
    "rows, then blocks": (by_rows, quantized),
}


def of_16_bits(weight):
    return weight.to(BF16).mT


def layer_of(T, scales, K=256, inner=384, seed=0):
    E, k = 6, 2
    random = torch.Generator("cuda").manual_seed(T + 1000 * seed)
    made = EXPERTS[scales] if scales else (of_16_bits, of_16_bits)
    up = made[0](torch.randn(E, 2 * inner, K, generator=random, device="cuda") / 16)
    down = made[1](torch.randn(E, K, inner, generator=random, device="cuda") / 19)
    x = torch.randn(T, K, generator=random, device="cuda").to(BF16)
    index = torch.randint(-1, E + 1, (T, k), generator=random, device="cuda")
    weight = torch.rand(T, k, generator=random, device="cuda")
    return x, index, weight, up, down


def near(found, expected):
    """But for what one more step of 8 bits here and there makes."""
    return (found.cpu().double() - expected.double()).norm() <= 0.01 * expected.double().norm()


@pytest.mark.parametrize("T", [0, 1, 33, 700])
@pytest.mark.parametrize(
    ("scales", "granularity"), [("blocks", 32), *((name, "halves") for name in EXPERTS)]
)
def test_the_layer_of_experts_of_8_bits_is_that_of_the_cpu(T, scales, granularity):
    operands = layer_of(T, scales)
    found = ka.nn.moe(*operands, granularity=granularity)
    expected = ka.nn.moe(*map(on_cpu, operands), granularity=granularity)
    assert torch.equal(found, ka.nn.moe(*operands, granularity=granularity))
    assert near(found, expected)


@pytest.mark.parametrize("scales", EXPERTS)
def test_no_layer_of_8_bits_waits_for_the_reference(scales):
    """Nor for the device, so that a CUDA graph can hold it."""
    operands = layer_of(33, scales)
    expected = ka.nn.moe(*operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = ka.nn.moe(*operands)
    graph.replay()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("scales", [*EXPERTS, None])
def test_a_known_layer_is_launched_as_one_on_its_own_tensors(scales, long_way):
    """Scales and sizes of groups differ from those that were there when it was made first."""
    _again._sequences.clear()
    for seed in range(3):
        x, *routed, up, down = layer_of(33, scales, seed=seed)
        del long_way[:]
        found = ka.nn.moe(x, *routed, up, down)
        assert bool(long_way) == (seed == 0)
        with ATorchMode():  # each launch for itself
            assert torch.equal(found, ka.nn.moe(x, *routed, up, down))
    assert len(repeated()) == 1


def test_known_gradients_of_a_layer_are_launched_as_one(long_way):
    check_gradients_as_one(lambda seed: layer_of(33, None, seed=seed), long_way)


def test_a_known_whole_matrix_is_quantised_by_three_launches(long_way):
    for seed in range(3):
        x = drawn(33, 512, seed=seed) * (seed + 1)
        del long_way[:]
        found = ka.ops.quantize(x, "tensor")
        assert len(long_way) == (0 if seed else 3)
        torch.testing.assert_close(found.scale, x.float().abs().max() / 448)


@pytest.mark.parametrize("scales", ["blocks", "rows"])
def test_torch_compiles_a_layer_of_8_bits_into_one_graph(scales):
    torch._dynamo.reset()
    operands = layer_of(33, scales)

    def layer(x, *others):
        return ka.nn.moe(x * 2, *others) + 1

    compiled = torch.compile(layer, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(*operands), layer(*operands))


def test_torch_compiles_quantised_norms_and_products_into_one_graph():
    """A block of a network: scales of rows of tokens, one of the whole of a weight."""
    x, weight = drawn(33, 256, seed=3), drawn(2, 256, seed=4)[1]
    up, down = drawn(512, 256, seed=5), drawn(256, 256, seed=6)
    of_up, of_down = (ka.ops.quantize(one, "tensor") for one in (up, down))

    def block(x):
        rows = ka.ops.rmsnorm_quantize(x + 1, "row", weight=weight).operand
        B = ka.ScaledOperand(of_up.out.t(), of_up.scale, PER_TENSOR)
        hidden = ka.ops.quantize(ka.ops.gemm_swiglu(rows, B), "row").operand
        return ka.ops.gemm(hidden, ka.ScaledOperand(of_down.out.t(), of_down.scale, PER_TENSOR))

    torch._dynamo.reset()
    expected = block(x)
    assert torch.equal(torch.compile(block, fullgraph=True)(x), expected)
    exact = ka.ops.gemm_swiglu(ka.ops.rmsnorm(x.float() + 1, weight=weight.float()), up.float().t())
    exact = exact @ down.float().t()
    assert (expected.float() - exact).norm() < 0.1 * exact.norm()


def test_known_calls_write_in_units_of_the_scale_that_they_are_given(monkeypatch):
    A, B = (ka.ops.quantize(drawn(n, 256, seed=n), "row") for n in (33, 128))
    B = ka.ScaledOperand(B.out.t(), B.scale, ka.ScaleMode.PER_ROW)
    exact = ka.ops.gemm(A.operand, B, out_dtype=torch.float32)
    out = torch.empty(33, 128, dtype=F8, device="cuda")

    def into(scale):
        scale = torch.tensor(scale, device="cuda")
        made = ka.ScaledOperand(out, scale, PER_TENSOR)
        assert ka.ops.gemm(A.operand, B, out=made) is made
        error = (out.float() * scale - exact).abs()
        assert (error <= exact.abs() / 16 + scale / 512).all()

    into(0.5)
    monkeypatch.setattr(_launches, "first", None)  # it is not called again
    for scale in (0.25, 4.0):
        into(scale)


@pytest.mark.parametrize("mode", ["tensor", "row", "block", "row of A"])
@pytest.mark.parametrize("grouped", [False, True])
def test_calls_like_an_earlier_one_take_scales_of_their_own(mode, grouped):
    def operands(seed):
        A, B = drawn(33, 256, seed=seed), drawn(3, 256, 256, seed=seed + 1)
        A = ka.ops.quantize(A, mode.split()[0]).operand
        if mode == "block":
            return A, quantized(B.float()) if grouped else first(quantized(B.float()))
        B = [ka.ops.quantize(one, "tensor" if mode == "row of A" else mode) for one in B]
        of_B = torch.stack([one.scale for one in B])
        scales = PER_TENSOR if mode == "row of A" else A.mode
        B = ka.ScaledOperand(torch.stack([one.out for one in B]).mT, of_B, scales)
        return A, B if grouped else first(B)

    def first(B):
        return ka.ScaledOperand(B.tensor[0], B.scale.tensor[0], B.mode)

    ends = torch.tensor([7, 7, 33], device="cuda").int()
    known = []
    for seed in range(1, 4):
        A, B = operands(seed)
        if grouped:
            args = ka.GroupedGemmArguments(A, B, ka.ops.grouped_gemm(A, B, ends), ends)
        else:
            args = ka.GemmArguments(A, B, ka.ops.gemm(A, B))
        known.append(len(_launches._launches))
        verdict = judge(args)
        assert verdict, str(verdict)
    assert known[1] == known[2] > 0


def test_quantisation_like_an_earlier_one_is_of_its_own_tensor():
    for seed in range(3):
        x = drawn(19, 512, seed=seed)
        found = ka.ops.quantize(x)
        verdict = judge(ka.fusions.quantize(x, out=found.out, scale=found.scale))
        assert verdict, str(verdict)

"""Products of operands with scales in graphs of torch: torch.compile, torch.export, make_fx."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from support.versions import names_sizes, reads_properties
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import kernel_api as ka
from kernel_api.dtypes import dtype
from kernel_api.errors import ArgumentError

BF16, F8, F32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
PER_TENSOR, PER_ROW = ka.ScaleMode.PER_TENSOR, ka.ScaleMode.PER_ROW
OF_A, OF_B = ka.ScaleMode.BLOCK_1x128, ka.ScaleMode.BLOCK_128x128
M, N, K, E = 6, 256, 384, 3


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator)


def in_8_bits(*shape, seed=0):
    return random(*shape, seed=seed).to(F8)


def scales(*shape, seed=9):
    return random(*shape, seed=seed).abs() / 8 + 0.01


A, B, EXPERTS = in_8_bits(M, K), in_8_bits(N, K, seed=1).t(), in_8_bits(E, N, K, seed=2).mT
OFFSETS = torch.tensor([2, 2, 6], dtype=torch.int32)
BIAS = random(N, seed=3)

#: Scales of A and B, and their modes.
MODES = {
    "tensor": (scales(), PER_TENSOR, scales(seed=8), PER_TENSOR),
    "row": (scales(M), PER_ROW, scales(N, seed=8), PER_ROW),
    "block": (scales(M, K // 128), OF_A, scales(K // 128, N // 128, seed=8), OF_B),
}


def same(found, expected):
    found, expected = leaves(found), leaves(expected)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one.float(), other.float())


def leaves(found):
    parts = found if isinstance(found, tuple) else (found,)
    return [part.tensor if isinstance(part, ka.ScaledOperand) else part for part in parts]


def product(a, b, a_scale, a_mode, b_scale, b_mode, **options):
    return ka.ops.gemm(
        ka.ScaledOperand(a, a_scale, a_mode), ka.ScaledOperand(b, b_scale, b_mode), **options
    )


def compiled(function, **how):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **how)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{}, {"out_dtype": F32, "bias": BIAS, "alpha": 0.75}])
def test_a_product_of_stored_values_and_scales_is_one_node(mode, options):
    a_scale, a_mode, b_scale, b_mode = MODES[mode]

    def function(a, b, a_scale, b_scale):
        return product(a, b, a_scale, a_mode, b_scale, b_mode, **options)

    given = A, B, a_scale, b_scale
    expected = function(*given)
    assert expected.dtype is options.get("out_dtype", BF16)
    same(compiled(function)(*given), expected)
    graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert targets.count(torch.ops.kernel_api.gemm.default) == 1
    same(graph(*given), expected)


def test_whole_numbers_in_units_of_scales_give_real_ones_as_they_do_without_a_graph():
    def function(a, b, a_scale, b_scale):
        return product(a, b, a_scale, PER_ROW, b_scale, PER_ROW)

    given = (*(one.float().clamp(-7, 7).to(torch.int8) for one in (A, B)), scales(M), scales(N))
    expected = function(*given)
    assert expected.dtype is BF16
    same(compiled(function)(*given), expected)


def test_fused_products_of_groups_quantise_and_are_quantised():
    def function(a, a_scale, experts, of_experts):
        hidden = ka.ops.grouped_gemm_glu(
            ka.ScaledOperand(a, a_scale, OF_A),
            ka.ScaledOperand(experts, of_experts, OF_B),
            OFFSETS,
            scale=True,
        )
        back = ka.ScaledOperand(experts.mT[:, :128], of_experts.mT[:, :1], OF_B)
        return ka.ops.grouped_gemm(ka.ScaledOperand(hidden.out, hidden.scale, OF_A), back, OFFSETS)

    given = A, MODES["block"][0], EXPERTS, scales(E, K // 128, N // 128)
    same(compiled(function)(*given), function(*given))


def block(x, weight, up, up_scale, down, down_scale):
    """Of a network: a norm, a gated product and another one, all of them quantised."""
    first = ka.ops.rmsnorm_quantize(x, "block", weight=weight)
    hidden = ka.ops.gemm_swiglu(
        first.operand, ka.ScaledOperand(up.t(), up_scale.t(), OF_B), scale=True
    )
    hidden = ka.ScaledOperand(hidden.out, hidden.scale, OF_A)
    y = ka.ops.gemm(hidden, ka.ScaledOperand(down.t(), down_scale.t(), OF_B))
    rows = ka.ops.quantize(y, "row")
    return y, ka.ops.gemm(rows.operand, ka.ScaledOperand(up.t(), OF_ROWS, PER_ROW))


OF_ROWS = scales(2 * N)
OF_BLOCK = (
    *(random(K), in_8_bits(2 * N, K, seed=4), scales(2 * N // 128, K // 128)),
    *(in_8_bits(K, N, seed=5), scales(K // 128, N // 128)),
)


@reads_properties
def test_a_block_of_a_network_is_one_graph_for_any_number_of_tokens():
    one_graph = compiled(block, dynamic=True)
    for tokens in (M, M + 3, M + 1):
        x = random(tokens, K, seed=tokens).to(BF16)
        same(one_graph(x, *OF_BLOCK), block(x, *OF_BLOCK))


@reads_properties
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_block_is_saved_and_takes_other_sizes(strict):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for place, one in enumerate(OF_BLOCK):
                self.register_buffer(f"b{place}", one)

        def forward(self, x):
            return block(x, *self.buffers())

    rows = torch.export.Dim("rows", min=2, max=4096)
    x = random(M, K).to(BF16)
    program = torch.export.export(Block(), (x,), dynamic_shapes=({0: rows},), strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for tokens in (M, M + 5):
        x = random(tokens, K, seed=tokens).to(BF16)
        same(loaded(x), block(x, *OF_BLOCK))


# Operands from elsewhere ------------------------------------------------------------------


class Linear(torch.nn.Module):
    """A layer that keeps the operand, or what it is made of."""

    def __init__(self, keeps):
        super().__init__()
        self.weight = torch.nn.Parameter(B.t(), requires_grad=False)
        self.register_buffer("scale", scales(N))
        self.operand = ka.ScaledOperand(self.weight.t(), self.scale, PER_ROW) if keeps else None

    def forward(self, x):
        operand = self.operand
        if operand is None:
            operand = ka.ScaledOperand(self.weight.t(), self.scale, PER_ROW)
        return ka.ops.gemm(ka.ops.quantize(x, "row").operand, operand) + 1


@reads_properties
@pytest.mark.parametrize("keeps", [False, True])
def test_layers_may_keep_operands(keeps):
    layer, x = Linear(keeps), random(M, K)
    same(compiled(layer)(x), layer(x))


def test_operands_may_be_given():
    operands = ka.ScaledOperand(A, scales(M), PER_ROW), ka.ScaledOperand(B, scales(), PER_TENSOR)
    same(compiled(lambda a, b: ka.ops.gemm(a, b) * 2)(*operands), ka.ops.gemm(*operands) * 2)


class Product(torch.nn.Module):
    def forward(self, operands, more):
        return ka.ops.gemm(*operands) + more["bias"]


@names_sizes
@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_take_operands_of_any_number_of_rows(strict, capfd):
    def given(rows):
        a = ka.ops.quantize(random(rows, K, seed=rows), "row")
        operands = ka.ScaledOperand(a.out, a.scale, PER_ROW), ka.ScaledOperand(B, SCALE, PER_ROW)
        return operands, {"bias": random(N).to(BF16)}

    rows, module, file = torch.export.Dim("rows", min=2, max=4096), Product(), io.BytesIO()
    sizes = ([{0: rows}, {0: rows}], [None, None]), {"bias": None}
    program = torch.export.export(module, given(M), dynamic_shapes=sizes, strict=strict)
    assert "kernel_api.gemm" in str([node.target for node in program.graph.nodes])
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    assert "Fallback" not in capfd.readouterr().err
    for count in (M, M + 5):
        same(loaded(*given(count)), module(*given(count)))


SCALE = scales(N)


class Quantised(torch.nn.Module):
    def forward(self, x):
        found = ka.ops.quantize(x + 1, "row")
        return ka.ScaledOperand(found.out, found.scale, PER_ROW)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_return_operands(strict):
    x, module = random(M, K), Quantised()
    found = torch.export.export(module, (x,), strict=strict).module()(x)
    expected = module(x)
    assert (found.mode, found.shape, found.dtype) == (PER_ROW, (M, K), dtype(F8))
    same(found.tensor.float(), expected.tensor.float())
    same(found.scale.tensor, expected.scale.tensor)


def test_torch_takes_operands_apart_and_puts_anything_in_their_place():
    operand = ka.ScaledOperand(A, scales(M), PER_ROW)
    leaves, spec = tree_flatten([operand, 3])
    assert leaves[0] is A and leaves[1] is operand.scale.tensor and leaves[2] == 3
    back, _ = tree_unflatten([A.clone(), scales(M), 3], spec)
    assert (back.shape, back.stride, back.mode, back.scale.rank) == ((M, K), (K, 1), PER_ROW, 1)
    same(ka.ops.gemm(back, B), ka.ops.gemm(operand, B))
    names = tree_map(type, [operand])
    assert (names[0].tensor, names[0].scale.tensor) == (torch.Tensor, torch.Tensor)


def test_operands_are_loaded_as_weights_are():
    operand, file = ka.ScaledOperand(A, scales(M), PER_ROW), io.BytesIO()
    torch.save({"operand": operand}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["operand"]
    assert loaded.mode is PER_ROW and loaded.tensor.dtype is F8
    same(ka.ops.gemm(loaded, B), ka.ops.gemm(operand, B))


@pytest.mark.parametrize(
    "what",
    [
        # What is imported first comes first in the alphabet, too.
        "import kernel_api as ka; from kernel_api import ScaledOperand; import torch\n"
        "operand = ka.ops.quantize(torch.ones(4, 128), 'row').operand\n"
        "(leaf, _), _ = torch.utils._pytree.tree_flatten([operand])\n"
        "assert leaf is operand.tensor",
        "import torch; from kernel_api import ScaledOperand\n"
        "assert ScaledOperand in torch.serialization.get_safe_globals()",
    ],
    ids=["first an operand", "first torch"],
)
def test_torch_knows_operands_whichever_is_imported_first(what):
    done = subprocess.run([sys.executable, "-c", what], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_a_graph_made_is_an_operand_like_any_other():
    def function(a, scale):
        operand = ka.ScaledOperand(a.clone(), scale, PER_ROW)
        assert operand.shape == (M, K) and operand.scale.shape == (M,)
        return operand

    made, expected = compiled(function)(A, scales(M)), ka.ScaledOperand(A, scales(M), PER_ROW)
    other = copy.copy(compiled(function)(A, scales(M)))
    for one in (made, other):
        assert (one.stride, one.dtype, one.alignment >= 16) == ((K, 1), dtype(F8), True)
        assert (one.scale.dtype, one.scale.rank, one.mode) == (dtype(F32), 1, PER_ROW)
        assert repr(one) == repr(expected)
        same(ka.ops.gemm(one, B), ka.ops.gemm(expected, B))
    with pytest.raises(AttributeError, match="'ScaledOperand' object has no attribute 'nothing'"):
        _ = made.nothing


def test_what_a_graph_made_is_used_behind_its_end():
    def function(a, b, scale):
        operand = ka.ScaledOperand(a.clone(), scale, PER_ROW)
        torch._dynamo.graph_break()
        return ka.ops.gemm(operand, b)

    torch._dynamo.reset()
    given = A, B, scales(M)
    same(torch.compile(function, backend="aot_eager")(*given), product_of_rows(*given))


def product_of_rows(a, b, scale):
    return ka.ops.gemm(ka.ScaledOperand(a, scale, PER_ROW), b)


# What is written in units of a scale --------------------------------------------------------


def into(a, b, out, scale):
    return ka.ops.gemm(a, b, out=ka.ScaledOperand(out, scale, PER_TENSOR))


def test_an_output_in_units_of_a_scale_is_what_comes_back():
    expected, found = (torch.empty(M, N, dtype=F8) for _ in range(2))
    for _ in range(3):  # as a new call and as a known one
        back = into(A, B, expected, scales())
        assert isinstance(back, ka.ScaledOperand) and back.tensor is expected
    one = compiled(into)(A, B, found, scales())
    assert isinstance(one, ka.ScaledOperand) and one.tensor is found
    assert torch.equal(found.float(), expected.float())
    assert found.float().abs().max() > 0


def test_an_output_is_in_units_of_the_scale_of_its_call():
    a, b, out = A.float(), B.float(), torch.empty(M, N)
    for scale in (0.5, 0.25, 4.0):
        into(a, b, out, torch.tensor(scale))
        torch.testing.assert_close(out * scale, a @ b)


# Copies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_lies_elsewhere(copied):
    original = ka.ScaledOperand(random(4, 64), scales(4), PER_ROW)
    for one in (copied(original), copied(ka.operands.Operand(original.tensor, "A"))):
        assert type(one) in (ka.ScaledOperand, ka.operands.Operand)
        assert one.address == one.tensor.data_ptr() != original.address
        assert torch.equal(one.tensor, original.tensor)
    found, w = copied(original), random(64, 64, seed=1)
    ka.ops.gemm(found, w, out=original.tensor)
    with pytest.raises(ArgumentError, match="out shares memory with A"):
        ka.ops.gemm(found, w, out=found.tensor)


# What is refused ----------------------------------------------------------------------------


def test_wrong_scales_are_named():
    with pytest.raises(Exception, match=r"A's per_row scale has shape \(5,\); expected \(6,\)"):
        compiled(product)(A, B, scales(5), PER_ROW, scales(), PER_TENSOR)
    with pytest.raises(Exception, match="scale is float64; expected float32"):
        compiled(product)(A, B, scales(M).double(), PER_ROW, scales(), PER_TENSOR)


@pytest.mark.parametrize("element", [torch.float64, torch.float16, torch.int32])
def test_scales_that_a_graph_did_not_look_at_are_checked_behind_it(element):
    def made(a, scale):
        return ka.ScaledOperand(a.clone(), scale, PER_ROW)

    operand = compiled(made)(A, scales(M).to(element))
    with pytest.raises(ArgumentError, match=r"scale is .*; expected float32"):
        ka.ops.gemm(operand, B)


def test_a_type_that_contradicts_out_is_named():
    def function(a, b, out):
        return ka.ops.gemm(a, b, out=out, out_dtype="bfloat16")

    with pytest.raises(ArgumentError, match="out is float32 and out_dtype bfloat16; one of them"):
        function(A.float(), B.float(), torch.empty(M, N))
    torch._dynamo.reset()
    with pytest.raises(ArgumentError, match=r"out is .*float32 and out_dtype bfloat16; one"):
        torch.compile(function, backend="aot_eager")(A.float(), B.float(), torch.empty(M, N))


def test_an_output_with_a_gradient_is_refused_in_units_of_a_scale_too():
    out = torch.empty(M, N).requires_grad_()
    with pytest.raises(ArgumentError, match="out is given and needs a gradient"):
        into(A.float(), B.float(), out, scales())


def test_what_is_no_mode_is_named_outside_of_the_graph():
    def function(a, b, scale):
        return ka.ops.gemm(ka.ScaledOperand(a, scale, "per_row"), b)

    torch._dynamo.reset()
    with pytest.raises(ArgumentError, match="mode is 'per_row'; expected one of ScaleMode"):
        torch.compile(function, backend="aot_eager")(A, B, scales(M))


def test_calls_among_fake_tensors_run_nothing():
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(one) for one in (A, B, scales(M), scales(N))]
        found = product(fake[0], fake[1], fake[2], PER_ROW, fake[3], PER_ROW)
        assert mode.is_our_fake(found) and found.shape == (M, N) and found.dtype is BF16

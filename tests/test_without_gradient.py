"""Forms of kernel_api.ops that have no gradient, on operands that need one."""

import itertools
import weakref

import pytest
import torch
from support.programs import TRACERS
from support.sampling import some

import kernel_api as ka
from kernel_api import ops
from kernel_api.errors import GradientError

ROWS = torch.arange(6, dtype=torch.int32)[:, None]
ENDS = torch.tensor([2, 6], dtype=torch.int32)

#: Calls on x (6, 256), by what is to be used instead.
FORMS = {
    "gemm": (lambda x: ops.gemm(x, ones(256, 64)), "torch.matmul"),
    "gemm of B": (lambda x: ops.gemm(ones(8, 6), x), "torch.matmul"),
    "a bias": (
        lambda x: ops.gemm_bias_activation(ones(6, 8), ones(8, 256), bias=x[0]),
        "nn.linear_",
    ),
    "an epilogue": (
        lambda x: ops.gemm(
            ones(6, 8), ones(8, 256), epilogue=ka.EpilogueArguments(lambda a, x: a * x, x=x)
        ),
        "torch.matmul",
    ),
    "gemm_swiglu": (lambda x: ops.gemm_swiglu(x, ones(256, 64)), "nn.linear_swiglu"),
    "grouped_gemm": (lambda x: ops.grouped_gemm(x, ones(2, 256, 8), ENDS), "nn.moe"),
    "rmsnorm": (lambda x: ops.rmsnorm(x), "nn.rmsnorm"),
    "layernorm": (lambda x: ops.layernorm(x, weight=ones(256)), "nn.layernorm"),
    "rmsnorm_backward": (lambda x: ops.rmsnorm_backward(x, ones(6, 256), rstd=ones(6)), "detached"),
    "gather_rows": (lambda x: ops.gather_rows(x, ROWS), "nn.moe"),
    "scatter_rows": (lambda x: ops.scatter_rows(x, ROWS), "nn.moe"),
    "group_rows": (lambda x: ops.group_rows(ROWS, 6, weight=x[:, :1]).grouped, "nn.moe"),
}
BREAKS_GRAPHS = "an epilogue"
parametrized = pytest.mark.parametrize(("call", "instead"), FORMS.values(), ids=FORMS)


def ones(*shape):
    return torch.ones(shape)


def leaf():
    return torch.randn(6, 256, generator=torch.Generator().manual_seed(1)).requires_grad_()


@parametrized
def test_a_backward_pass_raises_and_says_what_to_use(call, instead):
    """Calls that look the same go another way."""
    x = leaf()
    for _ in range(3):
        found = call(x)
        assert torch.equal(found.float(), call(x.detach()).float())
        assert not call(x.detach()).requires_grad
        with pytest.raises(GradientError, match=rf"has no gradient.*{instead}"):
            (found.float().sum() + x.sum()).backward()
        assert x.grad is None
        with torch.no_grad():
            assert not call(x).requires_grad


@pytest.mark.parametrize("form", [name for name in FORMS if name != BREAKS_GRAPHS])
def test_graphs_raise_when_they_run_backwards(form):
    (call, instead), x = FORMS[form], leaf()

    def function(x):
        return call(x).float().sum() + x.sum()

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    loss = compiled(x)
    torch.testing.assert_close(loss, function(x))
    with pytest.raises(GradientError, match=rf"has no gradient.*{instead}"):
        loss.backward()
    with torch.no_grad():
        assert not compiled(x).requires_grad


@pytest.mark.parametrize(
    ("form", "tracer"),
    [
        *((name, "export") for name in some([n for n in FORMS if n != BREAKS_GRAPHS], 8)),
        *itertools.product(["gemm", "rmsnorm", "gather_rows"], list(TRACERS)[1:]),
    ],
)
def test_programs_that_are_traced_raise_when_they_run_backwards(form, tracer):
    (call, instead), x = FORMS[form], leaf()
    program = TRACERS[tracer](lambda x: call(x).float().sum() + x.sum(), [x])
    torch.testing.assert_close(program(x), call(x).float().sum() + x.sum())
    torch._dynamo.reset()
    for found in (program, torch.compile(program, backend="aot_eager")):
        with pytest.raises(GradientError, match=rf"has no gradient.*{instead}"):
            found(x).backward()
        assert x.grad is None


#: Calls that are given one of two results.
OF_TWO = {
    "gemm_swiglu": lambda x, out: (
        ops.gemm_swiglu(x, ones(256, 512), out=out, preactivation=True).preactivation
    ),
    "rmsnorm": lambda x, out: ops.rmsnorm(x, weight=ones(256), out=out, rstd=True).rstd,
}


@pytest.mark.parametrize("call", OF_TWO.values(), ids=OF_TWO)
@pytest.mark.parametrize("tracer", TRACERS)
def test_gradients_of_programs_end_at_an_output_that_is_given(call, tracer):
    def function(x):
        out = torch.empty_like(x)
        return out, call(x, out)

    x = leaf()
    out, made = TRACERS[tracer](function, [x])(x)
    torch.testing.assert_close((out, made), function(x))
    assert not out.requires_grad
    with pytest.raises(GradientError, match="has no gradient"):
        made.sum().backward()


def test_every_output_that_is_allocated_needs_a_gradient():
    x = leaf()
    for _ in range(2):
        found = ops.gemm_swiglu(x, ones(256, 64), preactivation=True)
        assert type(found)._fields == ("out", "preactivation")
        assert all(one.requires_grad for one in found)
        kept, rstd = ops.rmsnorm(x, rstd=True)
        assert kept.requires_grad and rstd.requires_grad


def test_gradients_end_at_an_output_that_is_given():
    """It is written again and again."""
    x, out, preactivation = leaf(), torch.empty(6, 32), torch.empty(6, 64)
    for _ in range(3):
        assert ops.gemm(x, ones(256, 32), out=out) is out
        found = ops.gemm_swiglu(x, ones(256, 64), out=out, preactivation=preactivation)
        assert found.out is out and found.preactivation is preactivation
        assert not (out.requires_grad or preactivation.requires_grad)
        assert ops.gemm_swiglu(x, ones(256, 64), out=out, preactivation=True).preactivation.grad_fn


def test_what_comes_back_can_be_changed_in_place():
    for found in (ops.gemm(leaf(), ones(256, 8)), ops.rmsnorm(leaf(), rstd=True).rstd):
        found += 1
        with pytest.raises(GradientError):
            found.sum().backward()


def test_an_operand_is_not_kept_by_what_is_made_of_it():
    x = leaf() * 2
    found, gone = ops.gemm(x, ones(256, 8)), weakref.ref(x)
    del x
    assert gone() is None and found.requires_grad


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_exported_has_nothing_beside(strict):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(ones(256, 8))

        def forward(self, x):
            return ops.gemm(x, self.weight)

    exported = torch.export.export(Layer(), (ones(6, 256),), strict=strict)
    called = [str(n.target) for n in exported.graph.nodes if n.op == "call_function"]
    assert called == ["kernel_api.gemm.default", "<built-in function getitem>"]


class OfAnotherLibrary:
    """Memory of a tensor, told by DLPack alone."""

    def __init__(self, tensor):
        self.tensor, self.shape = tensor, tensor.shape

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


@pytest.mark.parametrize("library", [OfAnotherLibrary, torch.Tensor.numpy])
def test_gradients_end_at_outputs_of_other_libraries(library):
    x, memory = leaf(), torch.empty(6, 256)
    for _ in range(3):
        found = ops.gemm(x, torch.eye(256), out=library(memory))
        assert not getattr(found, "requires_grad", False)
        torch.testing.assert_close(memory, x.detach())
        ops.rmsnorm(x, out=library(memory))
        assert not memory.requires_grad


def test_gradients_end_at_an_output_with_a_scale():
    x, out = leaf(), ops.quantize(torch.randn(6, 256), "row").operand
    for _ in range(3):
        assert ops.gemm(x, torch.eye(256), out=out) is out


@pytest.mark.parametrize("mode", ["row", "tensor", "block"])
def test_what_is_quantized_is_a_constant(mode):
    """Weights are, as they are read for inference."""
    x = leaf()
    for _ in range(3):
        made = (*ops.quantize(x, mode)[:2], *ops.rmsnorm_quantize(x, mode="row")[:2])
        assert not any(one.requires_grad for one in made)


def test_a_result_that_nobody_uses_asks_for_no_gradient():
    x = leaf()

    def function(x):
        return x.square().sum(), ops.gemm(x, ones(256, 8)), ops.rmsnorm(x, rstd=True)

    torch._dynamo.reset()
    for call in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        x.grad = None
        loss, product, _ = call(x)
        loss.backward(retain_graph=True)
        torch.testing.assert_close(x.grad, 2 * x.detach())
        with pytest.raises(GradientError, match=r"ops\.gemm has no gradient"):
            product.sum().backward()


def test_gradients_of_attention_are_refused_for_operands_of_functions():
    q, lse, w = torch.randn(1, 1, 8, 8), torch.zeros(1, 1, 8), torch.tensor(0.5).requires_grad_()
    of = {"score_mod": lambda score, b, h, i, j, w: score * w, "score_operands": {"w": w}}
    found = ops.sdpa_backward(q, q, q, q, q, lse, **of)
    with pytest.raises(GradientError, match="sdpa_backward has no gradient"):
        found.dQ.sum().backward()

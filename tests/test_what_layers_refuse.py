"""What is no dense tensor of torch's is refused by name, and not by what happens to meet it."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from support.sampling import some

import kernel_api as ka
from kernel_api.errors import ArgumentError

X, W, Q = torch.randn(4, 8), torch.randn(64, 8), torch.randn(1, 2, 4, 8)
ONES = torch.ones(8)
ROUTED = (torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1))
ENDS = torch.tensor([1, 4], dtype=torch.int32)
EXPERTS = (torch.randn(2, 8, 8), torch.randn(2, 4, 8))
LEARNING = torch.randn(2, 8, 8, requires_grad=True)


def epilogue_of(number):
    epilogue = ka.EpilogueArguments(lambda accumulator, n: accumulator * n, n=number)
    return ka.GemmArguments(X, W.t(), torch.empty(4, 64), epilogue=epilogue)


def scores_of(number):
    operands = {"n": number}
    return ka.ops.sdpa(Q, Q, Q, score_mod=lambda s, b, h, q, kv, n: s * n, score_operands=operands)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ka.nn.linear_activation(X, None), "weight is None; expected a torch tensor"),
        (lambda: ka.nn.linear_activation([[1.0]], W), "x is a list; expected a torch tensor"),
        (lambda: ka.nn.linear_glu(X, W, X.numpy()), "bias is a ndarray; expected"),
        (
            lambda: ka.nn.linear_glu(X, W, kind="geglu_clamped", limit=torch.tensor(0.5)),
            "limit is a tensor; expected a number: it has no gradient",
        ),
        (lambda: ka.nn.rmsnorm([1.0], ONES), "x is a list"),
        (lambda: ka.nn.rmsnorm(X.clone().requires_grad_(), ONES.numpy()), "weight is a ndarray"),
        (lambda: ka.nn.layernorm(X.to_sparse()), "x is a torch.sparse_coo tensor; expected a str"),
        (lambda: ka.nn.rmsnorm(torch.nested.nested_tensor([X, X])), "x is a nested tensor"),
        (lambda: ka.nn.attention(Q, None, Q), "k is None; expected a torch tensor"),
        (lambda: ka.nn.attention(Q.numpy(), Q, Q), "q is a ndarray"),
        (lambda: ka.nn.attention(Q, Q, Q, sink=[0.0, 1.0]), "sink is a list"),
        (lambda: ka.nn.mlp([1], W, W), "x is a list"),
        (lambda: ka.nn.mlp(X, W, W, ONES.numpy()), "b_up is a ndarray"),
        (lambda: ka.nn.moe([1], *ROUTED, *EXPERTS), "x is a list"),
        (lambda: ka.nn.moe(X, *ROUTED, *map(list, EXPERTS)), "w_up is a list"),
        (lambda: ka.ops.rmsnorm(torch.nested.nested_tensor([X, X])), "x is a nested tensor"),
        (lambda: ka.ops.layernorm(X, eps=10**400), "eps is beyond all numbers of float64"),
        (lambda: ka.ops.gemm(X, W.t(), alpha=10**400), "alpha is beyond all numbers of float64"),
        (
            lambda: ka.ops.grouped_gemm_wgrad(X.t(), torch.randn(4, 8), [4]),
            "offsets is a list; expected a torch tensor",
        ),
        (
            lambda: ka.ops.grouped_gemm(X, EXPERTS[0], ENDS, row_index=[0, 1]),
            "row_index is a list; expected",
        ),
        (lambda: ka.ops.sdpa(Q, Q, Q, return_lse="no"), "return_lse is 'no'; expected True or F"),
        (lambda: ka.ops.sdpa(Q, Q, Q, return_statistics=X), "return_statistics is tensor("),
        (lambda: ka.RmsNormArguments(X, X.clone(), hadamard="no"), "hadamard is 'no'; expected"),
        (
            lambda: ka.ElementwiseArguments(X, X.clone(), stores_out="no"),
            "stores_out is 'no'; expected True or False",
        ),
        (
            lambda: ka.ops.grouped_gemm_glu_hadamard(
                X, EXPERTS[1].new_zeros(2, 8, 64), ENDS, normalised="no"
            ),
            "normalised is 'no'; expected True or False",
        ),
        (
            lambda: ka.ops.grouped_gemm_dsrelu(
                X, EXPERTS[0], ENDS, preactivation=X, deterministic="no"
            ),
            "deterministic is 'no'; expected True or False",
        ),
        (lambda: ka.ops.grouped_gemm(X, torch.tensor(1.0), ENDS), "B has shape ()"),
        (lambda: ka.ops.grouped_gemm(torch.tensor(1.0), EXPERTS[0], ENDS), "A has shape ()"),
        (lambda: ka.ops.grouped_gemm_wgrad(torch.tensor(1.0), X, ENDS), "A has shape ()"),
        (lambda: ka.ops.gemm(X, W.t(), out=torch.tensor(1.0)), "out has shape ()"),
        (lambda: ka.ops.sdpa_backward(*[torch.tensor(1.0)] * 6), "an operand has shape ()"),
        (
            lambda: ka.ops.gemm(X, W.t(), out=torch.nested.nested_tensor([X, X])),
            "out is a nested tensor; expected a strided one",
        ),
        (lambda: ka.ops.gemm_bias_activation(X, W.t(), out=1, activation="relu"), "out is a int"),
        *(
            (
                lambda rows=rows: ka.ops.rmsnorm_rht_amax(
                    X.repeat(1, 2), weight=ONES.repeat(2), rows_per_block=rows
                ),
                f"rows_per_block is {rows}; expected a number of rows",
            )
            for rows in (-1, 2.5, 2**70)
        ),
        (lambda: ka.ops.sdpa(Q, Q, Q, scale="x"), "scale is 'x'; expected a finite number"),
        (lambda: ka.ops.sdpa(Q, Q, Q, softcap="x"), "softcap is 'x'; expected a positive number"),
        (
            lambda: ka.ops.sdpa(Q, Q, Q, scale=-1e39),
            "scale is -1e+39; scores of float32 take numbers up to",
        ),
        (
            lambda: ka.ops.sdpa(Q, Q, Q, softcap=1e39),
            "softcap is 1e+39; scores of float32 take numbers up",
        ),
        (
            lambda: ka.ops.sdpa(Q, Q, Q, softcap=1e-39),
            "1 / softcap is 1.0000000000000001e+39; scores of",
        ),
        (lambda: ka.ops.sdpa(Q, Q, Q, scale=10**400), "scale is beyond all numbers of float64"),
        (lambda: ka.ops.sdpa(Q, Q, Q, softcap=10**400), "softcap is beyond all numbers of float64"),
        (lambda: epilogue_of(2**64), "n is beyond all whole numbers of 64 bits; pass a float"),
        (lambda: scores_of(-(2**63) - 1), "n is beyond all whole numbers of 64 bits; pass a float"),
        (lambda: scores_of(2**63), "n is beyond all whole numbers of 64 bits; pass a float"),
        (
            lambda: ka.verify("any", ka.GemmArguments(X, W.t(), torch.empty(4, 64))),
            "kernel is a str; expected one that get_kernels returns",
        ),
    ],
)
def test_it_is_named(call, words):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda t: ka.nn.linear_activation(t, W),
        lambda t: ka.nn.linear_glu(t[None], W),
        lambda t: ka.nn.rmsnorm(t),
        lambda t: ka.nn.layernorm(t[None]),
        lambda t: ka.nn.attention(t[None, None], Q[:, :1], Q[:, :1]),
        lambda t: ka.nn.moe(t, *ROUTED, *EXPERTS),
        lambda t: ka.nn.mlp(t, W, W.t(), kind="gelu"),
    ],
)
def test_gradients_of_several_results_at_once_are_named(call):
    x = torch.randn(4, 8, requires_grad=True)
    y = call(x)
    with pytest.raises(ArgumentError, match=r"gradient of the result of .* has no memory of its"):
        torch.autograd.grad(y, x, torch.ones(3, *y.shape), is_grads_batched=True)
    with pytest.raises(ArgumentError, match=r"gradient of the result of .* has no memory of its"):
        torch.autograd.functional.jacobian(call, x, vectorize=True)


@pytest.mark.parametrize(
    "call",
    [
        lambda t: ka.ops.gemm(t, W.t()),
        lambda t: ka.nn.linear_activation(t, W),
        lambda t: ka.nn.mlp(t, W, W.t(), kind="gelu"),
        lambda t: ka.nn.rmsnorm(t),
        lambda t: ka.nn.attention(t[None, None], Q[:, :1], Q[:, :1]),
    ],
)
def test_transformations_of_torch_func_are_named(call):
    with pytest.raises(ArgumentError, match=r"has no memory of its own, as inside torch\.func"):
        torch.func.vmap(call)(torch.randn(3, 4, 8))
    with pytest.raises(ArgumentError, match=r"has no memory of its own, as inside torch\.func"):
        torch.func.grad(lambda t: call(t).sum())(torch.randn(4, 8))


@pytest.mark.parametrize(("name", "shape"), [("bias", (4, 4)), ("sink", (1,))])
def test_transformations_of_what_is_beside_the_operands_are_named(name, shape):
    one_head = Q[:, :1]

    def call(t):
        return ka.nn.attention(one_head, one_head, one_head, **{name: t}).sum()

    with pytest.raises(ArgumentError, match=f"{name} has no memory of its own, as inside torch"):
        torch.func.grad(call)(torch.randn(shape))


@pytest.mark.parametrize(
    "call",
    [
        lambda t: ka.ops.gemm(t, W.t()),
        lambda t: ka.ops.gemm(X, W.t(), bias=t.new_ones(64) * t.sum()),
        lambda t: ka.nn.rmsnorm(t),
        lambda t: ka.ops.sdpa(t[None, None], Q[:, :1], Q[:, :1]),
        lambda t: ka.nn.moe(t, *ROUTED, *EXPERTS),
        lambda t: ka.nn.moe(t, *ROUTED, LEARNING, EXPERTS[1]),
        lambda t: ka.nn.linear_activation(t, LEARNING[0]),
        lambda t: ka.nn.linear_glu(t, LEARNING[0], granularity="halves"),
        lambda t: ka.nn.mlp(t, W, W.t(), kind="gelu"),
        lambda t: ka.nn.mlp(t, W, LEARNING[0].t()[:, :1].expand(-1, 64), kind="gelu"),
        lambda t: ka.nn.rmsnorm(t, ONES.clone().requires_grad_()),
        lambda t: ka.nn.attention(t[None, None], LEARNING[None, :1], LEARNING[None, :1]),
    ],
)
def test_tangents_are_refused_and_not_lost(call):
    call(X), call(X)
    with forward_ad.dual_level():
        call(X)
        with pytest.raises(ArgumentError, match="has a tangent"):
            call(forward_ad.make_dual(X, torch.ones_like(X)))


#: Calls with one tensor, of every door that leads into a graph.
IN_GRAPHS = {
    "gemm": lambda t: ka.ops.gemm(t, W.t()),
    "grouped_gemm": lambda t: ka.ops.grouped_gemm(t, EXPERTS[0], ENDS),
    "ops.rmsnorm": lambda t: ka.ops.rmsnorm(t),
    "ops.rmsnorm_quantize": lambda t: ka.ops.rmsnorm_quantize(t, "row").scale,
    "ops.quantize": lambda t: ka.ops.quantize(t, "row").scale,
    "ops.gather_rows": lambda t: ka.ops.gather_rows(t, torch.zeros(2, 1, dtype=torch.int32)),
    "ops.sdpa": lambda t: ka.ops.sdpa(t[None, None], Q[:, :1], Q[:, :1]),
    "linear_activation": lambda t: ka.nn.linear_activation(t, W),
    "linear_glu": lambda t: ka.nn.linear_glu(X, t.new_ones(64, 8) * t.sum()),
    "rmsnorm": lambda t: ka.nn.rmsnorm(t, ONES),
    "layernorm": lambda t: ka.nn.layernorm(t, ONES),
    "attention": lambda t: ka.nn.attention(t[None, None], Q[:, :1], Q[:, :1]),
    "moe": lambda t: ka.nn.moe(t, *ROUTED, *EXPERTS),
    "mlp": lambda t: ka.nn.mlp(t, W, W.t(), kind="gelu"),
}

TRANSFORMS = {
    "grad": lambda call: torch.func.grad(lambda t: call(t).sum()),
    "vjp": lambda call: lambda t: torch.func.vjp(call, t)[1](call(X)),
    "jvp": lambda call: lambda t: torch.func.jvp(call, (t,), (t,))[1],
    "jacrev": torch.func.jacrev,
    "jacfwd": torch.func.jacfwd,
}


@pytest.mark.parametrize(
    ("call", "transform"),
    [*((name, "grad") for name in some(IN_GRAPHS, 6)), *(("rmsnorm", name) for name in TRANSFORMS)],
)
def test_a_graph_refuses_transformations_as_eager_mode_does(call, transform):
    function = TRANSFORMS[transform](IN_GRAPHS[call])
    with pytest.raises(ArgumentError) as eager:
        function(X)
    with pytest.raises(Exception, match="Observed exception") as compiled:
        in_one_graph(function)(X)
    assert type(eager.value).__name__ in str(compiled.value)
    torch._dynamo.reset()
    with pytest.raises(ArgumentError, match=r"has no memory of its own, as inside torch\.func"):
        torch.compile(function, backend="aot_eager")(X)


@pytest.mark.parametrize("call", IN_GRAPHS)
def test_a_graph_refuses_tangents(call):
    def with_tangent(t):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(IN_GRAPHS[call](forward_ad.make_dual(t, t)))[1]

    with pytest.raises(Exception, match="Observed exception"):
        in_one_graph(with_tangent)(X)


@pytest.mark.parametrize("call", ["ops.rmsnorm", "linear_activation", "rmsnorm", "attention"])
def test_a_graph_of_forward_mode_takes_what_has_no_tangent(call):
    def within_a_level(t):
        with forward_ad.dual_level():
            return IN_GRAPHS[call](t)

    torch.testing.assert_close(in_one_graph(within_a_level)(X), IN_GRAPHS[call](X))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", IN_GRAPHS.values(), ids=IN_GRAPHS)
def test_traces_of_torch_jit_are_named(call):
    call(X), call(X)
    with pytest.raises(ArgumentError, match=r"torch\.jit\.trace.* torch\.compile or torch"):
        torch.jit.trace(call, (X,))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", [ka.ops.gemm, ka.ops.gemm_swiglu])
def test_traces_of_torch_jit_are_named_where_an_operand_is_a_parameter(form):
    weight = torch.nn.Parameter(torch.ones(X.shape[-1], 64))
    with pytest.raises(ArgumentError, match=r"torch\.jit\.trace.* torch\.compile or torch"):
        torch.jit.trace(lambda x: form(x, weight), (X,))


def in_one_graph(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)

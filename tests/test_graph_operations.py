"""Operations of graphs: products, elements, reductions, layouts, groups."""

import inspect
import math

import pytest
import torch
from support.graph_operations import Nodes, apart, close, random

import kernel_api as ka
import kernel_api.graph as cudnn
from kernel_api.errors import ArgumentError, GraphError
from kernel_api.graph._enums import data_type, reduction_mode
from kernel_api.graph._node import _OPERATIONS
from kernel_api.graph._operations import POINTWISE, Operations

DOUBLE = torch.float64

# Matrix products -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b"),
    [((7, 5), (5, 9)), ((3, 7, 5), (3, 5, 9)), ((3, 7, 5), (5, 9)), ((1, 7, 5), (3, 5, 9)),
     ((2, 6, 7, 5), (2, 3, 5, 9)), ((2, 1, 7, 5), (3, 5, 9))],
)  # fmt: skip
def test_matmul_broadcasts_batches(a, b):
    g, A, B = Nodes(), apart(*a), apart(*b, seed=1)
    C = g.matmul(g.given(A), g.given(B))
    found = g.compute(C)
    rank = max(len(a), len(b))
    exact = [one.double().reshape((1,) * (rank - one.dim()) + one.shape) for one in (A, B)]
    if exact[0].shape[:-2] == (2, 6):
        exact[1] = exact[1].repeat_interleave(2, 1)
    close(found, exact[0] @ exact[1], (exact[0].float() @ exact[1].float()))
    assert C.stride == tuple(torch.empty(C.dim).stride())


def test_matmul_of_integers_is_exact():
    generator = torch.Generator().manual_seed(0)
    A, B = (
        torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
        for shape in ((5, 301), (301, 3))
    )
    g = Nodes()
    found = g.compute(g.matmul(g.given(A), g.given(B)))
    assert torch.equal(found.long(), A.long() @ B.long())


def test_matmul_of_doubles_is_in_double():
    g, A, B = Nodes(), random(4, 3, element=DOUBLE), random(3, 5, element=DOUBLE)
    assert g.compute(g.matmul(g.given(A), g.given(B))).dtype is DOUBLE


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [((3, 4), (5, 6), "A with K = 4 but B with K = 5"),
     ((4,), (4, 6), "two modes"),
     ((2, 3, 4), (3, 4, 6), "of batch modes 2 and 3, one must be a multiple"),
     ((4, 3, 4), (0, 4, 6), "must be a multiple")],
)  # fmt: skip
def test_matmul_says_what_does_not_fit(a, b, words):
    g = Nodes()
    g.matmul(g.unknown(a), g.unknown(b))
    with pytest.raises(GraphError, match=words):
        g.infer()


def test_matmul_has_no_padding():
    g = Nodes()
    with pytest.raises(GraphError, match=r"padding = 1\.0; only 0\.0"):
        g.matmul(g.unknown((2, 3)), g.unknown((3, 4)), padding=1.0)


# Elements --------------------------------------------------------------------------------

RELU = {"slope": 0.17, "lower": -0.4, "upper": 1.3}
ATTRIBUTES = {
    "relu": RELU, "relu_backward": RELU,
    "leaky_relu": {"slope": 0.23}, "leaky_relu_backward": {"slope": 0.23},
    "swish": {"beta": 1.7}, "swish_backward": {"beta": 1.7},
    "elu": {"alpha": 0.6}, "elu_backward": {"alpha": 0.6}, "gen_index": {"axis": 1},
}  # fmt: skip
#: What the argument of the method is called, of attributes.
KEYWORDS = {
    "slope": "negative_slope", "lower": "lower_clip", "upper": "upper_clip",
    "beta": "swish_beta", "alpha": "elu_alpha", "axis": "axis",
}  # fmt: skip
POSITIVE = ("log", "sqrt", "rsqrt", "pow", "reciprocal")
LOGICAL = ("logical_and", "logical_or", "logical_not", "binary_select")

F = torch.nn.functional


def derived(function):
    def backward(loss, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(function(x), x, loss)[0]

    return backward


def relu(x):
    return torch.where(x > -0.4, x, -0.4 + 0.17 * (x + 0.4)).clamp(max=1.3)


#: In torch, written another way than the operations are.
EXPECTED = {
    "add": torch.add, "bias": torch.add, "sub": torch.sub, "mul": torch.mul, "scale": torch.mul,
    "div": torch.div, "add_square": lambda a, b: torch.addcmul(a, b, b), "max": torch.maximum,
    "min": torch.minimum, "mod": torch.fmod, "pow": torch.pow, "cmp_eq": torch.eq,
    "cmp_neq": torch.ne, "cmp_gt": torch.gt, "cmp_ge": torch.ge, "cmp_lt": torch.lt,
    "cmp_le": torch.le, "logical_and": torch.logical_and, "logical_or": torch.logical_or,
    "logical_not": torch.logical_not,
    "binary_select": lambda a, b, mask: torch.where(mask.bool(), a, b),
    "identity": torch.clone, "neg": torch.neg, "abs": torch.abs, "exp": torch.exp,
    "log": torch.log, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal,
    "erf": torch.erf, "ceil": torch.ceil, "floor": torch.floor, "sin": torch.sin,
    "cos": torch.cos, "tan": torch.tan,
    "gen_index": lambda x: torch.arange(x.shape[1]).view(-1, 1).expand(x.shape),
    "relu": relu, "leaky_relu": lambda x: F.leaky_relu(x, 0.23), "sigmoid": torch.sigmoid,
    "tanh": torch.tanh, "gelu": F.gelu,
    "gelu_approx_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "swish": lambda x: F.silu(1.7 * x) / 1.7, "silu": F.silu, "elu": lambda x: F.elu(x, 0.6),
    "softplus": F.softplus, "hardswish": F.hardswish, "squared_relu": lambda x: F.relu(x) ** 2,
}  # fmt: skip
EXPECTED.update(
    {f"{name}_backward": derived(EXPECTED[name]) for name in EXPECTED
     if f"{name}_backward" in POINTWISE}
)  # fmt: skip


def operands(op, *shape, seed=0):
    """One for each argument, away from kinks."""
    drawn = []
    for place, name in enumerate(POINTWISE[op].arguments):
        x = random(*shape, seed=seed + place)
        if op in POSITIVE:
            x = x.abs() + 0.25
        if op in LOGICAL and (name == "mask" or op.startswith("logical")):
            x = (x > 0.2).float() * x
        drawn.append(x)
    if op in ("cmp_eq", "cmp_neq", "cmp_ge", "cmp_le"):
        drawn[1][..., ::2] = drawn[0][..., ::2]
    return drawn


@pytest.mark.parametrize("op", POINTWISE)
def test_pointwise_operations_are_those_of_torch(op):
    g, given = Nodes(), operands(op, 2, 5, 7)
    keywords = {KEYWORDS[name]: value for name, value in ATTRIBUTES.get(op, {}).items()}
    found = g.compute(getattr(g, op)(*map(g.given, given), **keywords))
    exact = EXPECTED[op](*(x.double() for x in given))
    same = EXPECTED[op](*given)
    if found.is_floating_point():
        close(found, exact, same)
    else:
        assert torch.equal(found, exact.to(found.dtype))


def test_softplus_has_its_slope_everywhere():
    x = torch.tensor([-math.inf, -1e3, -20.0, 0.0, 20.0, 1e3, math.inf], requires_grad=True)
    y = POINTWISE["softplus"].torch(x)
    y.sum().backward()
    exact = x.detach().double()
    torch.testing.assert_close(y.double(), F.softplus(exact, threshold=30), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(x.grad.double(), exact.sigmoid(), rtol=1e-6, atol=1e-30)


def in_epilogues():
    """Operations, and whether what is beside the accumulator is numbers."""
    for name, entry in POINTWISE.items():
        if entry.epilogue is None:
            continue
        if name != "pow":  # whose exponents are numbers
            yield pytest.param(name, False, id=name)
        if len(entry.arguments) > 1:
            yield pytest.param(name, True, id=f"{name}-of-numbers")


@pytest.mark.parametrize(("op", "is_number"), list(in_epilogues()))
def test_epilogues_compute_what_torch_computes(op, is_number):
    entry, attributes = POINTWISE[op], ATTRIBUTES.get(op, {})
    M, N, K = 6, 5, 3
    A, B = random(M, K, seed=7), random(K, N, seed=8)
    accumulator = A.double() @ B.double()
    if op in POSITIVE:
        A, B, accumulator = A.abs(), B.abs(), A.abs().double() @ B.abs().double()
    others = operands(op, M, N, seed=3)[1:]
    if is_number:
        others = [2.0 if op == "pow" else 0.37 for _ in others]
    names = [f"x{place}" for place in range(len(others))]
    tensors = {} if is_number else dict(zip(names, others, strict=True))

    def fn(accum, x0=None, x1=None):
        given = others if is_number else [x0, x1][: len(others)]
        return entry.epilogue(accum, *given, **attributes) * 1.0

    fn.__signature__ = inspect.Signature(
        [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ("accum", *tensors)]
    )
    out = torch.empty(M, N)
    args = ka.GemmArguments(A, B, out, epilogue=ka.EpilogueArguments(fn, **tensors))
    ka.get_kernels(args, providers=("reference",))[0].run(args)
    values = [torch.as_tensor(x, dtype=DOUBLE) for x in others]
    exact = entry.torch(accumulator, *values, **attributes)
    close(out, exact.double())


#: Planning has nodes of its own.
NAMES = [
    name for name, one in _OPERATIONS.items()
    if type(one).__module__.startswith(Operations.__module__)
]  # fmt: skip


def test_every_operation_is_a_method_and_the_other_way_round():
    methods = {
        name for name, one in vars_of(Operations).items()
        if inspect.isfunction(one) and not name.startswith("_")
    }  # fmt: skip
    assert methods - {"check_open"} == set(NAMES)


def vars_of(kind):
    return {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}


def test_every_method_says_what_it_does():
    for name in NAMES:
        assert getattr(Operations, name).__doc__, name


def test_pointwise_operations_broadcast_and_keep_strides():
    g = Nodes()
    x = g.given(random(4, 3, 5).transpose(1, 2))
    y = g.add(g.given(random(5, 1)), x)
    z = g.mul(g.given(random(1, 5, 1)), g.given(random(4, 1, 3)))
    g.infer()
    assert (y.dim, y.stride) == (x.dim, x.stride)
    assert (z.dim, z.stride) == ((4, 5, 3), (15, 3, 1))


def test_results_of_inputs_with_an_element_in_several_places_have_one_for_each():
    g = Nodes()
    row, window = g.given(random(1, 4).expand(3, 4)), g.given(random(6).unfold(0, 4, 1))
    columns = g.given(random(4, 3).t())
    gain = g.given(random(1).expand(4))
    alone = [
        g.relu(row),
        g.relu(window),
        g.rmsnorm(row, gain, epsilon=1e-5)[0],
        *g.rmsnorm_backward(row, row, gain, epsilon=1e-5)[:2],
        g.rope(row, g.given(random(2)), g.given(random(2)), head_dim=4),
        g.block_scale_quantize(row, 2)[0],
    ]
    beside = [g.add(row, columns), g.add(columns, row)]
    g.infer()
    for one in alone:
        assert one.stride == (4, 1)[2 - one.rank :], one
    assert [one.stride for one in beside] == [columns.stride] * 2


def test_pointwise_operations_name_dims_that_do_not_broadcast():
    g = Nodes()
    g.add(g.unknown((4, 3)), g.unknown((4, 5)))
    with pytest.raises(GraphError, match=r"dims \[4, 3\] and \[4, 5\], which do not broadcast"):
        g.infer()


def test_comparisons_are_boolean_unless_a_type_is_set():
    g = Nodes()
    x = g.given(random(3, 4))
    truth, number, index = g.cmp_gt(x, 0.25), g.cmp_lt(x, x), g.gen_index(x, axis=1)
    number.set_data_type(data_type.HALF)
    g.infer()
    assert truth.data_type is data_type.BOOLEAN
    assert number.data_type is data_type.HALF
    assert index.data_type is data_type.INT32


def test_integers_stay_exact():
    g = Nodes()
    big = torch.tensor([2**30 + 1, -(2**30) - 7], dtype=torch.int32)
    assert g.compute(g.add(g.given(big), 5)).tolist() == [2**30 + 6, -(2**30) - 2]
    g = Nodes()
    assert g.compute(g.max(g.given(big), 3)).tolist() == [2**30 + 1, 3]
    g = Nodes()
    assert g.compute(g.exp(g.given(torch.tensor([0, 1])))).tolist() == pytest.approx([1, math.e])


def test_truth_values_count_as_one_and_zero():
    g, truths = Nodes(), torch.tensor([True, False, True])
    x = g.given(truths)
    found = g.compute(g.add(x, x), g.sub(x, True), g.mul(x, 0.5), g.logical_not(x), g.neg(x))
    expected = ([2, 0, 2], [0, -1, 0], [0.5, 0, 0.5], [False, True, False], [-1, 0, -1])
    assert [one.tolist() for one in found] == list(expected)


def test_numbers_of_the_host_are_operands():
    g, x = Nodes(), random(3, 5)
    found = g.compute(g.scale(g.given(x), g.passed(0.3)))
    close(found, x.double() * 0.3, x * 0.3)


# Reductions ------------------------------------------------------------------------------


def root(x, modes):
    return torch.linalg.vector_norm(x, dim=modes, keepdim=True)


def product(x, modes):
    for mode in modes:
        x = torch.prod(x, mode, keepdim=True)
    return x


REDUCTIONS = {
    "ADD": lambda x, m: x.sum(m, keepdim=True), "MUL": product,
    "MIN": lambda x, m: x.amin(m, keepdim=True), "MAX": lambda x, m: x.amax(m, keepdim=True),
    "AMAX": lambda x, m: x.abs().amax(m, keepdim=True),
    "AVG": lambda x, m: x.mean(m, keepdim=True),
    "NORM1": lambda x, m: torch.linalg.vector_norm(x, 1, m, keepdim=True), "NORM2": root,
    "MUL_NO_ZEROS": lambda x, m: product(torch.where(x == 0, 1.0, x), m),
}  # fmt: skip


@pytest.mark.parametrize("mode", REDUCTIONS)
@pytest.mark.parametrize("modes", [(1,), (0, 2), (0, 1, 2), ()])
def test_reductions_go_over_modes_of_extent_one(mode, modes):
    x = apart(3, 5, 4)
    x[0, 1] = 0.0
    g = Nodes()
    y = g.reduction(g.given(x), mode=reduction_mode[mode])
    y.set_dim([1 if m in modes else n for m, n in enumerate(x.shape)])
    found = g.compute(y)
    expected = REDUCTIONS[mode]
    if modes:
        close(found, expected(x.double(), modes), expected(x, modes))
    else:
        plain = x.abs() if mode in ("AMAX", "NORM1", "NORM2") else x
        assert torch.equal(found, torch.where(x == 0, 1.0, x) if "ZEROS" in mode else plain)


def test_reductions_of_nothing():
    g = Nodes()
    x = g.given(torch.empty(3, 0))
    found = {
        mode: g.reduction(x, mode, axis=1) for mode in ("ADD", "MUL", "MIN", "MAX", "AMAX", "NORM2")
    }
    g.run()
    values = [g.value(y)[2].item() for y in found.values()]
    assert values == [0.0, 1.0, math.inf, -math.inf, 0.0, 0.0]


def test_reductions_take_an_axis():
    g, x = Nodes(), random(3, 5, 4)
    y = g.reduction(g.given(x), reduction_mode.ADD, axis=-1)
    z = g.reduction(g.given(x), "ADD", axis=(0, 1))
    g.infer()
    assert (y.dim, z.dim) == ((3, 5, 1), (1, 1, 4))


def test_reductions_say_what_to_set():
    g = Nodes()
    g.reduction(g.unknown((3, 4)), reduction_mode.ADD)
    with pytest.raises(GraphError, match="has no dim; set_dim says which"):
        g.infer()
    g = Nodes()
    g.reduction(g.unknown((3, 4)), reduction_mode.ADD).set_dim([3, 2])
    with pytest.raises(GraphError, match="expected 1, or what the input has"):
        g.infer()
    g = Nodes()
    g.reduction(g.unknown((3, 4)), reduction_mode.ADD, axis=2)
    with pytest.raises(GraphError, match="has axis 2"):
        g.infer()


def test_genstats_sums_channels():
    g, x = Nodes(), random(3, 5, 2, 7)
    total, squares = g.genstats(g.given(x))
    found = g.compute(total, squares)
    for value, exact in zip(found, (x.double(), x.double() ** 2), strict=True):
        close(value, exact.sum((0, 2, 3), keepdim=True), exact.float().sum((0, 2, 3), True))
    assert total.dim == (1, 5, 1, 1) and total.data_type is data_type.FLOAT


# Layouts ---------------------------------------------------------------------------------


def seen(g, tensor, storage):
    """A tensor by the view that its operation says, in the memory of the input."""
    node = tensor.producer
    view = node.operation.views(node)["Y"]
    return storage.as_strided(view.dim, view.stride, storage.storage_offset() + view.offset)


def test_transpose_is_a_view():
    g, x = Nodes(), apart(2, 3, 5)
    y = g.transpose(g.given(x), permutation=[2, 0, 1])
    found = g.compute(y)
    assert torch.equal(found, x.permute(2, 0, 1))
    assert torch.equal(seen(g, y, x), found)
    g.transpose(g.given(x), [0, 0, 1])
    with pytest.raises(GraphError, match=r"every mode of .* once"):
        g.infer()


def test_slice_is_a_view():
    g, x = Nodes(), apart(4, 9, 6)
    y = g.slice(g.given(x), slices=[slice(None), slice(1, 8, 3), slice(-4, -1)])
    z = g.slice(g.given(x), start=[1, 2, 0], limit=[3, 9, 5])
    found, other = g.compute(y, z)
    assert torch.equal(found, x[:, 1:8:3, -4:-1]) and torch.equal(seen(g, y, x), found)
    assert torch.equal(other, x[1:3, 2:, :5]) and torch.equal(seen(g, z, x), other)
    with pytest.raises(GraphError, match="expected 1 or more"):
        g.slice(g.given(x), slices=[slice(None, None, -1)])
    with pytest.raises(GraphError, match=r"slices=\[slice"):
        g.slice(g.given(x))


def test_reshapes_that_are_views_and_that_are_not():
    g, x = Nodes(), random(4, 6, 5)
    y = g.reshape(g.given(x), shape=[4, 2, 15])
    part = g.given(x[:, :4])
    z = g.reshape(part, reshape_mode="LOGICAL").set_dim([4, 20])
    found, other = g.compute(y, z)
    assert torch.equal(found, x.view(4, 2, 15)) and torch.equal(seen(g, y, x), found)
    assert torch.equal(other, x[:, :4].reshape(4, 20))
    g = Nodes()
    g.reshape(g.given(x[:, :4]), shape=[80])
    with pytest.raises(GraphError, match=r"is no view; use reshape_mode\.LOGICAL"):
        g.infer()


def test_a_reshape_reads_memory_by_the_strides_that_are_set():
    g, x = Nodes(), random(3, 4, 5)
    y = g.reshape(g.given(x)).set_dim([3, 5, 4]).set_stride([20, 1, 5])
    found = g.compute(y)
    assert torch.equal(found, x.transpose(1, 2)) and torch.equal(seen(g, y, x), found)


@pytest.mark.parametrize(
    ("dim", "stride", "words"),
    [([7], [1], "expected as many elements, 12"), ([12], [2], "behind the end"), ([], [], "no dim")]
)  # fmt: skip
def test_reshapes_that_cannot_be(dim, stride, words):
    g = Nodes()
    y = g.reshape(g.given(random(3, 4)))
    if dim:
        y.set_dim(dim).set_stride(stride)
    with pytest.raises(GraphError, match=words):
        g.infer()


def test_concatenate():
    g, x, y = Nodes(), apart(2, 3, 5), random(2, 4, 5)
    whole = g.concatenate([g.given(x), g.given(y)], axis=-2)
    assert torch.equal(g.compute(whole), torch.cat([x, y], 1))
    assert whole.producer.operation.views(whole.producer) == {"Y": None}
    g.concatenate([g.given(x), g.given(y)], axis=0)
    with pytest.raises(GraphError, match="the other modes must be alike"):
        g.infer()


def test_types_that_are_concatenated_are_one_or_the_results_is_set():
    g = Nodes()
    small, large = torch.tensor([[1, -2]], dtype=torch.int8), torch.tensor([[300, -400, 5]])
    y = g.concatenate([g.given(small), g.given(large.int())], axis=1)
    with pytest.raises(GraphError, match=r"puts INT8 and INT32 .* needs a type, by set_data_type"):
        g.infer()
    graph = cudnn.pygraph(handle=cudnn.create_handle("cpu"))
    parts = [graph.tensor_like(small), graph.tensor_like(large.int())]
    y = graph.concatenate(parts, axis=1).set_data_type(data_type.INT8).set_output(True)
    graph.build([cudnn.heur_mode.A])
    found = torch.zeros(1, 5, dtype=torch.int8)
    graph.execute({parts[0]: small, parts[1]: large.int(), y: found})
    assert found.tolist() == [[1, -2, 127, -128, 5]]


# Groups ----------------------------------------------------------------------------------


def grouped(mode, starts, top_k=None):
    E, M, T, K, N = len(starts), 11, 7, 6, 5
    weight = random(E, N, K, seed=1).transpose(1, 2)
    tokens = random(1, T if mode == "GATHER" else M, K, seed=2)
    g = Nodes()
    order = torch.randperm(M, generator=torch.Generator().manual_seed(4)).int()
    index = order % (T * (top_k or 1)) if mode == "GATHER" else order
    keywords = {} if mode == "NONE" else {"token_index": g.given(index.view(1, M, 1))}
    offsets = torch.tensor(starts, dtype=torch.int32).view(-1, 1, 1)
    y = g.moe_grouped_matmul(
        g.given(tokens), g.given(weight), g.given(offsets), mode=mode, top_k=top_k, **keywords
    )
    rows = tokens[0].double()
    if mode == "GATHER":
        rows = rows[index.long() // (top_k or 1)]
    exact = torch.zeros(M, N, dtype=DOUBLE)
    for i in range(M):
        own = [e for e in range(E) if starts[e] <= i]
        if own:
            place = int(index[i]) if mode == "SCATTER" else i
            exact[place] = rows[i] @ weight[own[-1]].double()
    return g.compute(y), exact


@pytest.mark.parametrize("mode", ["NONE", "GATHER", "SCATTER"])
@pytest.mark.parametrize("starts", [(0, 4, 4, 9), (0, 0, 11), (0,)])
def test_grouped_products(mode, starts):
    found, exact = grouped(mode, starts)
    close(found[0], exact)


@pytest.mark.parametrize("mode", ["NONE", "GATHER", "SCATTER"])
def test_rows_in_front_of_the_first_group_are_refused(mode):
    with pytest.raises(ArgumentError, match="the first group begins at 2; expected 0"):
        grouped(mode, (2, 5, 11))


def test_gathered_pairs_of_tokens_and_experts():
    found, exact = grouped("GATHER", (0, 4, 9), top_k=2)
    close(found[0], exact)


def test_grouped_products_say_what_does_not_fit():
    def node(token=(1, 8, 4), weight=(3, 4, 5), starts=(3, 1, 1), kind=data_type.INT32):
        g = Nodes()
        g.moe_grouped_matmul(g.unknown(token), g.unknown(weight), g.unknown(starts, kind))
        return g

    node().infer()
    for given, words in (
        ({"token": (2, 8, 4)}, r"expected \(1, M, K\) and \(E, K, N\)"),
        ({"token": (1, 8, 3)}, "K = 3 but weight with K = 4"),
        ({"starts": (4, 1, 1)}, "with E = 3"),
        ({"kind": data_type.FLOAT}, "FLOAT .*expected INT32"),
    ):
        with pytest.raises(GraphError, match=words):
            node(**given).infer()
    g = Nodes()
    with pytest.raises(GraphError, match="GATHER and token_index is None"):
        g.moe_grouped_matmul(
            g.unknown((1, 8, 4)), g.unknown((3, 4, 5)), g.unknown((3, 1, 1), data_type.INT32),
            mode="GATHER",
        )  # fmt: skip

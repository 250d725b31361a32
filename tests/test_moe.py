"""The layer of experts: against a loop over tokens, in eager mode and compiled."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from support.fusions import GLU, close, pairs
from support.versions import names_sizes
from torch._subclasses.fake_tensor import FakeTensorMode

import kernel_api as ka
from kernel_api import _again, _moe_nn
from kernel_api.errors import ArgumentError

K, INNER, E = 6, 32, 4
ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "mixture_of_experts.py"
DOCUMENT = ROOT / "docs" / "mixture_of_experts.md"

#: Experts of each token.
ROUTINGS = {
    "one choice": torch.tensor([[1], [3], [1], [0], [0], [1], [3]]),
    "two choices": torch.tensor([[1, 0], [0, 3], [3, 1], [0, 1], [1, 3], [0, 3], [1, 0]]),
    "every expert": torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]]),
    "all on the last expert": torch.full((5, 2), 3),
    "one token": torch.tensor([[2, 0]]),
    "no tokens": torch.zeros(0, 2, dtype=torch.long),
}
TWO = ROUTINGS["two choices"]


@pytest.fixture
def made_anew():
    """No layer of this test is launched as one was before."""
    _again._sequences.clear()


def leaves(routing=TWO, major="k", element=torch.float64):
    """x, expert_weight, w_up and w_down; expert_index stands between the first two."""
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape, scale=1.0):
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        return drawn.to(element)

    up, down = leaf(E, K, 2 * INNER, scale=K**-0.5), leaf(E, INNER, K, scale=INNER**-0.5)
    if major == "k":
        up, down = up.mT.contiguous().mT, down.mT.contiguous().mT
    found = (leaf(len(routing), K), leaf(*routing.shape), up, down)
    return [one.requires_grad_() for one in found]


def by_token(
    x, expert_index, expert_weight, w_up, w_down, kind="swiglu", order="gate_up",
    granularity="halves",
):  # fmt: skip
    rows = []
    nothing = 0 * (expert_weight.sum() + w_up.sum() + w_down.sum())
    for token, chosen in enumerate(expert_index.tolist()):
        parts = [nothing * x[token]]
        for choice, expert in enumerate(chosen):
            if not 0 <= expert < E:
                continue
            hidden = GLU[kind](*pairs(x[token] @ w_up[expert], order, granularity))
            parts.append(expert_weight[token, choice] * (hidden @ w_down[expert]))
        rows.append(sum(parts))
    return torch.stack(rows) if rows else x * expert_weight.sum() * w_up.sum() * w_down.sum()


def results(layer, operands, routing=TWO, **options):
    """The layer's result, and the gradients of what asks for one."""
    x, *others = operands
    y = layer(x, routing, *others, **options)
    generator = torch.Generator().manual_seed(1)
    dy = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
    learning = [one for one in operands if one.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, learning, dy)]


def check(operands, routing=TWO, layer=ka.nn.moe, tolerance=1e-12, **options):
    expected = results(by_token, operands, routing, **options)
    for _ in range(2):  # of which the second is launched as the first was
        found = results(layer, operands, routing, **options)
        for one, other in zip(found, expected, strict=True):
            close(one, other, tolerance)


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("major", ["k", "n"])
def test_the_layer_and_its_gradients_are_those_of_a_loop_over_tokens(routing, major):
    check(leaves(routing, major), routing)


@pytest.mark.parametrize("routing", ["one choice", "two choices", "no tokens"])
def test_tokens_may_have_no_columns(routing):
    routing = ROUTINGS[routing]
    shapes = ((len(routing), 0), routing.shape, (E, 0, 2 * INNER), (E, INNER, 0))
    x, *others = (torch.ones(shape, dtype=torch.float64).requires_grad_() for shape in shapes)
    y = ka.nn.moe(x, routing, *others)
    assert y.shape == x.shape
    for found in torch.autograd.grad(y.sum(), [x, *others]):
        assert not found.any()


@pytest.mark.parametrize("kind", GLU)
def test_every_gated_linear_unit_is_there(kind):
    check(leaves(), kind=kind)


@pytest.mark.parametrize("order", ["gate_up", "up_gate"])
@pytest.mark.parametrize("granularity", [8, 32, "halves"])
def test_pairs_are_ordered_and_blocked_as_asked(order, granularity):
    check(leaves(), order=order, granularity=granularity)


@pytest.mark.parametrize(
    "index", [torch.int32, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
)
def test_indices_may_be_any_integers_and_lie_anywhere(index):
    routing = TWO.to(index).t().contiguous().t()
    check(leaves(), routing)


@pytest.mark.parametrize("element", [torch.int64, torch.uint8, torch.bool])
def test_weights_may_be_whole_numbers(element):
    x, _, up, down = (one.detach() for one in leaves())
    weight = torch.tensor([0, 1]).expand(TWO.shape).to(element)
    found, expected = (ka.nn.moe(x, TWO, one, up, down) for one in (weight, weight.to(x.dtype)))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("experts", [2, 32766, 32767, 32768, 40000])
def test_experts_may_be_as_many_as_there_are(experts):
    index = torch.tensor([[0, -1], [experts - 1, experts], [1, experts + 5], [1, 1]])
    routing = _moe_nn.Routing.of(index, torch.rand(4, 2), experts)
    expected = torch.bincount(index[(index >= 0) & (index < experts)], minlength=experts).cumsum(0)
    assert torch.equal(routing.offsets, expected.int())
    there = (index >= 0) & (index < experts)
    assert torch.equal(routing.rank >= 0, there)
    assert sorted(routing.rank[there].tolist()) == list(range(int(there.sum())))


@pytest.mark.parametrize("make", [torch.ones_like, lambda y: y.new_ones(1, 1).expand(y.shape),
                                  lambda y: torch.ones_like(y.t()).t()])  # fmt: skip
def test_gradients_may_lie_anywhere_and_are_moved_by_kernels(monkeypatch, make, made_anew):
    """A kernel of ours takes rows side by side; the gradient of a sum is one number all over."""
    moved = []
    scatter_rows = ka.ops.scatter_rows
    monkeypatch.setattr(
        ka.ops, "scatter_rows", lambda x, rank: moved.append(x.stride()) or scatter_rows(x, rank)
    )
    x, weight, up, down = leaves()
    y = ka.nn.moe(x, TWO, weight, up, down)
    torch.autograd.grad(y, x, make(y))
    assert len(moved) == 3  # tokens, twice, and the gradient
    assert {stride[1] for stride in moved} == {1}


def test_integers_without_tokens_have_no_rows():
    x = torch.zeros(0, K, dtype=torch.int8)
    up, down = (torch.ones(shape, dtype=torch.int8) for shape in ((E, K, 2 * INNER), (E, INNER, K)))
    index = torch.zeros(0, 2, dtype=torch.long)
    assert ka.nn.moe(x, index, index.float(), up, down).shape == (0, K)


@names_sizes
@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_layer_takes_any_number_of_tokens(strict):
    class Layer(torch.nn.Module):
        def forward(self, *operands):
            return ka.nn.moe(*operands)

    x, weight, up, down = (one.detach() for one in leaves(element=torch.float32))
    tokens = {0: torch.export.Dim("tokens", min=2, max=4096)}
    shapes = {"dynamic_shapes": ((tokens, tokens, tokens, None, None),), "strict": strict}
    exported = torch.export.export(Layer(), (x, TWO, weight, up, down), **shapes).module()
    for count in (len(x), 3):
        operands = (x[:count], TWO[:count], weight[:count], up, down)
        torch.testing.assert_close(exported(*operands), ka.nn.moe(*operands))


@pytest.fixture
def memory_of_nans():
    """What is allocated holds NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


NONE = [-1, E, E + 3, -7, 2**31 - 1, -(2**31), 2**32, -(2**32), 2**63 - 1, -(2**63)]


@pytest.mark.usefixtures("memory_of_nans")
@pytest.mark.parametrize("none", NONE)
def test_pairs_with_an_index_of_no_expert_add_nothing_and_have_no_gradient(none):
    routing = TWO.clone()
    routing[1, 0] = routing[4] = routing[6, 1] = none
    operands = leaves(routing)
    check(operands, routing)
    _, dx, dweight, *_ = results(ka.nn.moe, operands, routing)
    assert not dx[4].any()
    assert torch.equal(dweight == 0, routing == none)


@pytest.mark.usefixtures("memory_of_nans")
@pytest.mark.parametrize("choices", [1, 2])
def test_all_pairs_may_be_without_an_expert(choices):
    routing = torch.full((5, choices), -1)
    for one in results(ka.nn.moe, leaves(routing), routing):
        assert not one.any()


@pytest.mark.usefixtures("memory_of_nans")
def test_what_a_token_without_an_expert_holds_reaches_nothing():
    routing = TWO.clone()
    routing[3], routing[5, 1] = -1, E
    x, weight, *others = leaves(routing)
    with torch.no_grad():
        x[3] = weight[3] = weight[5, 1] = torch.nan
    found = results(ka.nn.moe, [x, weight, *others], routing)
    x, weight, *others = leaves(routing)
    for one, other in zip(found, results(ka.nn.moe, [x, weight, *others], routing), strict=True):
        close(one, other, 0)


@pytest.mark.parametrize(
    ("element", "none"),
    [
        *((torch.uint8, 255), (torch.int8, -1), (torch.int16, E)),
        *((torch.uint16, 2**16 - 1), (torch.uint32, 2**32 - 1)),
        *((torch.uint64, 2**63), (torch.uint64, 2**64 - 1)),
    ],
)
def test_no_expert_may_be_said_in_any_type(element, none):
    chosen = TWO.tolist()
    chosen[2][1] = none
    routing = torch.tensor(chosen, dtype=element)
    check(leaves(routing), routing)


def test_the_last_expert_that_a_type_can_name_is_one():
    x, weight = torch.randn(1, K), torch.ones(1, 2)
    weights = torch.randn(256, K, 2 * INNER), torch.randn(256, INNER, K)
    routing = torch.tensor([[255, 0]], dtype=torch.uint8)
    found = ka.nn.moe(x, routing, weight, *weights)
    close(found, ka.nn.moe(x, routing.long(), weight, *weights), 0)
    assert not torch.equal(found, ka.nn.moe(x, routing.long() - 1, weight, *weights))


def test_gradients_are_those_of_finite_differences():
    routing = TWO[:3]
    operands = leaves(routing)

    def layer(x, *others):
        return ka.nn.moe(x, routing, *others)

    assert torch.autograd.gradcheck(layer, operands, fast_mode=True)


@pytest.mark.parametrize("element", [torch.float32, torch.bfloat16])
def test_other_types_are_rounded_a_few_times(element):
    operands = leaves(element=element)
    wide = [one.detach().double().requires_grad_() for one in operands]
    found, expected = results(ka.nn.moe, operands), results(by_token, wide)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is element
        norm = torch.linalg.vector_norm
        assert norm(one.double() - other) < 4 * torch.finfo(element).eps * norm(other)


@pytest.mark.parametrize(
    ("element", "taken"), [(torch.float8_e4m3fn, torch.bfloat16), (torch.int8, torch.int32)]
)
@pytest.mark.parametrize("routing", ["one choice", "two choices"])
def test_sums_of_eight_bits_are_of_a_type_that_holds_them(element, taken, routing):
    routing = ROUTINGS[routing]
    x, w_up, w_down = torch.ones(len(routing), 8), torch.ones(E, 8, 32), torch.ones(E, 16, 8)
    operands = [one.to(element) for one in (x, w_up, w_down)]
    y = ka.nn.moe(operands[0], routing, torch.ones(routing.shape), *operands[1:], kind="reglu")
    assert y.dtype is taken
    assert (y == routing.shape[1] * 64 * 16).all()


def test_the_weights_of_a_router_may_be_of_a_wider_type():
    x, weight, up, down = leaves(element=torch.bfloat16)
    wide = weight.detach().float().requires_grad_()
    y, _, dweight, *_ = results(ka.nn.moe, [x, wide, up, down])
    assert (y.dtype, dweight.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("major", ["k", "n"])
def test_gradients_of_weights_lie_as_the_weights_do(major):
    *_, up, down = leaves(major=major)
    *_, dup, ddown = results(ka.nn.moe, leaves(major=major))
    assert (dup.stride(), ddown.stride()) == (up.stride(), down.stride())


PRODUCTS_OF_GRADIENTS = [{"dglu", ""}, {"dglu"}, {"dglu", "wgrad"}, {"wgrad"}]


@pytest.mark.parametrize("which", range(4))
def test_only_the_gradients_that_are_asked_for_are_computed(which, monkeypatch):
    operands = [one.detach() for one in leaves()]
    operands[which].requires_grad_()
    x, *others = operands
    y = ka.nn.moe(x, TWO, *others)
    called = set()
    for kind in ("", "dglu", "wgrad"):
        name = f"grouped_gemm_{kind}".rstrip("_")
        form = getattr(ka.ops, name)
        monkeypatch.setattr(
            ka.ops, name, lambda *a, k=kind, f=form, **o: called.add(k) or f(*a, **o)
        )
    y.sum().backward()
    assert [one.grad is not None for one in operands] == [i == which for i in range(4)]
    assert called == PRODUCTS_OF_GRADIENTS[which]


def test_nothing_is_kept_where_nothing_learns(monkeypatch, made_anew):
    asked = []
    form = ka.ops.grouped_gemm_glu
    monkeypatch.setattr(
        ka.ops, "grouped_gemm_glu", lambda *a, **o: asked.append(o) or form(*a, **o)
    )
    x, *others = leaves()
    with torch.no_grad():
        found = ka.nn.moe(x, TWO, *others)
    assert "preactivation" not in asked[0]
    close(found, ka.nn.moe(x, TWO, *others), 0)
    assert asked[1]["preactivation"] is True


def test_a_gradient_may_be_one_number_for_all():
    found, expected = (
        torch.autograd.grad(layer(operands[0], TWO, *operands[1:]).sum(), operands)
        for layer, operands in ((ka.nn.moe, leaves()), (by_token, leaves()))
    )
    for one, other in zip(found, expected, strict=True):
        close(one, other)


def test_equal_operands_give_equal_results():
    for one, other in zip(*(results(ka.nn.moe, leaves()) for _ in range(2)), strict=True):
        assert torch.equal(one, other)


# Compiled --------------------------------------------------------------------------------


def test_torch_compile_takes_it_whole_so_nothing_waits_for_the_routing():
    torch._dynamo.reset()
    compiled = torch.compile(ka.nn.moe, fullgraph=True, backend="aot_eager")
    # The second: for any number of tokens.
    for routing in (TWO.where(TWO != 3, -1), ROUTINGS["all on the last expert"]):
        eager = results(ka.nn.moe, leaves(routing), routing)
        found = results(compiled, leaves(routing), routing)
        for one, other in zip(found, eager, strict=True):
            close(one, other, 0)


def test_torch_compile_takes_the_layer_without_gradients():
    torch._dynamo.reset()
    operands = [one.detach() for one in leaves()]
    x, *others = operands
    compiled = torch.compile(ka.nn.moe, fullgraph=True, backend="aot_eager")
    close(compiled(x, TWO, *others), ka.nn.moe(x, TWO, *others), 0)


@pytest.mark.filterwarnings("error")
def test_a_layer_of_fake_tensors_has_sizes_and_nothing_to_warn_of():
    with FakeTensorMode() as mode:
        x, *others = (mode.from_tensor(one.detach()).requires_grad_() for one in leaves())
        y = ka.nn.moe(x, mode.from_tensor(TWO), *others)
        (dx,) = torch.autograd.grad(y.sum(), x)
    assert y.shape == dx.shape == x.shape


# Refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "mish"}, "kind is 'mish'; expected one of glu, swiglu"),
        ({"order": "both"}, "order is 'both'"),
        ({"granularity": 48}, "w_up has 2I = 64; pairs of 48 columns need a multiple of 96"),
        ({"x": torch.ones(2, 7, K)}, r"x has shape \(2, 7, 6\) and expert_index \(7, 2\)"),
        ({"x": torch.ones(6, K)}, r"expert_index \(7, 2\); expected \(T, K\) and \(T, k\)"),
        ({"expert_index": TWO.float()}, "expert_index is torch.float32; expected integers"),
        ({"expert_index": TWO > 0}, "expert_index is torch.bool; expected integers"),
        ({"expert_index": TWO[:, :0]}, r"expert_index has shape \(7, 0\); expected at least one"),
        ({"expert_weight": torch.ones(7, 3)}, r"expert_weight has shape \(7, 3\); expected \(7, 2"),
        (
            {"expert_weight": TWO.to(torch.uint64)},
            "expert_weight is torch.uint64; expected a floating type",
        ),
        ({"expert_weight": TWO * 1j}, "expert_weight is torch.complex64; expected a floating type"),
        (
            {"w_up": torch.ones(E, 5, 2 * INNER)},
            r"w_up has shape \(4, 5, 64\); expected \(E, 6, 2I\)",
        ),
        (
            {"w_up": torch.ones(0, K, 64), "w_down": torch.ones(0, INNER, K)},
            r"w_up has shape \(0, 6, 64\); expected the matrix of at least one expert",
        ),
        ({"expert_index": TWO.to("meta")}, "expert_index is on meta but x is on cpu; expected one"),
        ({"w_down": torch.ones(E, INNER, K, device="meta")}, "w_down is on meta but x is on cpu"),
        ({"w_up": torch.ones(E, K, 63)}, r"w_up has shape \(4, 6, 63\); expected \(E, 6, 2I\)"),
        ({"w_up": torch.ones(K, 2 * INNER)}, r"w_up has shape \(6, 64\); expected \(E, 6, 2I\)"),
        (
            {"w_down": torch.ones(3, INNER, K)},
            r"w_down has shape \(3, 32, 6\); expected \(4, 32, 6\)",
        ),
        (
            {"w_down": torch.ones(E, K, INNER)},
            r"w_down has shape \(4, 6, 32\); expected \(4, 32, 6\)",
        ),
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused_with_both_values(changes, message):
    x, weight, up, down = (one.detach() for one in leaves(element=torch.float32))
    given = {"x": x, "expert_index": TWO, "expert_weight": weight, "w_up": up, "w_down": down}
    with pytest.raises(ArgumentError, match=message):
        ka.nn.moe(**{**given, **changes})


# The example -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("mixture_of_experts", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up their types
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_same_layer_of_torch_is_the_same(example):
    operands = [one.detach() for one in leaves(element=torch.bfloat16)]
    wide = [torch.nn.functional.pad(one, (0, 2)) for one in (operands[0], operands[3])]
    up = torch.nn.functional.pad(operands[2].mT, (0, 2)).mT
    ours = ka.nn.moe(wide[0], TWO, operands[1], up, wide[1])
    theirs = example.layer_of_torch(wide[0], TWO, operands[1], up, wide[1])
    close(theirs, ours, 0.05)
    close(example.layer_by_expert(wide[0], TWO, operands[1], up, wide[1]), ours, 0.05)


def test_the_example_runs_without_a_gpu(example, capsys):
    assert example.main("cpu") == 0
    shown = capsys.readouterr().out
    for name in example.LAYERS:
        assert name in shown


# The document ----------------------------------------------------------------------------


def test_the_code_of_the_document_runs():
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names = {}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 7
    assert names["y"].shape == names["x"].shape
    assert names["y8"].shape == names["large"].shape


def test_the_functions_that_the_document_names_are_there():
    names = set(re.findall(r"`(grouped_gemm[a-z_]*)(?![a-z_0-9])", DOCUMENT.read_text()))
    functions = {name for name in dir(ka.ops) if name.startswith("grouped_gemm")}
    assert names == functions


def products_of_a_layer(element):
    """Arguments of what a layer multiplies, forward and backward, without data."""

    def made(*shape, of=element):
        return torch.empty(shape, dtype=of, device="meta")

    T, inner, hidden, experts = 64, 128, 256, 8
    ends = made(experts, of=torch.int32)
    up, down = made(experts, 2 * inner, hidden).mT, made(experts, hidden, inner).mT
    pairs, weight = {"granularity": "halves"}, made(T, of=torch.float32)
    rows, wide, narrow = made(T, hidden), made(T, 2 * inner), made(T, inner)
    fusions = ka.fusions
    kept = {"preactivation": made(T, 2 * inner), "prob": weight}
    return [
        fusions.grouped_gemm_glu(rows, up, ends, out=narrow, **kept, **pairs),
        fusions.grouped_gemm(narrow, down, ends, out=made(T, hidden)),
        fusions.grouped_gemm_dglu(
            rows, down.mT, ends, out=wide, dprob=made(T, of=torch.float32), **kept, **pairs
        ),
        fusions.grouped_gemm(wide, up.mT, ends, out=made(T, hidden)),
        fusions.grouped_gemm_wgrad(
            rows.t(), wide, ends, out=made(experts, hidden, 2 * inner)
        ),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("element", "precision", "waits"),
    [
        (torch.bfloat16, "highest", False),
        (torch.float16, "highest", False),
        (torch.float32, "high", False),
        (torch.float32, "highest", True),
        (torch.float64, "high", True),
    ],
)
@pytest.mark.parametrize("cc", [80, 90])
def test_a_layer_waits_for_the_device_where_the_document_says_so(cc, element, precision, waits):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        for args in products_of_a_layer(element):
            families = {kernel.family for kernel in ka.get_kernels(args, cc=cc)}
            assert (families == {"reference.grouped_gemm"}) == waits
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("element", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_of_tokens_are_moved_by_kernels(element):
    tokens, rows = (torch.empty(n, 64, dtype=element, device="meta") for n in (20, 40))
    rank = torch.empty(20, 2, dtype=torch.int32, device="meta")
    for args in (
        ka.ScatterRowsArguments(tokens, rows, rank),
        ka.GatherRowsArguments(rows, tokens, rank),
    ):
        assert ka.get_kernels(args, cc=80)[0].metadata.provider == "cutedsl"


# On a GPU --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 40, 1000])
def test_layers_and_their_gradients_are_right_on_a_gpu(example, tokens):
    for layer in example.LAYERS.values():
        errors = example.errors_of(layer.small(), tokens, "cuda")
        assert max(errors.values()) <= example.ERROR_ALLOWED, errors


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [40, 3000])
def test_a_graph_holds_the_layer_while_tokens_and_routing_change(example, tokens):
    layer = example.LAYERS["Mixtral-8x7B"].small()
    held = layer.tokens(tokens, "cuda")
    weights = layer.weights("cuda")
    ka.nn.moe(*held, *weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ka.nn.moe(*held, *weights)
    for _ in range(2):
        for one, other in zip(held, layer.tokens(tokens, "cuda"), strict=True):
            one.copy_(other)
        held[1][::3, 0] = -1  # no expert
        graph.replay()
        expected = example.layer_by_expert(*held, *weights)
        assert example.error(y, expected) <= example.ERROR_ALLOWED

"""How graphs are planned: what is one kernel, what is not and why; and what they compute."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from support.composite_attention import ATTENTION
from support.random_graphs import REDUCTIONS

import kernel_api as ka
import kernel_api.graph as cudnn
from kernel_api.verification import compare

INFINITY = float("inf")
EPS = 1e-5  # of norms in graphs, where none is given
HALF, BF16, FLOAT = cudnn.data_type.HALF, cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT


def hopper(**options):
    """A graph that is planned for an H200, wherever that is done."""
    types = {"io_data_type": BF16, "intermediate_data_type": FLOAT, "compute_data_type": FLOAT}
    return cudnn.pygraph(sm_version=90, **{**types, **options})


def example(name):
    path = Path(__file__).parents[1] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def planned(graph, mode=cudnn.heur_mode.A):
    graph.validate()
    graph.create_execution_plans([mode])
    return graph.plans[0]


def launches(plan):
    return [step.title for step in plan.steps if step.kind != "view"]


# What is one kernel -----------------------------------------------------------------------


def bias_gelu(graph):
    product = graph.matmul(graph.tensor((1, 512, 256)), graph.tensor((1, 256, 384)))
    return graph.gelu(graph.bias(product, graph.tensor((1, 1, 384))))


def scale_amax(graph):
    product = graph.matmul(graph.tensor((512, 256)), graph.tensor((256, 384)))
    factor = graph.tensor((1, 1), data_type=FLOAT, is_pass_by_value=True)
    scaled = graph.scale(product, factor)
    largest = graph.reduction(scaled, cudnn.reduction_mode.AMAX)
    largest.set_dim((1, 1)).set_data_type(FLOAT).set_output(True)
    return scaled


def halves(graph):
    product = graph.matmul(graph.tensor((512, 256)), graph.tensor((256, 768), (1, 256)))
    rows = slice(None)
    gate = graph.slice(product, slices=[rows, slice(0, 384)])
    up = graph.slice(product, slices=[rows, slice(384, 768)])
    return graph.mul(graph.silu(gate), up)


def pairs(graph):
    product = graph.matmul(graph.tensor((512, 256)), graph.tensor((256, 768)))
    gate, up = graph.glu_pair(product, granularity=32)
    return graph.mul(graph.gelu(gate), up)


def preactivation(graph):
    product = graph.matmul(graph.tensor((512, 256)), graph.tensor((256, 384)))
    product.set_output(True).set_data_type(BF16)
    return graph.relu(product)


def residual(graph):
    """Two chains that only meet in the epilogue."""
    product = graph.matmul(graph.tensor((512, 256)), graph.tensor((256, 384)))
    other = graph.mul(graph.tensor((512, 384)), graph.tensor((1, 384)))
    return graph.add(graph.tanh(product), graph.sigmoid(other))


def row_sums(graph):
    product = graph.matmul(graph.tensor((512, 256)), graph.tensor((256, 384)))
    sums = graph.reduction(product, cudnn.reduction_mode.ADD, axis=1)
    sums.set_output(True).set_data_type(FLOAT)
    return product


def channels_last(graph):
    shape, stride = (8, 64, 16, 24), (64 * 16 * 24, 1, 24 * 64, 64)
    scaled = graph.mul(graph.tensor(shape, stride), graph.tensor((1, 64, 1, 1)))
    return graph.relu(graph.add(scaled, graph.tensor(shape, stride)))


def attention(graph):
    q, k, v = (graph.tensor((2, heads, 256, 64)) for heads in (8, 2, 2))
    out, _ = graph.sdpa(
        q=q,
        k=k,
        v=v,
        attn_scale=0.125,
        generate_stats=False,
        use_causal_mask=True,
        score_mod=lambda g, score: g.mul(g.tanh(g.mul(score, 0.1)), 10.0),
    )
    return out


def attention_statistics(graph):
    q, k, v = (graph.tensor((2, heads, 256, 64)) for heads in (8, 2, 2))
    largest, total = (graph.tensor((2, 8, 256, 1), data_type=FLOAT) for _ in range(2))
    largest.set_output(True)
    total.set_output(True)
    out, stats = graph.sdpa(
        q=q, k=k, v=v, generate_stats=True, score_max=largest, score_sum_exp=total
    )
    stats.set_output(True).set_data_type(FLOAT)
    return out


def sums_alone(graph):
    """What is reduced is read, and not written."""
    x = graph.tensor((512, 384))
    smallest = graph.reduction(x, cudnn.reduction_mode.MIN, axis=0)
    smallest.set_output(True).set_data_type(FLOAT)
    return graph.reduction(graph.relu(x), cudnn.reduction_mode.ADD, axis=-1).set_data_type(FLOAT)


ONE_KERNEL = {
    bias_gelu: "sm90_gemm",
    scale_amax: "sm90_gemm",
    halves: "sm90_gemm",
    pairs: "sm90_gemm",
    preactivation: "sm90_gemm",
    residual: "sm90_gemm",
    row_sums: "sm90_gemm",
    channels_last: "sm80_elementwise",
    sums_alone: "sm80_elementwise",
    attention: ATTENTION,
    attention_statistics: ATTENTION,
}


@pytest.mark.parametrize("make", ONE_KERNEL, ids=lambda make: make.__name__)
def test_one_kernel_computes_all(make):
    graph = hopper()
    make(graph).set_output(True)
    plan = planned(graph)
    (kernel,) = launches(plan)
    assert kernel.startswith(ONE_KERNEL[make])
    assert sum(len(step.nodes) for step in plan.steps) == len(graph.nodes)
    assert plan.workspace_size == 0
    assert kernel in str(graph.explain())


@pytest.mark.parametrize("kinds", [(FLOAT, FLOAT), (HALF, FLOAT), (HALF, BF16)], ids=str)
def test_statistics_of_attention_are_written_by_its_kernel(kinds):
    g = cudnn.pygraph("", FLOAT, FLOAT, FLOAT, handle=cudnn.create_handle("cpu"))
    B, H, S, D = 2, 2, 5, 8
    q, k, v = (g.tensor((B, H, S, D), name=name) for name in "qkv")
    names = ("largest", "total")
    largest, total = (
        g.tensor((B, H, S, 1), name=name, data_type=kind).set_output(True)
        for name, kind in zip(names, kinds, strict=True)
    )
    out, _ = g.sdpa(q, k, v, 0.5, score_max=largest, score_sum_exp=total, use_causal_mask=True)
    out.set_output(True).set_name("out")
    g.build([cudnn.heur_mode.A])
    converted = sum(kind is not FLOAT for kind in kinds)
    assert [step.kind for step in g.selected.steps] == ["kernel"] * (1 + converted)
    generator = torch.Generator().manual_seed(0)
    data = {name: torch.randn(B, H, S, D, generator=generator) for name in "qkv"}
    found = {"out": torch.full((B, H, S, D), torch.nan)}
    for name, kind in zip(names, kinds, strict=True):
        found[name] = torch.full((B, H, S, 1), torch.nan, dtype=getattr(torch, kind.value))
    g.execute({**data, **found})
    scores = 0.5 * data["q"].double() @ data["k"].double().mT
    scores.masked_fill_(torch.ones(S, S).triu(1).bool(), -INFINITY)
    most = scores.amax(-1, keepdim=True)
    exact = {"largest": most, "total": (scores - most).exp().sum(-1, keepdim=True)}
    for name, one in exact.items():
        tolerance = 4 * torch.finfo(found[name].dtype).eps
        torch.testing.assert_close(found[name].double(), one, rtol=tolerance, atol=tolerance)


def test_a_transformer_block_is_seven_kernels():
    block = example("transformer_graph")
    given = block.operands(block.SMALL, 64, "cpu")
    on_gpu = {name: operand.to("meta") for name, operand in given.items()}
    graph, _ = block.graph_of(block.SMALL, on_gpu, sm_version=90)
    names = [name.split("_bf16")[0] for name in launches(planned(graph))]
    gemm, norm = "sm90_gemm", "sm80_rmsnorm"
    assert names.pop(2) in ATTENTION
    assert names == [norm, gemm, gemm, norm, gemm, gemm]


def test_a_transformer_block_computes_what_torch_does():
    block = example("transformer_graph")
    given = block.operands(block.SMALL, 96, "cpu")
    graph, tensors = block.graph_of(block.SMALL, given)
    graph.build([cudnn.heur_mode.A])
    y = torch.full_like(given["x"], float("nan"))
    graph.execute({**block.pack(tensors, given), tensors["y"]: y})
    exact = block.block_of_torch(block.SMALL, given, torch.float64)
    verdict = compare(y, exact, block.block_of_torch(block.SMALL, given), factor=3.0)
    assert verdict, verdict.reason


# What fused plans compute -----------------------------------------------------------------


def both(make, *given, **types):
    """The results of a fused plan and of single operations, and what the fused one launches."""
    found = []
    for mode in (cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK):
        handle = cudnn.create_handle("cpu")
        kinds = {"io_data_type": FLOAT, "intermediate_data_type": FLOAT, **types}
        with cudnn.Graph(handle=handle, heuristics=[mode], **kinds) as graph:
            results = make(graph, *given)
            for one in results if isinstance(results, tuple) else (results,):
                one.set_output(True)
        found.append((graph(*given), [step.kind for step in graph.selected.steps]))
    (fused, kinds), (single, _) = found
    return fused, single, kinds


def check_as_precise(fused, single, exact):
    """By the error-ratio rule, against what single operations give in the same type."""
    several = isinstance(exact, tuple)
    for found, base, ref in zip(
        *(one if several else (one,) for one in (fused, single, exact)), strict=True
    ):
        verdict = compare(found, ref, base, factor=3.0)
        assert verdict, verdict.reason


def into_and_behind(g, x, w):
    h = g.relu(x)
    return g.add(g.matmul(h, w), h)


def into_and_behind_groups(g, x, w, starts):
    h = g.relu(x)
    return g.add(g.moe_grouped_matmul(h, w, starts, mode="NONE"), h)


@pytest.mark.parametrize("make", [into_and_behind, into_and_behind_groups])
def test_what_a_product_reads_is_computed_before_it_where_its_epilogue_reads_it_too(make):
    x, w = torch.randn(8, 16), torch.randn(16, 16)
    given = (x, w)
    if make is into_and_behind_groups:
        given = (x[None], w.expand(2, 16, 16), torch.tensor([0, 3], dtype=torch.int32))
    fused, single, kinds = both(make, *given)
    h = given[0].double().relu()
    check_as_precise(fused, single, h @ w.double() + h)
    assert kinds.count("kernel") == 2
    graph = hopper()
    h = graph.relu(graph.tensor((512, 256)))
    graph.add(graph.matmul(h, graph.tensor((256, 256))), h).set_output(True)
    assert len(launches(planned(graph))) == 2


def test_what_serves_a_node_that_is_left_out_too_is_computed_for_both():
    def make(g, x, w, y):
        product, factor = g.matmul(x, w), g.exp(y)
        product = g.mul(product, factor)
        return product, g.mul(product, factor).set_data_type("int64")  # which no epilogue stores

    x, w, y = torch.randn(8, 16), torch.randn(16, 16), torch.randn(8, 16)
    fused, single, kinds = both(make, x, w, y)
    assert kinds == ["kernel", "kernel", "torch"]
    check_as_precise(fused[0], single[0], x.double() @ w.double() * y.double().exp())
    assert torch.equal(fused[1], single[1])


@pytest.mark.parametrize("begin", [0, 4])
@pytest.mark.parametrize("behind", [False, True], ids=["alone", "and-in-the-epilogue"])
def test_half_of_a_product_is_a_view_for_what_is_not_its_epilogue(behind, begin):
    def make(g, x, w, gain):
        half = g.slice(g.matmul(x, w), [slice(None), slice(begin, begin + 4)])
        normed, _ = g.rmsnorm(half, gain)
        return (normed, g.silu(half)) if behind else normed

    x, w, gain = torch.randn(3, 16), torch.randn(16, 8), torch.randn(4)
    fused, single, kinds = both(make, x, w, gain)
    assert kinds == ["kernel", "view", *["kernel"] * (1 + behind)]
    half = (x.double() @ w.double())[:, begin : begin + 4]
    normed = torch.nn.functional.rms_norm(half, (4,), gain.double(), EPS)
    silu = torch.nn.functional.silu(half)
    check_as_precise(fused, single, (normed, silu) if behind else normed)


@pytest.mark.parametrize("mode", REDUCTIONS)
@pytest.mark.parametrize("axes", [(0, 1, 2), (1, 2)], ids=["all", "of-a-batch"])
@pytest.mark.parametrize("first", ["matmul", "add"])
def test_what_is_reduced_is_used_in_the_same_kernel(first, axes, mode):
    def make(g, a, b):
        x = getattr(g, first)(a, b)
        reduced = g.reduction(x, mode, axis=axes)
        return g.mul(x, reduced), reduced

    b = torch.randn(2, 4, 4) + 3.0 * torch.arange(2).view(2, 1, 1)
    a = torch.randn(2, 4, 4)
    fused, single, kinds = both(make, a, b)
    assert kinds == ["kernel"]
    x = getattr(torch, first)(a.double(), b.double())
    reduced = REDUCTIONS[mode](x, axes)
    check_as_precise(fused, single, (reduced, x * reduced))  # in the order of their making


INT8, INT32, INT64 = cudnn.data_type.INT8, cudnn.data_type.INT32, cudnn.data_type.INT64
OF_INTEGERS = {
    **{
        op: lambda g, x, op=op: getattr(g, op)(x, g.sub(x, 1))
        for op in ("add", "sub", "mul", "max", "min", "add_square", "cmp_eq", "cmp_gt", "cmp_le")
    },
    **{op: lambda g, x, op=op: getattr(g, op)(x) for op in ("identity", "neg", "abs")},
    "binary_select": lambda g, x: g.binary_select(x, 1, g.cmp_gt(x, 3)),
    "slice": lambda g, x: g.slice(x, [slice(None), slice(0, 4)]),
    "glu_pair": lambda g, x: g.glu_pair(x, granularity="halves"),
    **{
        mode: lambda g, x, mode=mode: g.reduction(x, mode, axis=-1)
        for mode in ("ADD", "MAX", "MIN", "AMAX", "NORM1")
    },
}


@pytest.mark.parametrize("kind", [INT32, INT64], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", OF_INTEGERS)
def test_integers_are_computed_as_integers(name, kind):
    x = torch.tensor([[2**24 + 1, 2**24 - 1, 5, -(2**24) - 3, -7, 0, 1, 2]] * 3)
    x = x.to(getattr(torch, kind.value))
    fused, single, kinds = both(
        OF_INTEGERS[name], x, io_data_type=kind, intermediate_data_type=kind
    )
    if name == "glu_pair":
        fused, single = torch.cat(fused), torch.cat(single)
    assert torch.equal(fused, single) and "kernel" not in kinds


@pytest.mark.parametrize("out", [INT8, INT32, FLOAT], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", OF_INTEGERS)
def test_integers_that_float32_holds_are_for_kernels_and_do_not_wrap(name, out):
    def make(g, x):
        found = OF_INTEGERS[name](g, x)
        for one in found if isinstance(found, tuple) else (found,):
            one.set_data_type(out)
        return found

    x = torch.tensor([[-128, 127, 100, -100, 16, 0, 1, 2]] * 3, dtype=torch.int8)
    fused, single, kinds = both(make, x, io_data_type=INT8, intermediate_data_type=INT8)
    if name == "glu_pair":
        fused, single = torch.cat(fused), torch.cat(single)
    assert torch.equal(fused, single) and kinds == ["kernel"]


def test_sums_of_small_integers_are_for_kernels_as_long_as_float32_holds_them():
    for extent, title in ((2**16, "sm80_elementwise"), (2**17, "torch")):
        graph = hopper()
        x = graph.tensor((4, extent), data_type=INT8)
        graph.reduction(x, "ADD", axis=-1).set_data_type(INT32).set_output(True)
        (name,) = launches(planned(graph))
        assert name.startswith(title)


def test_indices_are_compared_in_a_kernel():
    graph = hopper()
    x = graph.tensor((512, 256))
    rows, columns = (graph.gen_index(x, axis=axis) for axis in (0, 1))
    graph.binary_select(x, 0.0, graph.cmp_ge(rows, columns)).set_output(True)
    assert launches(planned(graph))[2].startswith("sm80_elementwise")


DOUBLE = cudnn.data_type.DOUBLE


@pytest.mark.parametrize("kind", [FLOAT, INT64, INT32, HALF], ids=lambda kind: kind.name)
@pytest.mark.parametrize("first", ["add", "matmul"])
def test_what_is_kept_between_operations_in_float64_is_rounded_to_its_type(first, kind):
    def make(g, x, y):
        exact = getattr(g, first)(x, y)
        return g.sub(exact, g.mul(exact, 1.0).set_data_type(kind)).set_data_type(DOUBLE)

    types = dict.fromkeys(("io_data_type", "intermediate_data_type", "compute_data_type"), DOUBLE)
    given = [torch.rand(8, 8, dtype=torch.float64) for _ in range(2)]
    fused, single, _ = both(make, *given, **types)
    assert torch.equal(fused, single)
    assert single.abs().max() > 1e-9


def test_whole_numbers_of_64_bits_are_rounded_between_operations():
    fused, single, _ = both(
        lambda g, x: g.mul(g.mul(x, 10.0).set_data_type(INT64), 0.5), torch.randn(8, 8)
    )
    assert torch.equal(fused, single) and torch.equal(fused * 2, (fused * 2).round())


@pytest.mark.parametrize("first", ["add", "matmul", "rmsnorm"])
def test_kernels_in_float32_compute_nothing_that_is_to_be_in_float64(first):
    def make(g, x, y, z):
        made = getattr(g, first)(x, y)
        made = made[0] if first == "rmsnorm" else made
        return g.add(made, z).set_data_type(DOUBLE)

    y = torch.randn(8) if first == "rmsnorm" else torch.randn(8, 8)
    z = torch.rand(8, 8, dtype=torch.float64) + 2.0**24
    x = torch.randn(8, 8)
    exact = {
        "add": torch.add,
        "matmul": torch.matmul,
        "rmsnorm": lambda x, y: torch.nn.functional.rms_norm(x, (8,), y, EPS),
    }[first](x.double(), y.double()) + z
    fused, single, kinds = both(make, x, y, z)
    check_as_precise(fused, single, exact)
    assert kinds == ["kernel", "kernel"]
    fused, single, kinds = both(make, x, y, z, compute_data_type=DOUBLE)
    check_as_precise(fused, single, exact)
    assert kinds == (["kernel"] if first == "add" else ["torch", "kernel"])


VIEWS = {
    "transpose": lambda g, x: g.transpose(x, [1, 0]),
    "slice": lambda g, x: g.slice(x, [slice(None), slice(1, 5)]),
    "reshape": lambda g, x: g.reshape(x, shape=(4, 16)),
}


@pytest.mark.parametrize("kind", [INT8, HALF, FLOAT, DOUBLE], ids=lambda kind: kind.name)
@pytest.mark.parametrize("given", [FLOAT, HALF], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_another_type_is_a_copy_unless_it_is_float32_of_16_bits(name, given, kind):
    def make(g, x):
        return g.relu(VIEWS[name](g, x).set_data_type(kind)).set_data_type(DOUBLE)

    x = (100 * torch.randn(8, 8)).to(getattr(torch, given.value))
    fused, single, kinds = both(make, x)
    assert torch.equal(fused, single)
    assert ("view" in kinds) == (kind in (given, FLOAT))


# What torch computes ----------------------------------------------------------------------


UNFUSED = {
    "MUL": (lambda g, x, y: g.reduction(x, "MUL", axis=-1), "epilogues have no reduction MUL"),
    "MUL_NO_ZEROS": (
        lambda g, x, y: g.reduction(x, "MUL_NO_ZEROS", axis=-1),
        "epilogues have no reduction MUL_NO_ZEROS",
    ),
    "pow by a tensor": (lambda g, x, y: g.pow(x, y), "epilogues have powers by numbers that are"),
    "pow by 1.5": (lambda g, x, y: g.pow(x, 1.5), "epilogues have no exact power 1.5"),
    "mod": (lambda g, x, y: g.mod(x, y), "mod has no form"),
    **{
        op: (lambda g, x, y, op=op: getattr(g, op)(x), f"{op} has no form")
        for op in ("sin", "cos", "tan")
    },
}
IN_TORCH = {
    "MUL": lambda x, y: x.prod(-1, keepdim=True),
    "MUL_NO_ZEROS": lambda x, y: x.where(x != 0, 1.0).prod(-1, keepdim=True),
    "pow by a tensor": torch.pow,
    "pow by 1.5": lambda x, y: x.pow(1.5),
    "mod": torch.fmod,
    **{op: lambda x, y, op=op: getattr(x, op)() for op in ("sin", "cos", "tan")},
}


def with_torch(make, behind, sm_version=None):
    """relu(x), or a product, then what is made of it and y; uids 1, 2 and 3."""
    g = cudnn.pygraph(
        "", FLOAT, FLOAT, FLOAT, handle=cudnn.create_handle("cpu"), sm_version=sm_version
    )
    x, y = (g.tensor((3, 5, 7), name=name) for name in "xy")
    before = g.matmul(x, g.tensor((7, 7), name="w"), name="mm") if behind else g.relu(x)
    g.relu(make(g, before, y)).set_output(True).set_name("out")
    return g


@pytest.mark.parametrize("behind", [False, True], ids=["elements", "product"])
@pytest.mark.parametrize("name", UNFUSED)
def test_what_epilogues_have_not_is_left_to_torch_and_explained(name, behind):
    make, why = UNFUSED[name]
    said = str(planned(with_torch(make, behind, sm_version=90)))
    assert f"is left to torch: {why}" in said
    assert f"is not part of {'the' if behind else 'an element-wise'} kernel" in said
    graph = with_torch(make, behind)
    graph.build([cudnn.heur_mode.A])
    assert [step.kind for step in graph.selected.steps] == ["kernel", "torch", "kernel"]
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.rand((3, 5, 7), generator=generator) * 3 for _ in "xy")
    x[0, 0, 0] = 0.0
    out = torch.full(graph.outputs[0].dim, float("nan"))
    given = {"x": x, "y": y, "out": out, **({"w": torch.eye(7)} if behind else {})}
    graph.execute(given)
    exact, same = (IN_TORCH[name](x.to(kind), y.to(kind)).relu() for kind in (torch.float64, None))
    assert compare(out, exact, same, factor=3.0)


@pytest.mark.parametrize("exponent", [0, 0.5, -0.5, 1, 3, -2, 16.0])
def test_powers_by_numbers_are_part_of_a_kernel(exponent):
    graph = with_torch(lambda g, x, y: g.mul(g.pow(x, exponent), y), behind=False)
    graph.build([cudnn.heur_mode.A])
    assert len(launches(graph.selected)) == 1
    x, y = (torch.rand(3, 5, 7) + 0.5 for _ in "xy")
    x[0, 0, :2] = torch.tensor([INFINITY, 2.0])
    out = torch.empty(3, 5, 7)
    graph.execute({"x": x, "y": y, "out": out})
    exact, same = (x.to(kind).pow(exponent) * y.to(kind) for kind in (torch.float64, None))
    assert compare(out, exact, same, factor=3.0)


@pytest.mark.parametrize("tables", [1, 2])
def test_pages_are_for_a_kernel_where_keys_and_values_have_one_table(tables):
    graph = hopper()
    q, k, v = graph.tensor((4, 8, 1, 64)), *(graph.tensor((64, 2, 16, 64)) for _ in range(2))
    table = [graph.tensor((4, 1, 8, 1), data_type="int32") for _ in range(tables)]
    lengths = [graph.tensor((4, 1, 1, 1), data_type="int32") for _ in range(2)]
    graph.sdpa(
        q, k, v, use_padding_mask=True, seq_len_q=lengths[0], seq_len_kv=lengths[1],
        paged_attention_k_table=table[0], paged_attention_v_table=table[-1],
    )[0].set_output(True)  # fmt: skip
    plan = planned(graph)
    (title,) = launches(plan)
    assert title.startswith("sm90_sdpa_decode") if tables == 1 else title == "torch: sdpa"
    assert ("tables of pages that are not the same tensor" in str(plan)) == (tables == 2)


def test_a_mask_of_ones_own_is_for_attention_that_is_written_out():
    graph = hopper()
    q, k, v = (graph.tensor((2, 4, 256, 64)) for _ in range(3))
    mask = graph.tensor((2, 4, 256, 256))
    with pytest.raises(cudnn.GraphError, match="mul of the softmax and the mask, in front of the"):
        graph.sdpa(q, k, v, dropout=(mask, 2.0))
    scores = graph.matmul(q, graph.transpose(k, [0, 1, 3, 2]))
    e = graph.exp(graph.sub(scores, graph.reduction(scores, "MAX", axis=-1)))
    p = graph.div(e, graph.reduction(e, "ADD", axis=-1))
    graph.matmul(graph.mul(p, mask), v).set_output(True)
    assert [title.split("_bf16")[0] for title in launches(planned(graph))] == ["sm90_gemm"] * 2


def test_the_powers_that_are_planned_are_those_of_epilogues_that_are_as_exact_as_torchs():
    from kernel_api.errors import EpilogueError
    from kernel_api.graph._operations.pointwise import POINTWISE, POWERS

    def traced(exponent):
        def fn(accum):
            return POINTWISE["pow"].epilogue(accum, exponent)

        x = torch.empty(2, 3)
        ka.ElementwiseArguments(x, torch.empty(2, 3), epilogue=ka.EpilogueArguments(fn))

    for exponent in POWERS:
        traced(exponent)
    assert not {1.5, 0.25}.intersection(POWERS)
    for exponent in (17.0, -17.0):
        assert exponent not in POWERS
        with pytest.raises(EpilogueError, match="the exponent is"):
            traced(exponent)


def test_what_planning_rewrote_may_be_left_to_torch_with_results_that_nobody_needs():
    g = cudnn.pygraph("", FLOAT, FLOAT, FLOAT, handle=cudnn.create_handle("cpu"))
    x, scale = g.tensor((2, 3, 5, 7), name="x"), g.tensor((1, 3, 1, 1), name="scale")
    y, _, _ = g.layernorm(
        x, scale, None, 1e-3, True, norm_forward_phase=cudnn.norm_forward_phase.TRAINING
    )
    y.set_output(True).set_name("y")
    g.build([cudnn.heur_mode.A])
    assert g.selected.steps[-1].kind == "torch" and len(g.selected.steps) == 2
    given, gamma, found = torch.randn(2, 3, 5, 7), torch.randn(1, 3, 1, 1), torch.empty(2, 3, 5, 7)
    g.execute({"x": given, "scale": gamma, "y": found})
    results = []
    for kind in (torch.float64, torch.float32):
        z = given.to(kind) - given.to(kind).mean(1, keepdim=True)
        deviation = (z.square().mean(1, keepdim=True) + 1e-3).sqrt()
        results.append(z / deviation * (1 + gamma.to(kind)))
    assert compare(found, *results, factor=3.0)


def test_what_stands_for_a_tensor_is_not_taken_for_another_that_lies_where_it_lay():
    from kernel_api.graph._planning.steps import Prober
    from kernel_api.graph._tensor import Tensor

    prober = Prober(torch.device("cpu"))
    for extent in range(1, 50):
        kind = HALF if extent % 2 else FLOAT
        tensor = Tensor(None, dim=(extent,), stride=(1,), element=kind)
        taken = prober.take(tensor)
        assert taken.numel() == extent and taken.element_size() == (2 if extent % 2 else 4)
        del tensor

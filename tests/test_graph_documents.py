"""The code of cuDNN's documents runs with only its import renamed, and computes what torch does."""

import ast
import inspect
import math
import re
import typing
from pathlib import Path

import pytest
import torch
from support import graph_documents
from support.graph_documents import DEVICE, DOCUMENTS

import kernel_api.graph as cudnn
from kernel_api.graph._tensor import packed_strides
from kernel_api.verification import compare

pytestmark = pytest.mark.gpu_or_cpu

GUIDE = Path(__file__).parents[1] / "docs" / "graph.md"
LOW, REFERENCE = DOCUMENTS
BLOCKS = {block.name: block for block in graph_documents.blocks(REFERENCE)}


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """Random numbers that are the same every time; without a GPU nothing to wait for."""
    torch.manual_seed(3)
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)


def randn(*shape, dtype=torch.float16, scale=1.0):
    return (torch.randn(shape) * scale).to(DEVICE, dtype)


def as_is_compared(out, exact, same, factor=3.0):
    """The error-ratio rule: against float64, in units of what torch gives in the same type."""
    found = compare(out, exact, same.to(out.dtype), factor=factor)
    assert found, str(found)


def attention(q, k, v, scale, causal):
    def torch_s(kind):
        group = q.shape[1] // k.shape[1]
        wide = (
            t.to(kind) for t in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
        )
        return torch.nn.functional.scaled_dot_product_attention(
            *wide, is_causal=causal, scale=scale
        )

    return torch_s(torch.float64), torch_s(q.dtype)


def run(name, more="", **names):
    """The names after a block of the reference, with lines behind it."""
    space = {"cudnn": cudnn, "math": math, "torch": torch, **names}
    exec(compile(BLOCKS[name].runnable() + more, name, "exec"), space)
    return space


# The copies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_copy_is_the_code_of_the_document(document):
    copied = graph_documents.copied_blocks(document)
    assert copied == graph_documents.blocks(document)
    assert len(copied) == {LOW: 10, REFERENCE: 27}[document]


def test_the_copies_hold_the_code_of_every_fence_and_no_text():
    text = graph_documents.as_copy(REFERENCE)
    assert text.count("```python") == len(BLOCKS)
    assert "General matrix multiplication for linear layers." not in text


def test_nothing_but_the_import_and_the_device_is_changed():
    block = graph_documents.blocks(LOW)[0]
    assert (block.code, block.runnable()) == (
        "import cudnn\nimport torch",
        "import kernel_api.graph as cudnn\nimport torch",
    )
    for name in DOCUMENTS:
        for block in graph_documents.blocks(name):
            assert len(block.runnable().splitlines()) == len(block.code.splitlines())


# The low-level document ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def low_level():
    """The names after the blocks of the document, which follow each other, and their graphs."""
    names, seen = {}, {}
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(torch.cuda, "synchronize", lambda *args: None)
        torch.manual_seed(3)
        for block in graph_documents.blocks(LOW):
            try:
                exec(compile(block.runnable(), block.name, "exec"), names)
            except AssertionError:
                if "o_ref" not in names:
                    raise
                # The tolerance of attention is less than the distance of neighbouring bfloat16s
                # above 1.3: where both results are as good, they may differ by more.
                q, k, v = (names[f"{key}_gpu"] for key in "qkv")
                exact, _ = attention(q, k, v, names["attn_scale"], True)
                as_is_compared(names["o_gpu"], exact, names["o_ref"], 2.0)
            seen[block.name] = dict(names)
    return seen


@pytest.mark.parametrize("name", [b.name for b in graph_documents.copied_blocks(LOW)])
def test_the_low_level_document_runs_with_its_own_assertions(low_level, name):
    assert name in low_level


def test_its_product_with_a_bias_is_one_kernel(low_level):
    graph = low_level["Plain Syntax | 4"]["graph"]
    assert [step.kind for step in graph.selected.steps] == ["kernel"]
    assert [node.name for node in graph.selected.steps[0].nodes] == ["mm", "bias"]


def test_its_products_are_as_exact_as_those_of_torch(low_level):
    names = low_level["Building the graph | 1"]
    a, b, d = (names[key] for key in ("a_gpu", "b_gpu", "d_gpu"))
    as_is_compared(names["c_gpu"], a.double() @ b.double() + d.double(), names["c_ref"])


def test_its_cached_graph_comes_back_without_being_built_again(low_level):
    first, again = (low_level[f"Using decorators | {i}"] for i in (1, 2))
    assert again["g"] is first["g"]
    assert again["uids"] == first["uids"]
    assert first["create_matmul_bias_graph"].__wrapped__.cache_info().hits == 1


def test_its_attention_is_planned_alike_after_deserialisation(low_level):
    names = low_level["Serialization and Deserialization | 3"]
    graph, again = names["graph"], names["deserialized_graph"]
    assert again.get_plan_name() == graph.get_plan_name()
    # The kernel's statistics are float32; as bfloat16, which the document asks for, they are
    # written by a second one.
    assert [step.kind for step in graph.selected.steps] == ["kernel", "kernel"]
    assert "sdpa" in graph.selected.steps[0].title
    q, k, s_q = names["q_gpu"].double(), names["k_gpu"].double(), names["s_q"]
    scores = (q @ k.mT * names["attn_scale"]).masked_fill(
        torch.ones(s_q, s_q, dtype=torch.bool, device=q.device).triu(1), -math.inf
    )
    exact = scores.logsumexp(-1, keepdim=True)
    as_is_compared(names["stats_gpu"], exact, exact.bfloat16())


# The reference: what runs ---------------------------------------------------------------------


def test_basic_usage_is_a_convolution():
    x, w = randn(3, 17, 13, 11), randn(5, 17, 3, 3, scale=0.1)
    names = run("cudnn.Graph | 2", x=x, w=w, handle=cudnn.create_handle())
    exact = torch.nn.functional.conv2d(x.double(), w.double(), padding=1)
    as_is_compared(names["result"], exact, torch.nn.functional.conv2d(x, w, padding=1))


@pytest.mark.parametrize(
    ("name", "keys", "heads"),
    [
        ("cudnn.Graph | 3", ("Q", "K", "V"), (3, 3)),
        ("graph.sdpa | 2", ("queries", "keys", "values"), (3, 3)),
        ("graph.sdpa | 3", ("queries", "keys", "values"), (8, 2)),
    ],
)
def test_attention_for_inference(name, keys, heads):
    # (B, S, H, D) in memory, as projections leave it.
    tensors = [randn(2, 65, n, 64).transpose(1, 2) for n in (heads[0], heads[1], heads[1])]
    more = "\n    output.set_output(True)" if name == "graph.sdpa | 3" else ""
    given = dict(zip(keys, tensors, strict=True))
    names = run(name, more, head_dim=64, scale=0.125, **given)
    out = names["graph"](*tensors)
    assert out.stride() == tensors[0].stride()
    as_is_compared(out, *attention(*tensors, 0.125, True))


def test_grouped_queries_without_an_output_are_validated_and_not_planned():
    q, k = randn(2, 32, 33, 64), randn(2, 8, 33, 64)
    names = run("graph.sdpa | 3", queries=q, keys=k, values=k, scale=0.125)
    assert names["output"].get_dim() == [2, 32, 33, 64]
    assert names["graph"].get_execution_plan_count() == 0
    with pytest.raises(cudnn.GraphStateError, match=r"set_output\(True\)"):
        names["graph"](q, k)


def test_types_that_the_reference_recommends():
    names = run("cudnn.data_type | 1")
    assert names["io_data_type"] is cudnn.data_type.FP8_E4M3
    assert names["compute_data_type"] is cudnn.data_type.FLOAT


def test_modes_and_types_of_its_tables_are_there():
    for mode in ("A", "B", "FALLBACK", "CUDNN_FIND"):
        assert cudnn.heur_mode[mode].name == mode
    for kind in ("FLOAT", "HALF", "BFLOAT16", "FP8_E4M3", "FP8_E5M2", "INT8"):
        assert cudnn.data_type[kind].name == kind


def test_a_feed_forward_network_on_positional_operands():
    x, w1, w2 = randn(3, 37, 24), randn(24, 96, scale=0.2), randn(96, 24, scale=0.2)
    names = run("graph.matmul | 2", x=x, W1=w1, W2=w2)

    def torch_s(kind):
        hidden = torch.nn.functional.gelu(x.to(kind) @ w1.to(kind))
        return hidden @ w2.to(kind)

    as_is_compared(names["graph"](x, w1, w2), torch_s(torch.float64), torch_s(x.dtype))


def test_the_pattern_of_a_transformer_with_norms_in_front():
    x, attn, ffn = (randn(2, 33, 48) for _ in range(3))
    gamma, gamma2 = randn(48, dtype=torch.float32), randn(48, dtype=torch.float32)
    given = {"x": x, "attn_output": attn, "ffn_output": ffn, "gamma": gamma, "gamma2": gamma2}
    names = run("graph.rmsnorm | 2", **given)
    assert [node.op for node in names["graph"].nodes] == ["rmsnorm", "add", "rmsnorm", "add"]

    outputs = "\n    x.set_output(True).set_name('x')\n    x_norm.set_output(True).set_name('norm')"
    names = run("graph.rmsnorm | 2", outputs, **given)
    # The norm of the first line is not wanted by anyone, so what it would read is in no output.
    found = names["graph"]({x: x, gamma: gamma, attn: attn, gamma2: gamma2, ffn: ffn})

    def torch_s(kind):
        middle = (x.to(kind) + attn.to(kind)).to(kind)
        norm = torch.nn.functional.rms_norm(middle, (48,), gamma2.to(kind), 1e-5)
        return middle + ffn.to(kind), norm

    for name, exact, same in zip(
        ("x", "norm"), torch_s(torch.float64), torch_s(x.dtype), strict=True
    ):
        as_is_compared(found[name], exact, same)


def test_elementwise_operations():
    x, x1, x2, b, s = randn(5, 21), randn(5, 21), randn(5, 21), randn(1, 21), randn(1, 21)
    names = {"x": x, "x1": x1, "x2": x2, "b": b, "s": s}
    with cudnn.Graph() as graph:
        names["graph"] = graph
        for i, line in enumerate(ast.parse(BLOCKS["Element-wise Operations | 1"].code).body):
            exec(compile(ast.unparse(line), "line", "exec"), names)
            names["y"].set_output(True).set_name(f"y{i}")
    found = graph({x: x, x1: x1, x2: x2, b: b, s: s})
    for i, expected in enumerate((x1 + x2, x1 * x2, x + b, x * s)):
        assert torch.equal(found[f"y{i}"], expected)


def test_convolutions_and_their_gradients():
    x, w = randn(2, 6, 9, 7, dtype=torch.float32), randn(5, 6, 3, 3, dtype=torch.float32)
    dy = randn(2, 5, 9, 7, dtype=torch.float32)
    with cudnn.Graph() as graph:
        names = run("Convolution Operations | 1", graph=graph, x=x, w=w, dy=dy)
        for key in ("y", "dx", "dw"):
            names[key].set_output(True).set_name(key)
    found = graph({x: x, w: w, dy: dy})

    def torch_s(kind):
        image, weight = (t.to(kind).requires_grad_() for t in (x, w))
        y = torch.nn.functional.conv2d(image, weight, padding=1)
        y.backward(dy.to(kind))
        return y.detach(), image.grad, weight.grad

    results = zip(("y", "dx", "dw"), torch_s(torch.float64), torch_s(torch.float32), strict=True)
    for key, exact, same in results:
        as_is_compared(found[key], exact, same)


def test_methods_of_tensors():
    with cudnn.Graph(io_data_type="float16") as graph:
        y = graph.add(randn(2, 3, 5, 4).transpose(1, 2), 0.75)
        shape = {"batch": 2, "seq_len": 3, "num_heads": 5, "head_dim": 4}
        for name in (
            "set_output | 1",
            "set_name | 1",
            "set_data_type | 1",
            "set_dim / set_stride | 1",
        ):
            run(name, y=y, **shape)
    assert not y.get_is_virtual()
    assert y.get_name() == "attention_output"
    assert y.get_data_type() is cudnn.data_type.FLOAT
    assert (y.get_dim(), y.get_stride()) == ([2, 5, 3, 4], [60, 4, 20, 1])


def test_handles():
    x, w = randn(9, 17), randn(17, 8)
    with cudnn.Graph() as graph:
        graph.matmul(x, w).set_output(True)
    names = run("Handle Management | 1", graph=graph, x=x, w=w)
    as_is_compared(names["result"], x.double() @ w.double(), x @ w)
    with pytest.raises(cudnn.GraphError, match="destroyed"):
        graph(x, w, handle=names["handle"])


@pytest.mark.parametrize("name", ["Positional Arguments | 1", "Dictionary Interface | 1"])
def test_calls_by_position_and_by_name(name):
    templates = {
        key: torch.empty(2, 3, 33, 64, dtype=torch.float16, device=DEVICE) for key in "QKV"
    }
    q, k, v = (randn(2, 3, 33, 64) for _ in range(3))
    data = {"Q_data": q, "K_data": k, "V_data": v}
    names = run(name, handle=cudnn.create_handle(), **templates, **data)
    out = names["result"] if "result" in names else names["output"]
    # Without attn_scale it is 1.
    as_is_compared(out, *attention(q, k, v, 1.0, False))


def test_utilities():
    x, w = randn(9, 17), randn(17, 8)
    with cudnn.Graph() as graph:
        graph.matmul(x, w).set_output(True)
    names = run("Utility Functions | 1", graph=graph)
    assert names["version"] == cudnn.backend_version()
    assert names["workspace_size"] == graph.get_workspace_size()
    assert isinstance(names["graph"], cudnn.Graph)
    assert names["graph"] is not graph
    assert torch.equal(names["graph"](x, w), graph(x, w))


def test_the_layer_of_a_language_model():
    names = run("Complete LLM Layer Example | 1")
    graph = names["create_llm_attention_layer"](2, 17, 3, 16, cudnn.create_handle())
    assert [node.op for node in graph.nodes] == ["rmsnorm"]
    assert graph.nodes[0].outputs["Y"].get_dim() == [2, 17, 48]
    assert graph.nodes[0].outputs["Y"].get_data_type() is cudnn.data_type.FLOAT


# The reference: signatures --------------------------------------------------------------------

SIGNATURES = [name for name, block in BLOCKS.items() if block.code.startswith(("def ", "class "))]


def documented(name):
    """The function or class that a block declares."""
    space = {**vars(typing), "cudnn": cudnn, "Tensor": cudnn.Tensor, "data_type": cudnn.data_type}
    before = set(space)
    exec(compile(BLOCKS[name].runnable(), name, "exec"), space)
    (made,) = set(space) - before - {"__builtins__"}
    return space[made]


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_there_are_eight_signatures():
    assert len(SIGNATURES) == 9


@pytest.mark.parametrize("name", [name for name in SIGNATURES if name != "cudnn.Graph | 1"])
def test_operations_have_the_documented_parameters_in_the_documented_order(name):
    function = documented(name)
    own = getattr(cudnn.pygraph, function.__name__)
    wanted = parameters(function)
    found = [key for key in parameters(own) if key in wanted]
    assert found == wanted
    needed = [
        key
        for key, one in inspect.signature(own).parameters.items()
        if one.default is inspect.Parameter.empty
    ]
    assert set(needed) <= set(wanted)
    positional = wanted[: wanted.index("name")] if "name" in wanted else wanted
    # Those in front of the name can be given by position.
    assert parameters(own)[: len(positional)] == positional
    wrapped = getattr(cudnn.Graph(), function.__name__)
    assert [*parameters(wrapped)] == parameters(own)[1:]


def test_the_wrapper_has_the_documented_parameters():
    wanted = parameters(documented("cudnn.Graph | 1").__init__)
    assert parameters(cudnn.Graph.__init__)[: len(wanted)] == wanted


# This library's own guide ---------------------------------------------------------------------


def test_the_code_of_the_guide_runs(capsys):
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 7
    printed = capsys.readouterr().out
    assert "plan A: " in printed
    assert "plan FALLBACK: " in printed
    x, gamma, up, down = (names[key] for key in ("x", "gamma", "w_up", "w_down"))

    def torch_s(kind):
        norm = torch.nn.functional.rms_norm(x.to(kind), (128,), gamma.to(kind), 1e-5)
        gate, linear = (norm @ up.to(kind)).chunk(2, dim=-1)
        hidden = torch.nn.functional.silu(gate) * linear
        return hidden @ down.to(kind) + x.to(kind)

    as_is_compared(names["y"], torch_s(torch.float64), torch_s(x.dtype))
    exact, same = (a.double() @ b.double() for a, b in ((names["A"][0], names["B"]),) * 2)
    as_is_compared(names["out"], exact, same.half())


@pytest.mark.parametrize("larger", [1, 8, 32])
def test_the_block_of_the_guide_is_three_kernels_on_hopper(larger):
    names = {}
    exec(re.search(r"```python\n(.*?)with cudnn.Graph", GUIDE.read_text(), re.DOTALL)[1], names)
    graph = cudnn.pygraph("", "bfloat16", "bfloat16", "float32", sm_version=90)

    def like(name):
        tensor = names[name]
        dim = [larger * extent for extent in tensor.shape]
        order = sorted(range(len(dim)), key=lambda mode: -tensor.stride(mode))
        return graph.tensor(dim, packed_strides(dim, order), tensor.dtype, name=name)

    x, gamma, w_up, w_down = map(like, ("x", "gamma", "w_up", "w_down"))
    norm, _ = graph.rmsnorm(x, gamma, epsilon=1e-5)
    gate, linear = graph.glu_pair(graph.matmul(norm, w_up))
    hidden = graph.mul(graph.silu(gate), linear)
    graph.add(graph.matmul(hidden, w_down), x).set_output(True)
    graph.validate()
    graph.create_execution_plans([cudnn.heur_mode.A])
    kernels = [step.title.split("_bf16")[0] for step in graph.plans[0].steps]
    assert kernels == ["sm80_rmsnorm", "sm90_gemm", "sm90_gemm"]


def test_the_guide_names_what_there_is():
    text = GUIDE.read_text()
    for mode in ("A", "B", "CUDNN_FIND", "FALLBACK"):
        assert f"| `{mode}` |" in text
        assert mode in cudnn.heur_mode.__members__
    for name in ("deselect_engines", "select_plan", "autotune", "explain", "to_svg", "key"):
        assert f"`{name}" in text or f".{name}(" in text
        assert hasattr(cudnn.pygraph, name)

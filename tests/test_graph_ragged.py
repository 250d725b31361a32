"""Ragged attention: sequences that begin where offsets on the device say, on fused kernels."""

import functools
import math

import pytest
import torch
from support.graph_operations import close, random

import kernel_api.graph as cudnn
from kernel_api.errors import GraphError
from kernel_api.graph._operations._ragged import even, ragged
from kernel_api.graph._tensor import Tensor
from kernel_api.verification import compare

A, FALLBACK = cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK
FLOAT, INT32 = cudnn.data_type.FLOAT, cudnn.data_type.INT32
B, H, H_KV, S, D = 3, 4, 2, 9, 8
LENGTHS = {"seq_len_q": (9, 0, 4), "seq_len_kv": (5, 3, 8)}

#: Elements in front of each sequence: none, and so many that no row begins at a multiple of one.
GAPS = {"packed": (0, 0, 0), "with gaps": (12, 5, 20)}


class Ragged:
    """A tensor of a graph with offsets, and what it is executed on.

    Args:
        heads, width: Of a token.
        row: Elements from one token to the next; more where others lie between.
    """

    def __init__(self, graph, name, heads, width, lengths, gaps, row=None):
        row = heads * width if row is None else row
        self.name, self.dim, self.lengths = name, (B, heads, S, width), lengths
        self.stride = (S * row, width, row, 1)
        self.starts, end = [], 0
        for length, gap in zip(lengths, gaps, strict=True):
            self.starts.append(end + gap)
            end += gap + length * row
        self.offset = graph.tensor((B + 1, 1, 1, 1), data_type=INT32, name=f"{name}_offset")
        self.pack = {self.offset.name: torch.tensor([*self.starts, end]).int().view(-1, 1, 1, 1)}
        values = random(*self.dim, seed=sum(map(ord, name)))
        self.own = [one[:, :length] for one, length in zip(values, lengths, strict=True)]
        self.lie_in(torch.full((B * S * row,), math.nan), 0)

    def lie_in(self, memory, start):
        """Lie in a memory, so many elements behind its start."""
        self.pack[self.name] = memory.as_strided(self.dim, self.stride, start)

    def describe(self, tensor):
        """Let a tensor of the graph be this one."""
        tensor.set_name(self.name).set_dim(self.dim).set_stride(self.stride).set_data_type(FLOAT)
        return tensor.set_ragged_offset(self.offset)

    def given(self, graph):
        """An input that holds ``own``."""
        for place, own in zip(self.sequences(), self.own, strict=True):
            place.copy_(own)
        return self.describe(graph.tensor(self.dim))

    def sequences(self):
        """What lies in memory."""
        whole, (_, heads, _, width) = self.pack[self.name], self.dim
        first = whole.storage_offset()
        return [
            whole.as_strided((heads, length, width), self.stride[1:], first + start)
            for length, start in zip(self.lengths, self.starts, strict=True)
        ]


def new_graph(**options):
    return cudnn.pygraph("", FLOAT, FLOAT, FLOAT, **options)


def attention(graph, gaps=(0, 0, 0)):
    """Forward and backward with a causal mask, all of it ragged; the tensors by name."""
    lengths = {n: graph.tensor((B, 1, 1, 1), data_type=INT32, name=n) for n in LENGTHS}
    queries, keys = LENGTHS.values()
    made = {
        name: Ragged(graph, name, heads, width, of, gaps)
        for name, heads, width, of in (
            ("q", H, D, queries), ("k", H_KV, D, keys), ("v", H_KV, D, keys), ("dO", H, D, queries),
            ("O", H, D, queries), ("Stats", H, 1, queries), ("dQ", H, D, queries),
            ("dK", H_KV, D, keys), ("dV", H_KV, D, keys),
        )
    }  # fmt: skip
    q, k, v, dO = (made[name].given(graph) for name in ("q", "k", "v", "dO"))
    options = {"use_padding_mask": True, "use_causal_mask_bottom_right": True, **lengths}
    o, stats = graph.sdpa(q, k, v, 0.25, generate_stats=True, name="attn", **options)
    made["O"].describe(o).set_output(True)
    made["Stats"].describe(stats).set_output(True)
    gradients = graph.sdpa_backward(q, k, v, o, dO, stats, 0.25, name="back", **options)
    for name, one in zip(("dQ", "dK", "dV"), gradients, strict=True):
        made[name].describe(one).set_output(True)
    return made


def exact(made, b):
    """What is written for one sequence, in float64."""
    q, k, v, dO = (made[name].own[b].double() for name in ("q", "k", "v", "dO"))
    leaves = [one.clone().requires_grad_() for one in (q, k, v)]
    q, k, v = leaves
    k, v = (one.repeat_interleave(H // H_KV, 0) for one in (k, v))
    hidden = torch.ones(q.shape[1], k.shape[1]).triu(1 + k.shape[1] - q.shape[1]).bool()
    scores = (0.25 * q @ k.mT).masked_fill(hidden, -math.inf)
    stats = scores.logsumexp(-1, keepdim=True)
    p = torch.where(stats == -math.inf, 0.0, (scores - stats.clamp_min(-1e30)).exp())
    out = p @ v
    gradients = torch.autograd.grad((out * dO).sum(), leaves)
    names = ("O", "Stats", "dQ", "dK", "dV")
    found = (out.detach(), stats.detach(), *(one.nan_to_num(0.0) for one in gradients))
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("mode", [A, FALLBACK], ids=["fused", "torch"])
@pytest.mark.parametrize("gaps", GAPS.values(), ids=GAPS)
def test_sequences_are_found_where_offsets_say(mode, gaps):
    graph = new_graph(handle=cudnn.create_handle("cpu"))
    made = attention(graph, gaps)
    graph.build([mode])
    kinds = [step.kind for step in graph.selected.steps]
    assert kinds.count("kernel") == (2 if mode is A else 0)
    pack = {name: torch.tensor(n).int().view(B, 1, 1, 1) for name, n in LENGTHS.items()}
    graph.execute(pack | {key: one for tensor in made.values() for key, one in tensor.pack.items()})
    for b in range(B):
        for name, expected in exact(made, b).items():
            close(made[name].sequences()[b].contiguous(), expected)
    assert not any(made[name].pack[name].isnan().any() for name in ("O", "dQ", "dK", "dV"))


def test_tokens_of_queries_keys_and_values_side_by_side():
    graph = new_graph(handle=cudnn.create_handle("cpu"))
    lengths = LENGTHS["seq_len_kv"]
    memory, made = torch.full((3 * B * S * H * D,), math.nan), {}
    for place, name in enumerate("qkv"):
        made[name] = Ragged(graph, name, H, D, lengths, (7, 0, 2), row=3 * H * D)
        made[name].lie_in(memory, place * H * D)
    length = graph.tensor((B, 1, 1, 1), data_type=INT32, name="length")
    given = [made[name].given(graph) for name in "qkv"]
    o, _ = graph.sdpa(*given, 0.25, use_padding_mask=True, seq_len_q=length, seq_len_kv=length)
    out = Ragged(graph, "O", H, D, lengths, (0, 0, 0))
    out.describe(o).set_output(True)
    graph.build([A])
    pack = {"length": torch.tensor(lengths).int().view(B, 1, 1, 1)}
    graph.execute(pack | {k: one for t in (*made.values(), out) for k, one in t.pack.items()})
    for b in range(B):
        q, k, v = (made[name].own[b].double() for name in "qkv")
        close(out.sequences()[b].contiguous(), (0.25 * q @ k.mT).softmax(-1) @ v)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.bfloat16, torch.float64], ids=str)
def test_rows_are_moved_as_they_are(kind):
    tensor = Tensor(None, dim=(2, 3, 4, 8), stride=(120, 8, 30, 1))
    values = random(2, 3, 4, 8).to(kind)
    offsets, lengths = torch.tensor([5, 101, 300]), torch.tensor([3, 4]).view(2, 1, 1, 1)
    there = ragged(tensor, values, offsets, lengths)
    back = even(tensor, there, offsets, lengths).double()
    assert there.dtype is kind and there.stride() == tensor.stride
    assert torch.equal(back[0, :, :3], values[0, :, :3].double())
    assert torch.equal(back[1], values[1].double())
    assert not back[0, :, 3:].any()


def test_the_host_reads_neither_offsets_nor_lengths():
    """Of tensors without data it could not."""
    tensor = Tensor(None, dim=(B, H, S, D), stride=(S * H * D, D, H * D, 1))
    on_gpu = {"device": "meta", "dtype": torch.int32}
    offsets, lengths = torch.empty(B + 1, **on_gpu), torch.empty(B, **on_gpu)
    values = torch.empty_strided(tensor.dim, tensor.stride, device="meta")
    for move in (even, ragged):
        assert move(tensor, values, offsets, lengths).shape == tensor.dim


def test_nothing_is_moved_where_there_is_nothing():
    tensor = Tensor(None, dim=(B, H, 0, D), stride=(H * D, D, H * D, 1))
    offsets, lengths = torch.zeros(B + 1), torch.zeros(B)
    for move in (even, ragged):
        assert move(tensor, torch.empty(tensor.dim), offsets, lengths).shape == tensor.dim


def offsets_of(lengths, gap, device):
    """Of tokens of H · 64 elements, as many elements apart."""
    starts = torch.tensor([0, *lengths]).cumsum(0) * H * 64 + gap * torch.arange(B + 1)
    return starts.int().view(-1, 1, 1, 1).to(device)


def check_packed(pack, lengths):
    for b, length in enumerate(lengths):
        start = int(pack["starts"].view(-1)[b])
        q, k, v, found = (
            pack[name].as_strided((H, length, 64), (64, H * 64, 1), start) for name in "qkvo"
        )
        exact, same = (
            torch.nn.functional.scaled_dot_product_attention(
                *(one.to(kind) for one in (q, k, v)), is_causal=True
            )
            for kind in (torch.float64, torch.bfloat16)
        )
        verdict = compare(found.contiguous(), exact, same, factor=3.0)
        assert verdict, verdict.reason


@pytest.mark.parametrize(
    ("device", "rows"), [("cpu", 40), pytest.param("cuda", 1000, marks=pytest.mark.gpu)]
)
def test_lengths_and_offsets_may_change_between_executions(device, rows):
    """Also where a graph of CUDA is replayed."""
    graph = cudnn.pygraph("", "bfloat16", FLOAT, FLOAT, handle=cudnn.create_handle(device))
    dim, stride = (B, H, rows, 64), (rows * H * 64, 64, H * 64, 1)
    q, k, v = (graph.tensor(dim, stride, name=name) for name in "qkv")
    starts = graph.tensor((B + 1, 1, 1, 1), data_type=INT32, name="starts")
    length = graph.tensor((B, 1, 1, 1), data_type=INT32, name="length")
    for one in (q, k, v):
        one.set_ragged_offset(starts)
    options = {"use_padding_mask": True, "seq_len_q": length, "seq_len_kv": length}
    out, _ = graph.sdpa(q, k, v, 0.125, use_causal_mask=True, **options)
    out.set_output(True).set_name("o").set_ragged_offset(starts).set_stride(stride)
    graph.build([A])
    generator = torch.Generator().manual_seed(5)
    pack = {name: torch.randn(B, rows, H, 64, generator=generator) for name in "qkvo"}
    pack = {name: one.bfloat16().to(device).transpose(1, 2) for name, one in pack.items()}
    cases = [((rows, 7, rows // 3), 0), ((3, rows // 2, rows // 2), 136), ((0, 1, rows - 1), 8)]
    pack["starts"] = offsets_of(*cases[0], device)
    pack["length"] = torch.tensor(cases[0][0]).int().view(B, 1, 1, 1).to(device)
    graph.execute(pack)
    run = functools.partial(graph.execute, pack)
    if device == "cuda":
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            graph.execute(pack)
        run = captured.replay
    for lengths, gap in cases:
        pack["starts"].copy_(offsets_of(lengths, gap, device))
        pack["length"].copy_(torch.tensor(lengths).view(B, 1, 1, 1))
        pack["o"].fill_(math.nan)
        run()
        check_packed(pack, lengths)


def test_ragged_attention_is_planned_onto_fused_kernels():
    types = {"io_data_type": "bfloat16", "compute_data_type": FLOAT}
    graph = cudnn.pygraph(sm_version=90, **types)
    for name in ("forward", "backward"):
        q, k, v, dO = (graph.tensor((4, h, 512, 64)) for h in (8, 2, 2, 8))
        starts = [graph.tensor((5, 1, 1, 1), data_type="int64") for _ in range(2)]
        for one, start in ((q, 0), (k, 1), (v, 1), (dO, 0)):
            one.set_ragged_offset(starts[start])
        lengths = [graph.tensor((4, 1, 1, 1), data_type=INT32) for _ in range(2)]
        padding = dict(zip(("seq_len_q", "seq_len_kv"), lengths, strict=True))
        o, stats = graph.sdpa(q, k, v, 0.1, generate_stats=True, use_padding_mask=True, **padding)
        stats.set_output(True).set_data_type(FLOAT)
        o.set_output(True).set_ragged_offset(starts[0])
        if name == "backward":
            for one in graph.sdpa_backward(q, k, v, o, dO, stats, 0.1, **padding):
                one.set_output(True)
    graph.validate()
    graph.create_execution_plans([A])
    (plan, *_) = graph.plans
    kernels = [s.title.split("_bf16")[0] for s in plan.steps if s.kind == "kernel"]
    assert sorted(kernels) == ["sm90_sdpa_backward", "sm90_sdpa_forward", "sm90_sdpa_forward"]
    moved = {step.title for step in plan.steps if step.kind != "kernel"}
    assert moved == {"torch: unpack", "torch: pack"}


def test_a_plan_of_ragged_attention_comes_back():
    graph = new_graph(handle=cudnn.create_handle("cpu"))
    made = attention(graph)
    graph.build([A])
    again = cudnn.pygraph(handle=graph.handle).deserialize(graph.serialize())
    assert again.get_plan_name() == graph.get_plan_name()
    assert made["O"].offset.name in {tensor.name for tensor in again.inputs}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda g, o: o.set_dim((B, 1, 1, 1)).set_stride((1, 1, 1, 1)), r"\(B \+ 1, 1, 1, 1\)"),
        (lambda g, o: o.set_data_type(FLOAT), r"offsets FLOAT \[4, 1, 1, 1\]; expected INT32"),
        (lambda g, o: g.nodes[0].inputs["bias"].set_ragged_offset(o), "ragged bias; expected q,"),
        (lambda g, o: g.nodes[0].inputs.pop("seq_len_q"), "ragged q and no padding mask with seq_"),
    ],
)  # fmt: skip
def test_ragged_batches_that_cannot_be(change, words):
    graph = new_graph()
    q, k, v = (graph.tensor((B, H, S, D)) for _ in range(3))
    offset = graph.tensor((B + 1, 1, 1, 1), data_type=INT32)
    q.set_ragged_offset(offset)
    lengths = {n: graph.tensor((B, 1, 1, 1), data_type=INT32) for n in LENGTHS}
    bias = graph.tensor((1, H, S, S))
    graph.sdpa(q, k, v, bias=bias, use_padding_mask=True, **lengths)[0].set_output(True)
    change(graph, offset)
    with pytest.raises(GraphError, match=words):
        graph.validate()


@pytest.mark.parametrize("far", [5000, -96])
def test_rows_outside_of_the_tensor_are_neither_read_nor_written(far):
    tensor = Tensor(None, dim=(2, 3, 4, 8), stride=(96, 8, 24, 1))
    memory = random(2, 4, 3, 8)
    values, lengths = memory.transpose(1, 2), torch.tensor([4, 4]).view(2, 1, 1, 1)
    offsets = torch.tensor([far, 96, 192])
    found = even(tensor, values, offsets, lengths)
    assert torch.equal(found[1], values[1]) and not found[0].any()
    written = ragged(tensor, values, offsets, lengths)
    assert torch.equal(written[1], values[1]) and not written[0].any()

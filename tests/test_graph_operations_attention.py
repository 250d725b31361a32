"""Attention of graphs: values and gradients without a kernel."""

import json
import math

import pytest
import torch
from support.graph_attention import (
    BIAS,
    CASES,
    D_V,
    H_KV,
    LENS,
    LENS_KV,
    LENS_Q,
    S_KV,
    S_Q,
    SCALE,
    SINK,
    B,
    D,
    H,
    attention,
    band,
    exact_of,
    padded,
    tensors,
)
from support.graph_operations import Nodes, close, random
from support.sdpa import kept

from kernel_api.errors import GraphError, GraphNotSupportedError
from kernel_api.graph._enums import (
    data_type,
)
from kernel_api.graph._operations import attention_arguments


@pytest.mark.parametrize("case", CASES)
def test_attention_in_every_option(case):
    options, told = CASES[case]
    q, k, v = tensors()
    g = Nodes()
    how = {"attn_scale": SCALE, "generate_stats": True, **options(g)}
    o, stats = g.sdpa(*map(g.given, (q, k, v)), **how)
    found, lse = g.compute(o, stats)
    exact = attention(q.double(), k.double(), v.double(), **exact_of(told))
    same = attention(q, k, v, **exact_of(told, torch.float32))
    close(found, exact[0], same[0])
    finite = exact[1].isfinite()
    assert torch.equal(finite, lse.isfinite())
    close(lse[finite].view(1, -1), exact[1][finite].view(1, -1), same[1][finite].view(1, -1))
    assert o.dim == (B, H, S_Q, D_V) and stats.dim == (B, H, S_Q, 1)
    # Packed, in the memory order of q: (B, S, H, D).
    assert o.stride == (S_Q * H * D_V, D_V, H * D_V, 1)
    assert stats.data_type is data_type.FLOAT
    (node,) = g.nodes
    json.dumps(node.attributes)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_autograd(case):
    options, told = CASES[case]
    leaves = [one.double().requires_grad_() for one in tensors()]
    beside = {n: told[n].double().requires_grad_() for n in ("bias", "sink") if n in told}
    out, lse, *_ = attention(*leaves, **exact_of(told, leaves=beside))
    dO = random(*out.shape, seed=11).double()
    if "lens_q" in told:
        dead = torch.arange(S_Q).view(-1, 1) >= LENS_Q.view(-1, 1, 1, 1)
        dO = dO.masked_fill(dead, 0.0)
    exact = torch.autograd.grad(out, [*leaves, *beside.values()], dO)
    g = Nodes()
    how = {"attn_scale": SCALE, **options(g), "use_deterministic_algorithm": True}
    written = []
    for name, keyword in (("bias", "dBias"), ("sink", "dSink_token")):
        if name in beside:
            dim = BIAS.shape if name == "bias" else (1, H, 1, 1)
            how[keyword] = g.written(dim)
            written.append(how[keyword])
    saved = [one.detach().float() for one in (*leaves, out, dO, lse)]
    gradients = g.sdpa_backward(*map(g.given, saved), **how)
    found = g.compute(*gradients, *written)
    for value, one in zip(found, exact, strict=True):
        one = one.view(value.shape)
        floor = 128 * torch.finfo(torch.float32).eps * (1 + float(one.abs().max()))
        assert float((value.double() - one).abs().max()) < floor
    assert [g.dim for g in gradients] == [tuple(one.shape) for one in leaves]


def test_what_is_written_beside():
    q, k, v = tensors()
    g = Nodes()
    largest, total, dump = (g.written((B, H, S_Q, n)) for n in (1, 1, S_KV))
    how = {
        "dropout": 0.25, "dropout_seed": 5, "sink_token": g.given(SINK.view(1, H, 1, 1)),
        **padded(g),
    }  # fmt: skip
    o, stats = g.sdpa(
        *map(g.given, (q, k, v)),
        SCALE,
        score_max=largest,
        score_sum_exp=total,
        rng_dump=dump,
        **how,
    )
    assert stats is None
    g.run()
    keep = kept(B, H, S_Q, S_KV, 0.25, 5, 0)
    exact = attention(q.double(), k.double(), v.double(), sink=SINK.double(), keep=keep, **LENS)
    close(g.value(o), exact[0])
    for b in range(B):
        rows = slice(int(LENS_Q[b]))
        close(g.value(largest)[b, :, rows], exact[2][b, :, rows])
        close(g.value(total)[b, :, rows], exact[3][b, :, rows])
        seen = (b, slice(None), rows, slice(int(LENS_KV[b])))
        assert torch.equal(g.value(dump)[seen], (keep[seen] > 0).double())


@pytest.mark.parametrize("shared", [True, False])
def test_pages(shared):
    size, pages, blocks = 4, 4, 9
    generator = torch.Generator().manual_seed(3)
    table_k = torch.randperm(blocks, generator=generator)[: B * pages].view(B, 1, pages, 1).int()
    table_v = table_k if shared else table_k.flip(2).contiguous()
    q, _, _ = tensors()
    K, V = random(blocks, H_KV, size, D, seed=1), random(blocks, H_KV, size, D_V, seed=2)
    g = Nodes()
    tables = [g.given(table_k)] * 2 if shared else [g.given(table_k), g.given(table_v)]
    o, _ = g.sdpa(
        *map(g.given, (q, K, V)), SCALE, **padded(g), paged_attention_k_table=tables[0],
        paged_attention_v_table=tables[1], paged_attention_max_seq_len_kv=S_KV,
    )  # fmt: skip
    dense = [
        one[table.flatten(1).long()].transpose(1, 2).flatten(2, 3)[:, :, :S_KV]
        for one, table in ((K, table_k), (V, table_v))
    ]
    exact = attention(q.double(), *(one.double() for one in dense), **LENS)[0]
    close(g.compute(o), exact, attention(q, *dense, **LENS)[0])
    # Kernels read pages as they are, if there is one table.
    (node,) = g.nodes
    given = {name: g.values[id(one)] for name, one in node.inputs.items()}
    given = {
        n: one.to("meta") if isinstance(one, torch.Tensor) else one for n, one in given.items()
    }
    outputs = {"O": torch.empty(B, H, S_Q, D_V, device="meta")}
    if shared:
        arguments = attention_arguments(node, given, outputs)
        assert arguments.is_paged and arguments.S_kv == size * pages
    else:
        with pytest.raises(GraphNotSupportedError, match="not the same tensor"):
            attention_arguments(node, given, outputs)


def test_ragged_batches_are_no_arguments_of_kernels():
    """Planning brings their sequences to equal distances before."""
    g = Nodes()
    q, k, v = (g.given(one) for one in tensors())
    q.set_ragged_offset(g.unknown((B + 1, 1, 1, 1), data_type.INT32))
    g.sdpa(q, k, v, **padded(g))
    with pytest.raises(GraphNotSupportedError, match="is ragged"):
        attention_arguments(g.nodes[0], dict.fromkeys("qkv"), {})


def test_ragged_batches_need_lengths():
    g = Nodes()
    q, k, v = (g.given(one) for one in tensors())
    q.set_ragged_offset(g.unknown((B + 1, 1, 1, 1), data_type.INT32))
    g.sdpa(q, k, v)
    with pytest.raises(GraphError, match="ragged q and no padding mask"):
        g.infer()


def rounded(x, scale=1.0):
    return (x * scale).to(torch.float8_e4m3fn)


def test_attention_between_8_bit_floats():
    dq, dk, dv, ds, scale_s, scale_o = 0.7, 0.31, 1.9, 0.004, 251.0, 0.83
    q, k, v = (rounded(one) for one in tensors())
    g = Nodes()
    scales = [g.given(torch.full((1, 1, 1, 1), n)) for n in (dq, dk, dv, ds, scale_s, scale_o)]
    o, stats, amax_S, amax_O = g.sdpa_fp8(
        *map(g.given, (q, k, v)), *scales, attn_scale=SCALE, use_causal_mask=True,
        generate_stats=True,
    )  # fmt: skip
    g.infer()
    o.set_data_type(data_type.HALF)
    found = g.compute(o, stats, amax_S, amax_O)
    wide = [one.double() for one in (q, k, v)]
    s = SCALE * dq * dk * wide[0] @ wide[1].repeat_interleave(2, 1).transpose(2, 3)
    s = s.masked_fill(~band(right=0), -math.inf)
    p = torch.softmax(s, -1)
    exact = rounded(p, scale_s).double() @ wide[2].repeat_interleave(2, 1) * dv * ds
    # A probability near the middle of two 8-bit floats may be rounded either way.
    assert float((found[0].double() - exact * scale_o).norm() / exact.norm()) < 5e-3
    close(found[1], torch.logsumexp(s, -1, keepdim=True))
    assert float(found[2]) == pytest.approx(float(p.max()), rel=1e-6)
    assert float(found[3]) == pytest.approx(float(exact.abs().max()), rel=2e-2)
    assert amax_S.dim == amax_O.dim == (1, 1, 1, 1)
    results = g.sdpa_fp8(*map(g.given, (q, k, v)), *scales)
    assert results[1] is None and results[0] is not None

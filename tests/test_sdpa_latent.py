"""Attention whose values are the first columns of the keys: arguments, queries, launches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.sdpa import NAN, Draw
from support.versions import since_torch
from torch.fx.experimental.proxy_tensor import make_fx

import kernel_api as ka
from kernel_api import _description, masks
from kernel_api.errors import ArgumentError

FAMILY = "sm90.sdpa_latent"
BF16 = torch.bfloat16


def operands(device="cpu", B=2, H=4, S=37, D=576, D_v=512):
    draw = torch.empty if device == "meta" else torch.randn
    Q, K = (draw(B, h, s, D, dtype=BF16, device=device) for h, s in ((H, 1), (1, S)))
    return Q, K, torch.empty(B, H, 1, D_v, dtype=BF16, device=device)


def arguments(device="meta", **options):
    D_v = options.pop("D_v", 512)
    Q, K, out = operands(device, D_v=D_v)
    return ka.SdpaArguments(Q, K, K[..., :D_v], out, **options)


def reason(args, family=FAMILY):
    (found,) = [one for one in ka.explain(args, cc=90).rejected if one.family == family]
    return f"{found.rule}; {found.reason}; {found.nearest}"


# Arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_view_of_the_keys_is_told_from_what_lies_apart(device):
    Q, K, out = operands(device)
    assert ka.SdpaArguments(Q, K, K[..., :512], out).values_in_keys
    assert not ka.SdpaArguments(Q, K, K[..., :512].clone(), out).values_in_keys
    assert not ka.SdpaArguments(Q, K, K[..., 64:], out).values_in_keys
    longer = torch.empty(2, 1, 38, 576, dtype=BF16, device=device)
    assert not ka.SdpaArguments(Q, longer[:, :, 1:], longer[:, :, :-1, :512], out).values_in_keys


def test_steps_of_a_single_head_tell_nothing():
    cache = torch.randn(2, 37, 576)
    Q = torch.randn(2, 4, 1, 576)
    K, V = (one.unsqueeze(2).transpose(1, 2) for one in (cache, cache[..., :512]))
    assert K.stride() != V.stride()
    args = ka.SdpaArguments(Q, K, V, torch.empty(2, 4, 1, 512))
    assert args.values_in_keys
    launch = ka.get_kernels(args, providers=["reference"])[0].prepare(args)
    launch(*args.tensors)
    launch(Q, K, K[..., :512], args.out.tensor)


def test_values_are_taken_from_the_keys_where_that_is_said():
    Q, K, out = operands()
    given = torch.full((2, 1, 37, 512), NAN, dtype=BF16)
    args = ka.SdpaArguments(Q, K, given, out, values_in_keys=True)
    assert args.values_in_keys
    assert args.V.address == args.K.address
    ka.get_kernels(args, providers=["reference"])[0].run(args)
    assert bool(out.isfinite().all())
    apart = ka.SdpaArguments(Q, K, K[..., :512], out, values_in_keys=False)
    assert not apart.values_in_keys


@pytest.mark.parametrize("columns, words", [(584, "V has shape"), (0, "D_v = 0")])
def test_values_have_columns_of_keys_alone(columns, words):
    Q, K, _ = operands()
    V, out = torch.empty(2, 1, 37, columns, dtype=BF16), torch.empty(2, 4, 1, columns, dtype=BF16)
    with pytest.raises(ArgumentError, match=words):
        ka.SdpaArguments(Q, K, V, out, values_in_keys=True)


def test_what_is_neither_yes_nor_no_is_refused():
    with pytest.raises(ArgumentError, match="values_in_keys"):
        arguments(values_in_keys=1)


def test_problems_are_told_apart():
    Q, K, out = operands()
    within, apart = (ka.SdpaArguments(Q, K, V, out) for V in (K[..., :512], K[..., :512].clone()))
    assert within.key != apart.key
    assert within.signature != apart.signature
    assert "values_in_keys" in repr(within)
    assert "values_in_keys" not in repr(apart)


def test_it_is_made_again_on_other_tensors():
    args = arguments("cpu", mask=masks.Causal("bottom_right"))
    other = args.rebuilt(*(torch.zeros_like(tensor) for tensor in args.tensors))
    assert other.values_in_keys
    assert other.V.address == other.K.address
    described = _description.rebuilt(_description.described(args))
    assert described.values_in_keys
    assert described.key[0] == args.key[0]
    sketched = _description.rebuilt(_description.described(args), _description.SKETCHED)
    assert sketched.values_in_keys


# Queries ---------------------------------------------------------------------------------


def test_the_family_is_offered_for_values_in_keys():
    kernels = ka.get_kernels(arguments(), cc=90, providers=["cutedsl"])
    assert [kernel.family for kernel in kernels] == [FAMILY]


def test_each_no_has_its_reason():
    Q, K, out = operands("meta")
    apart = ka.SdpaArguments(Q, K, torch.empty_like(K[..., :512]), out)
    assert "would match with V = K[..., :512]" in reason(apart)
    table = masks.BlockSparse(torch.ones(2, 4, 1, 1, dtype=torch.bool, device="meta"), (64, 64))
    assert "no table of blocks" in reason(arguments(mask=table))
    small = ka.SdpaArguments(Q[..., :128], K[..., :128], K[..., :64], out[..., :64])
    assert "the least room" in reason(small)
    wide = torch.empty(2, 1, 37, 640, dtype=BF16, device="meta")
    queries = torch.empty(2, 4, 1, 640, dtype=BF16, device="meta")
    assert "(640, 512)" in reason(ka.SdpaArguments(queries, wide, wide[..., :512], out))


def test_others_take_the_problem_on_the_cpu():
    draw = Draw(2, 4, 1, 3, 37, 576, 512, element="float64")
    K = draw.keys()
    out = draw.results(read=False)
    args = ka.SdpaArguments(draw.queries(), K, K[..., :512], out, draw.lse())
    for kernel in ka.get_kernels(args):
        assert ka.verify(kernel, args), kernel


# Launches --------------------------------------------------------------------------------


def test_a_prepared_launch_refuses_values_that_lie_apart():
    args = arguments("cpu")
    launch = ka.get_kernels(args, providers=["reference"])[0].prepare(args)
    Q, K, V, out = args.tensors
    launch(Q, K, V, out)
    with pytest.raises(ArgumentError, match="V lies apart from K"):
        launch(Q, K, V.clone(), out)
    with pytest.raises(ArgumentError, match="V lies apart from K"):
        launch(Q, K.clone(), V, out)


def test_a_prepared_launch_looks_where_arrays_of_numpy_lie():
    Q, K, out = (one.float().numpy() for one in operands())
    args = ka.SdpaArguments(Q, K, K[..., :512], out)
    launch = ka.get_kernels(args, providers=["reference"])[0].prepare(args)
    out[:] = NAN
    launch(Q, K, K[..., :512], out)
    assert np.isfinite(out).all()
    with pytest.raises(ArgumentError, match="V lies apart from K"):
        launch(Q, K, K[..., :512].copy(), out)


@pytest.mark.parametrize("columns", [512, 576])
def test_a_launch_for_values_apart_takes_any(columns):
    """By chance in keys, and as where tokens attend to themselves."""
    Q, K, out = operands(D_v=columns)
    apart = torch.randn(2, 1, 37, columns, dtype=BF16)
    launch = ka.get_kernels(args := ka.SdpaArguments(Q, K, apart, out), providers=["reference"])[0]
    launch = launch.prepare(args)
    for V in (apart, K[..., :columns]):
        launch(Q, K, V, out)
        expected = torch.softmax(Q.float() @ K.float().mT / 24, -1) @ V.float()
        torch.testing.assert_close(out.float(), expected, atol=0.02, rtol=0.02)


def test_tokens_that_attend_to_themselves_are_no_latent_vectors():
    Q, K, out = operands(D_v=576)
    args = ka.SdpaArguments(Q, K, K, out)
    assert not args.values_in_keys
    launch = ka.get_kernels(args, providers=["reference"])[0].prepare(args)
    launch(Q, K, K.clone(), out)


def test_an_op_that_was_called_before_looks_where_values_lie():
    Q, K, _ = operands()
    within, apart = K[..., :512], torch.randn(2, 1, 37, 512, dtype=BF16)
    apart = torch.nn.functional.pad(apart, (0, 64))[..., :512]  # strides are those of K
    assert apart.stride() == within.stride()
    for _ in range(2):
        for V in (within, apart):
            expected = torch.softmax(Q.float() @ K.float().mT / 24, -1) @ V.float()
            torch.testing.assert_close(ka.ops.sdpa(Q, K, V).float(), expected, atol=0.02, rtol=0.02)


# Gradients and graphs --------------------------------------------------------------------


@since_torch("2.10", "takes a tensor of a closure for one of another library")
@pytest.mark.parametrize("said", [None, True, False])
@pytest.mark.parametrize("graph", [False, True])
def test_keys_that_are_values_have_gradients_as_both(graph, said):
    torch._dynamo.reset()
    draw = Draw(2, 4, 1, 3, 7, 24, 16)
    given = [draw.queries().requires_grad_(), draw.keys().requires_grad_()]
    elsewhere = torch.full((2, 1, 7, 16), NAN, dtype=torch.float64, requires_grad=True)

    def function(q, k):
        if said is None:
            return ka.nn.attention(q, k, k[..., :16])
        v = elsewhere if said else k[..., :16]
        return ka.ops.sdpa(q, k, v, values_in_keys=said)

    called = torch.compile(function, backend="aot_eager", fullgraph=True) if graph else function
    found = called(*given)
    Q, K = given
    expected = torch.softmax(Q @ K.mT * 24**-0.5, -1) @ K[..., :16]
    torch.testing.assert_close(found, expected)
    dO = draw.results()
    gradients = (torch.autograd.grad(one, given, dO) for one in (found, expected))
    torch.testing.assert_close(*gradients)
    with torch.no_grad():
        torch.testing.assert_close(called(*given), expected)


def test_a_node_of_a_graph_says_that_values_are_in_keys():
    """A compiler of torch may compute keys, and their first columns again."""
    draw = Draw(2, 4, 1, 3, 7, 24, 16)
    Q, K = draw.queries(), draw.keys()
    graph = make_fx(lambda q, k: ka.ops.sdpa(q, k, k[..., :16], values_in_keys=True))(Q, K)
    (node,) = [one for one in graph.graph.nodes if "kernel_api" in str(one.target)]
    given = [{"q_1": Q, "k_1": K}.get(str(one), one) for one in node.args]
    given[2] = torch.full((2, 1, 7, 16), NAN, dtype=torch.float64)
    out, _ = node.target(*given)
    torch.testing.assert_close(out, ka.ops.sdpa(Q, K, K[..., :16]))


def test_an_op_refuses_to_take_more_values_than_keys_have():
    Q, K, _ = operands()
    with pytest.raises(ArgumentError, match="at most as many columns"):
        ka.ops.sdpa(Q, K[..., :64], K, values_in_keys=True)
    with pytest.raises(ArgumentError, match="values_in_keys is 'no'"):
        ka.ops.sdpa(Q, K, K, values_in_keys="no")


# What is compiled ------------------------------------------------------------------------


def options():
    """Those that leave registers to all that is kept of a block, and pages."""
    rows = {name: torch.empty(2, 4, 1, device="meta") for name in ka.SdpaArguments.output_names[1:]}
    heads = {name: torch.empty(4, device="meta") for name in ("alibi", "sink")}
    return {**rows, **heads, "softcap": 3.0, "mask": masks.SlidingWindow(70, 3, "bottom_right")}


def paged():
    """With all of them, so that one compilation shows more than one thing."""
    Q, _, out = operands("meta")
    pages = torch.empty(16, 1, 64, 576, dtype=BF16, device="meta")
    table, lengths = (torch.empty(n, dtype=torch.int32, device="meta") for n in ((2, 8), (2,)))
    numbers = {"page_table": table, "seq_lens_kv": lengths}
    return ka.SdpaArguments(Q, pages, pages[..., :512], out, **numbers, **options())


@pytest.mark.compile
def test_options_spill_nothing():
    args = paged()
    (kernel,) = ka.get_kernels(args, cc=90, providers=["cutedsl"])
    assert kernel.compile(args, cc=90).resources.spill_bytes == 0

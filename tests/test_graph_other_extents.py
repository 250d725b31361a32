"""``Graph``: called with tensors of other extents than it was written with."""

import pytest
import torch
from support.graph_product import as_is_compared

import kernel_api.graph as cudnn


def attention_block(**options):
    """Attention and a product behind it, with an output in the middle."""
    q, w = torch.randn(2, 17, 3, 16).transpose(1, 2), torch.randn(16, 9)
    with cudnn.Graph(**options) as graph:
        out, _ = graph.sdpa(q=q, k=q, v=q, attn_scale=0.3, name="attn")
        out.set_output(True)
        graph.relu(graph.matmul(out, w), name="act").set_output(True)
    return graph


def test_other_extents_are_taken_where_they_are_enabled():
    graph = attention_block(is_dynamic_shape_enabled=True)
    w = torch.randn(16, 9)
    for batch, rows in ((2, 17), (3, 5), (1, 40), (3, 5)):
        q = torch.randn(batch, rows, 3, 16).transpose(1, 2)
        out, act = graph(q, w)
        exact = (q.double() @ q.double().mT * 0.3).softmax(-1) @ q.double()
        same = torch.nn.functional.scaled_dot_product_attention(q, q, q, scale=0.3)
        as_is_compared(out, exact, same)
        assert out.stride() == q.stride()
        as_is_compared(act, torch.relu(exact @ w.double()), torch.relu(same @ w))
        # By name, with an output of the caller's and other strides.
        given = torch.empty(batch, 3, rows, 9)
        found = graph({"attn::q": q.contiguous(), "matmul.0::B": w, "act::OUT_0": given})
        assert found["act::OUT_0"] is given
        as_is_compared(given, torch.relu(exact @ w.double()), torch.relu(same @ w))


def test_other_extents_are_those_of_a_function_of_scores():
    def capped(graph, score):
        far = graph.sub(graph.gen_index(score, axis=3), graph.gen_index(score, axis=2))
        return graph.add(graph.mul(graph.tanh(score), 2.0), graph.abs(far))

    def made(q, k, dO, o, stats):
        with cudnn.Graph(is_dynamic_shape_enabled=True) as graph:
            graph.sdpa(q, k, k, score_mod=capped)[0].set_output(True)
            for one in graph.sdpa_backward(q, k, k, o, dO, stats, score_mod=capped):
                one.set_output(True)
        return graph

    def tensors(S_q, S_kv):
        q, dO, o = (torch.randn(2, 3, S_q, 16) for _ in range(3))
        return q, torch.randn(2, 3, S_kv, 16), dO, o, torch.randn(2, 3, S_q, 1) + 9

    graph, given = made(*tensors(5, 6)), tensors(9, 4)
    for own, other in zip(graph(*given), made(*given)(*given), strict=True):
        assert torch.equal(own, other)


def test_other_extents_are_taken_after_deserialisation_and_of_other_libraries():
    graph = cudnn.Graph.deserialize(attention_block(is_dynamic_shape_enabled=True).serialize())
    q, w = torch.randn(4, 3, 7, 16), torch.randn(16, 9)
    out, act = graph(q.numpy(), w)
    assert (out.shape, act.shape) == ((4, 3, 7, 16), (4, 3, 7, 9))
    for own, other in zip((out, act), graph(q, w), strict=True):
        assert torch.equal(own, other)


def test_other_extents_follow_the_plan_that_is_selected():
    graph = attention_block(is_dynamic_shape_enabled=True)
    q, w = torch.randn(4, 3, 7, 16), torch.randn(16, 9)
    first = graph(q, w)
    graph.select_plan(graph.get_execution_plan_count() - 1)
    assert graph.selected.mode is cudnn.heur_mode.FALLBACK
    for own, other in zip(first, graph(q, w), strict=True):
        torch.testing.assert_close(own, other)


def test_other_extents_are_an_error_where_they_are_not_enabled():
    graph = attention_block()
    with pytest.raises(cudnn.VariantPackError, match=r"attn::q .*\[4, 3, 7, 16\]"):
        graph(torch.randn(4, 3, 7, 16), torch.randn(16, 9))


def test_other_extents_that_do_not_fit_are_an_error():
    graph = attention_block(is_dynamic_shape_enabled=True)
    with pytest.raises(cudnn.GraphError, match="A with K = 16 but B with K = 15"):
        graph(torch.randn(4, 3, 7, 16), torch.randn(15, 9))
    with pytest.raises(cudnn.GraphError, match="attn::q has 4 modes"):
        graph(torch.randn(3, 7, 16), torch.randn(16, 9))


@pytest.mark.parametrize("mode", [cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
def test_other_extents_of_a_reduction_are_reduced_where_set_dim_said(mode):
    x = torch.randn(4, 8, 3)
    with cudnn.Graph(is_dynamic_shape_enabled=True, heuristics=[mode]) as graph:
        largest = graph.reduction(x, cudnn.reduction_mode.MAX)
        largest.set_dim([4, 1, 1]).set_stride([1, 1, 1])
        shifted = graph.sub(x, largest)
        sums = graph.reduction(shifted, cudnn.reduction_mode.ADD).set_dim([1, 8, 3])
        sums.set_stride([24, 1, 8]).set_output(True)
        shifted.set_output(True)
    for shape in ((4, 8, 3), (6, 5, 7), (1, 1, 1), (4, 8, 2)):
        x = torch.randn(shape)
        exact = x - x.amax((1, 2), keepdim=True)
        shifted, sums = graph(x)
        torch.testing.assert_close(shifted, exact)
        torch.testing.assert_close(sums, exact.sum(0, keepdim=True))
        assert sums.stride()[1:] == (1, shape[1])


def column_sums(**options):
    """Sums over rows of one column, so that it is not said whether columns are reduced."""
    x = torch.randn(5, 1)
    with cudnn.Graph(is_dynamic_shape_enabled=True) as graph:
        sums = graph.reduction(x, cudnn.reduction_mode.ADD, name="sums", **options)
        (sums if options else sums.set_dim([1, 1])).set_output(True)
    return graph


def test_other_extents_where_set_dim_did_not_say_what_is_reduced():
    graph = column_sums()
    torch.testing.assert_close(graph(torch.ones(7, 1)), torch.full((1, 1), 7.0))
    with pytest.raises(cudnn.GraphError, match=r"has dim \[7, 3\], .* mode 1 .*give axis= to"):
        graph(torch.ones(7, 3))
    torch.testing.assert_close(column_sums(axis=0)(torch.ones(7, 3)), torch.full((1, 3), 7.0))
    for given, expected in ((torch.empty(1, 3), 7.0), (torch.empty(1, 1), 21.0)):
        graph({"sums::input": torch.ones(7, 3), "sums::Y": given})
        torch.testing.assert_close(given, torch.full_like(given, expected))


def test_other_extents_beside_what_was_set_and_does_not_follow():
    x, w = torch.randn(5, 6), torch.randn(24)
    with cudnn.Graph(is_dynamic_shape_enabled=True) as graph:
        weight = graph.reshape(w, name="weight").set_dim([6, 4])
        graph.matmul(x, weight).set_output(True)
    x = torch.randn(9, 6)
    torch.testing.assert_close(graph(w, x), x @ w.view(6, 4))
    with pytest.raises(cudnn.GraphError, match=r"as many elements, 30 .*weight::Y does not follow"):
        graph(torch.randn(30), x)


def test_other_extents_of_gradients_of_groups_are_not_taken_for_one_group():
    image, loss = torch.randn(2, 4, 5, 5), torch.randn(2, 6, 3, 3)
    with cudnn.Graph(is_dynamic_shape_enabled=True) as graph:
        dw = graph.conv_wgrad(image, loss).set_dim([6, 2, 3, 3]).set_output(True)
        dx = graph.conv_dgrad(loss, torch.randn(6, 2, 3, 3), name="dx").set_dim([2, 4, 5, 5])
        dx.set_output(True)
    dw, dx = graph(image, loss, torch.randn(6, 2, 3, 3))
    assert (dw.shape, dx.shape) == ((6, 2, 3, 3), (2, 4, 5, 5))
    with pytest.raises(cudnn.GraphError, match=r"\[3, 6, 3, 3\] .*dx::DX .*override_shapes has to"):
        graph(torch.randn(3, 4, 5, 5), torch.randn(3, 6, 3, 3), torch.randn(6, 2, 3, 3))

"""Tensors without modes in graphs, which have them with one mode of extent 1."""

import pytest
import torch

import kernel_api.graph as cudnn
from kernel_api.verification import compare


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_a_tensor_without_modes_is_given_as_the_block_was(is_dynamic):
    m, s = torch.randn(2, 5, 6), torch.tensor(2.0)
    with cudnn.Graph(is_dynamic_shape_enabled=is_dynamic) as graph:
        graph.mul(m, s, name="mul").set_output(True)
    for other in (s, torch.tensor(3.0), torch.tensor([3.0])):
        assert torch.equal(graph(m, other), m * other)
        assert torch.equal(graph({m: m, "mul::b": other})["mul::OUT_0"], m * other)
        if is_dynamic:
            assert torch.equal(graph(m[:1, :3], other), m[:1, :3] * other)
    words = "mul::a has 3 modes" if is_dynamic else r"mul::a .* is float32\[\]"
    with pytest.raises(cudnn.GraphError if is_dynamic else cudnn.VariantPackError, match=words):
        graph(s, s)


def test_a_result_is_written_to_a_tensor_without_modes():
    x = torch.tensor(-2.0)
    for is_dynamic in (False, True):
        with cudnn.Graph(is_dynamic_shape_enabled=is_dynamic) as graph:
            graph.abs(x, name="abs").set_output(True)
        out = torch.zeros(())
        assert graph({x: x, "abs::OUT_0": out})["abs::OUT_0"] is out
        assert out.item() == 2


def test_a_scale_of_attention_may_be_a_tensor_without_modes():
    q, scale = torch.randn(2, 3, 8, 16), torch.tensor(0.3)
    with cudnn.Graph() as graph:
        graph.sdpa(q, q, q, attn_scale=scale)[0].set_output(True)
    exact, same = (
        torch.nn.functional.scaled_dot_product_attention(x, x, x, scale=0.3)
        for x in (q.double(), q)
    )
    assert compare(graph(q, scale), exact, same, factor=3.0)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tensor_without_modes_is_one_of_one_mode_in_single_steps(device):
    graph = cudnn.pygraph()
    x = graph.tensor_like(torch.empty((), device=device))
    assert (x.get_dim(), x.get_stride(), x.is_pass_by_value) == ([1], [1], False)
    graph.relu(x).set_output(True)
    graph.validate()

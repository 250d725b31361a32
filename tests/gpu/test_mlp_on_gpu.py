"""nn.mlp on a GPU: by compiled kernels, against torch in float64."""

import pytest
import torch
from support.mlp import gradients, leaves, of_torch

import kernel_api as ka

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("element", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("swiglu", {"K": 264, "inner": 224, "N": 200}),
        ("geglu_tanh", {"K": 136, "inner": 96, "N": 77}),  # rows of w_down that TMA cannot take
        ("gelu", {"K": 264, "inner": 176, "N": 200}),
        ("squared_relu", {"K": 64, "inner": 1000, "N": 520}),
    ],
)
@pytest.mark.parametrize("lead", [(133,), (2, 3, 67)], ids=str)
def test_the_layer_and_its_gradients_are_torchs(kind, sizes, lead, element, is_compiled):
    wide = [one.detach() / one.shape[-1] ** 0.5 for one in leaves(*lead, kind=kind, **sizes)]
    operands = [one.to("cuda", element).requires_grad_() for one in wide]
    exact = [one.detach().double().requires_grad_() for one in operands]

    def layer(*given):
        return ka.nn.mlp(*given, kind=kind)

    torch._dynamo.reset()
    y = (torch.compile(layer, fullgraph=True) if is_compiled else layer)(*operands)
    expected, norm = of_torch(*exact, kind=kind), torch.linalg.vector_norm
    for one, other in zip(
        (y, *gradients(y, operands)), (expected, *gradients(expected, exact)), strict=True
    ):
        assert one.dtype is element
        assert norm(one.double() - other) < 4 * torch.finfo(element).eps * norm(other)

"""A product written with torch tensors, for tests of ``Graph`` as a context."""

import torch

import kernel_api.graph as cudnn
from kernel_api.verification import compare

X, W, B = (torch.randn(*shape).half() for shape in ((3, 17, 23), (23, 11), (11,)))


def as_is_compared(out, exact, same):
    found = compare(out, exact, same, factor=3.0)
    assert found, str(found)


def product(**options):
    """relu(x @ w + b), all with names."""
    with cudnn.Graph(**options) as graph:
        c = graph.matmul(X, W, name="mm")
        out = graph.bias(c, B, name="shift")
        graph.relu(input=out, name="act").set_output(True)
    return graph


def expected(x, w, b):
    return torch.relu(x.double() @ w.double() + b.double()), torch.relu(x @ w + b)

"""The products that a kernel's error is measured by, as far as a CPU can show them."""

import pytest
import torch

from kernel_api.providers.reference.tensor_cores import as_e4m3


@pytest.mark.parametrize("factor", [1.0, 2.0**-9, 3000.0])
def test_e5m2_becomes_e4m3_without_a_change_but_to_tiny_elements(factor):
    torch.manual_seed(0)
    matrix = (torch.randn(257, 129) * factor).to(torch.float8_e5m2)
    narrow, scale = as_e4m3(matrix)
    exact = matrix.double()
    found = narrow.double() / scale
    large = exact.abs() >= exact.abs().max() * 2.0**-15
    assert torch.equal(found[large], exact[large])
    assert large.float().mean() > 0.99
    assert (found - exact).abs().max() <= exact.abs().max() * 2.0**-18


def test_zeros_and_infinities_keep_the_scale_of_one():
    assert as_e4m3(torch.zeros(3, 3).to(torch.float8_e5m2))[1] == 1.0
    assert as_e4m3(torch.full((2, 2), float("inf")).to(torch.float8_e5m2))[1] == 1.0

"""The grid of attention that a GPU runs: it has what it should, and every case of it is served."""

import pytest
import torch
from support.sdpa_grid import F8, HEAD_DIMS, KINDS, LENGTHS, cases

import kernel_api as ka

GRID = list(cases())


def test_the_grid_has_every_size_and_both_passes():
    assert {case.kind for case in GRID} == set(KINDS)
    assert {case.sizes[5:] for case in GRID} == {*HEAD_DIMS}
    assert set(LENGTHS) <= {case.sizes[3] for case in GRID} | {case.sizes[4] for case in GRID}
    unequal = [case for case in GRID if case.sizes[3] != case.sizes[4]]
    assert len(unequal) > len(GRID) / 2
    learning = [case for case in GRID if KINDS[case.kind].gradients is not None]
    assert sum(case.gradient for case in GRID) > len(learning) / 3
    assert len({str(case) for case in GRID}) == len(GRID)


def test_every_case_has_a_kernel_for_every_gpu_and_those_of_8_bits_one_of_hopper():
    for case in GRID:
        args = case.arguments("meta")
        for cc in ("80", "90"):
            families = {k.family_name() for k in ka.get_kernels(args, cc=cc, providers=["cutedsl"])}
            if KINDS[case.kind].element == F8:
                found = families - {"sm90.sdpa_decode_fp8"}
                own = {"sm90.sdpa_forward_fp8"} if cc == "90" else set()
                assert found == {"sm80.sdpa_forward_fp8", *own}, case
            else:
                direction = "backward" if case.gradient else "forward"
                assert f"sm80.sdpa_{direction}" in families, case


@pytest.mark.parametrize("kind", KINDS)
def test_a_case_is_the_same_every_time_and_the_reference_takes_it(kind):
    small = [case for case in GRID if case.kind == kind]
    case = min(small, key=lambda case: case.sizes[0] * case.sizes[1] * case.sizes[3])
    found = [case.arguments("cpu") for _ in range(2)]
    for one, other in zip(*(args.tensors for args in found), strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(one.float().nan_to_num(), other.float().nan_to_num())
    (kernel,) = ka.get_kernels(found[0], providers=["reference"])
    kernel.run(found[0])
    for output in found[0].outputs.values():
        assert not output.tensor.isnan().any()

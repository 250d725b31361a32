"""What the tests rely on: data, shapes and the restored registry are what they say."""

import pytest
import torch
from support.data import arguments_for, fill, gemm_tensors, strided_empty
from support.kernels import CudaGemm, LoopGemm
from support.registry import restored_registry
from support.shapes import SIZES, problems

import kernel_api as ka
from kernel_api import provider


def test_seven_kernels_see_every_size_in_every_mode_and_both_batches():
    seen = [problem for index in range(7) for problem in problems(index)]
    for mode in range(3):
        assert {problem[mode] for problem in seen} == set(SIZES)
    for index in range(7):
        assert {1, 3} <= {problem[3] for problem in problems(index)}


def test_about_six_problems_are_given_to_each_kernel():
    assert {len(problems(index)) for index in range(21)} == {6, 7}


@pytest.mark.parametrize("layout", "tn")
@pytest.mark.parametrize("shape", [(4, 5), (3, 4, 5), (1, 1), (0, 5), (4, 0)])
def test_strided_tensors_have_the_layout_padding_and_offset_asked_for(layout, shape):
    tensor = strided_empty(shape, torch.float32, layout, pad=3, offset=2)
    assert tensor.shape == shape
    assert tensor.storage_offset() == 2
    unit, leading = (-1, -2) if layout == "t" else (-2, -1)
    assert tensor.stride(unit) == 1
    assert tensor.stride(leading) == shape[unit] + 3
    tensor.fill_(1.0)
    assert tensor.sum() == tensor.numel()


def test_data_is_the_same_for_the_same_seed_whatever_the_strides():
    plain = fill(strided_empty((4, 5), torch.float32), 7)
    padded = fill(strided_empty((4, 5), torch.float32, "n", pad=3, offset=1), 7)
    assert torch.equal(plain, padded)
    assert not torch.equal(plain, fill(torch.empty(4, 5), 8))


@pytest.mark.parametrize("kind", ["f64", "f16", "e4m3", "i8", "u8", "bool"])
def test_integer_values_are_small_integers(kind):
    A, _, _ = gemm_tensors(40, 40, 40, types=(kind,) * 3, values="integers")
    values = set(A.double().flatten().tolist())
    assert values <= {-3, -2, -1, 0, 1, 2, 3}
    assert len(values) > 1


@pytest.mark.parametrize("sizes", [(1, 1, 1), (7, 63, 65), (1000, 129, 1)])
@pytest.mark.parametrize("batch", [None, 1, 3])
def test_arguments_are_built_that_a_kernel_takes_whatever_the_sizes(sizes, batch):
    for operands in CudaGemm.operand_variants():
        for kernel in CudaGemm.kernels_for(operands):
            args = arguments_for(kernel, *sizes, batch, device="meta")
            assert kernel.supports(args), kernel.supports(args)


def registered():
    """Each provider's families, and its kernels where they are few."""
    families = {one.name: one.families() for one in provider.providers()}
    return families, ka.get_kernels(providers=["torch", "reference"])


def test_the_registry_is_as_before_after_a_test():
    before = registered()
    with restored_registry() as registry:
        name = registry.register(LoopGemm).name
        assert ka.get_kernels(providers=[name])
        assert registered() != before
    assert registered() == before
    assert LoopGemm.provider_name() == ""
    with pytest.raises(ka.errors.ArgumentError):
        ka.get_kernels(providers=[name])


def test_a_class_that_was_registered_before_a_test_has_its_provider_afterwards():
    with restored_registry() as outer:
        name = outer.register(LoopGemm).name
        with restored_registry() as registry:
            registry.register(LoopGemm)
            assert LoopGemm.provider_name() != name
        assert LoopGemm.provider_name() == name

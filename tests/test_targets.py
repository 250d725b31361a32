"""GPU architectures: kernel_api.targets."""

import pytest
import torch

import kernel_api as ka
from kernel_api.errors import ArgumentError, UnsupportedError
from kernel_api.providers.cutedsl import CuTeDSLProvider
from kernel_api.targets import Target, fitting, target, targets_of


@pytest.mark.parametrize("spelling", [90, "90", "9.0", "sm_90", "sm90", "SM_90", " 90 "])
def test_plain_spellings_of_hopper_are_alike(spelling):
    assert target(spelling) == Target(9, 0)


@pytest.mark.parametrize("spelling", ["90a", "9.0a", "sm_90a", "sm90a", "SM_90A"])
def test_spellings_with_suffix_are_alike(spelling):
    assert target(spelling) == Target(9, 0, "a")


@pytest.mark.parametrize("spelling", [100, "100", "10.0", "sm_100"])
def test_three_digits_are_two_of_major_and_one_of_minor(spelling):
    assert target(spelling) == Target(10, 0)


def test_a_family_target_keeps_its_suffix():
    assert target("sm_100f") == Target(10, 0, "f")
    assert str(target("sm_100f")) == "sm_100f"


@pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_90a", "sm_100f", "sm_103a", "sm_120"])
def test_a_target_prints_as_it_is_spelled(name):
    assert str(target(name)) == name
    assert target(target(name)) is target(name)


@pytest.mark.parametrize(
    "nonsense", ["", "hopper", "90b", "sm_", "9.0.0", "9" * 5000, -90, 9.5, None, True]
)
def test_what_names_no_architecture_is_refused(nonsense):
    with pytest.raises(ArgumentError, match="names no GPU architecture"):
        target(nonsense)


def test_what_cannot_even_be_hashed_is_refused_the_same_way():
    with pytest.raises(ArgumentError, match="names no GPU architecture"):
        target([90])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sm_80a", "those with a begin at 9.0, write 80"),
        ("sm_90f", "those with f begin at 10.0, write 90"),
        ("89f", "those with f begin at 10.0, write 89"),
    ],
)
def test_suffixes_are_those_of_newer_architectures(name, words):
    with pytest.raises(ArgumentError, match=f"'{name}' names no GPU architecture; {words}"):
        target(name)


@pytest.mark.parametrize("digit", [9, "9", "9a", "sm_9"])
def test_a_single_digit_is_refused_with_what_to_write(digit):
    with pytest.raises(ArgumentError, match=r"write 90 or '9\.0'"):
        target(digit)


@pytest.mark.parametrize(
    ("kernel", "device", "runs"),
    [
        ("sm_80", "sm_80", True),
        ("sm_80", "sm_86", True),
        ("sm_80", "sm_90", True),
        ("sm_80", "sm_90a", True),
        ("sm_80", "sm_100", True),
        ("sm_80", "sm_75", False),
        ("sm_90a", "sm_90", True),
        ("sm_90a", "sm_90a", True),
        ("sm_90a", "sm_100", False),
        ("sm_90a", "sm_100a", False),
        ("sm_90a", "sm_80", False),
        ("sm_100f", "sm_100", True),
        ("sm_100f", "sm_103", True),
        ("sm_100f", "sm_110", False),
        ("sm_100f", "sm_120", False),
        ("sm_100f", "sm_90", False),
        ("sm_103f", "sm_100", False),
    ],
)
def test_suffixes_say_on_which_devices_a_kernel_runs(kernel, device, runs):
    assert target(kernel).runs_on(target(device)) is runs


@pytest.mark.parametrize(
    ("kernel", "device", "compiled"),
    [
        ("sm_80", "sm_90", "sm_90"),
        ("sm_80", "sm_90a", "sm_90a"),
        ("sm_90a", "sm_90", "sm_90a"),
        ("sm_100f", "sm_103", "sm_103f"),
    ],
)
def test_a_kernel_is_compiled_for_the_device_with_the_suffix_it_needs(kernel, device, compiled):
    assert str(target(kernel).compiled_for(target(device))) == compiled


def test_the_most_specific_of_several_targets_fits():
    several = [target("sm_80"), target("sm_90a"), target("sm_100f")]
    assert fitting(several, target(90)) == target("sm_90a")
    assert fitting(several, target(103)) == target("sm_100f")
    assert fitting(several, target(120)) == target("sm_80")
    assert fitting(several, target(75)) is None


def test_a_kernel_without_targets_runs_from_its_min_cc_on():
    assert targets_of((), 80) == (Target(8, 0),)
    assert targets_of(("sm_90a",), 80) == (Target(9, 0, "a"),)
    assert fitting(targets_of((), 0), target(75)) is not None


# What code generators know ---------------------------------------------------------------


def test_the_provider_knows_the_architectures_of_its_code_generator():
    from cutlass.base_dsl.enums import Arch

    known = {target(name).cc for name in Arch.__members__}  # other names of one are among them
    assert set(CuTeDSLProvider.architectures) == known


@pytest.mark.parametrize("cc", ["sm_95", "13.0"])
def test_no_kernel_is_offered_for_an_architecture_that_its_code_generator_does_not_know(cc):
    A, B, out = (torch.empty(64, 64, dtype=torch.bfloat16, device="meta") for _ in range(3))
    args = ka.GemmArguments(A, B, out)
    assert not ka.get_kernels(args, cc=cc, providers=["cutedsl"])
    assert not ka.get_kernels(cc=cc, providers=["cutedsl"])
    (told,) = [one for one in ka.explain(args, cc=cc).rejected if one.family == "sm80.gemm"]
    assert told.rule == "target"
    assert "cutedsl generates code for sm_80, " in told.reason
    assert told.reason.endswith(f"the device is {target(cc)}")
    kernel = ka.get_kernels(args, cc="80", providers=["cutedsl"])[0]
    with pytest.raises(UnsupportedError, match="cutedsl generates code for sm_80, "):
        kernel.compile(args, cc=cc)


def test_others_are_offered_for_every_architecture():
    A, B, out = (torch.empty(64, 64, dtype=torch.bfloat16, device="meta") for _ in range(3))
    kernels = ka.get_kernels(ka.GemmArguments(A, B, out), cc="sm_95")
    assert {kernel.metadata.provider for kernel in kernels} == {"torch", "reference"}


def test_kernels_of_the_cpu_are_not_offered_for_a_gpu():
    def operands(*shape):
        return [torch.empty(shape, dtype=torch.bfloat16, device="meta") for _ in range(4)]

    args = ka.SdpaArguments(*operands(2, 4, 64, 64))
    assert all("cuda" in kernel.devices for kernel in ka.get_kernels(args, cc=90))
    assert all("cuda" in kernel.devices for kernel in ka.get_kernels(cc=90))
    (told,) = [one for one in ka.explain(args, cc=90).rejected if one.family.endswith("flash_cpu")]
    assert told.reason == "the kernel runs on cpu, the device is sm_90"


def test_what_is_compiled_needs_no_code_generator_that_knows_the_device():
    A, B, out = (torch.empty(64, 64, dtype=torch.bfloat16, device="meta") for _ in range(3))
    args = ka.GemmArguments(A, B, out)
    kernel = ka.get_kernels(args, cc="80", providers=["cutedsl"])[0]
    assert kernel.status(args, target("88"), compiled=True)
    assert not kernel.status(args, target("88"))

"""What queries offer compiles for its targets without a GPU, and the machine code is as meant.

Every registered CuTe DSL family is sampled, and an example family so that there always is one.
"""

import random
import re
from dataclasses import replace
from math import prod

import pytest
import torch
from support.data import TOO_MANY_PARTS, arguments_for, supported_sizes
from support.example_gemm import ExampleGemm
from support.kernels import generated_by
from support.registry import restored_registry
from support.sampling import EVERY, some
from support.sass import sass

import kernel_api as ka
from kernel_api import provider
from kernel_api.targets import target

pytestmark = pytest.mark.compile

PAIRS = 26  # (kernel, signature), over all families together
REGISTERS = 64 * 1024  # of a multiprocessor
SHARED_MEMORY = {8: 163 * 1024, 9: 227 * 1024, 10: 227 * 1024, 12: 99 * 1024}  # by major


(CUTEDSL,) = provider.providers(["cutedsl"])


def families():
    return [*CUTEDSL.families(), ExampleGemm]


def kernels_of(family):
    return generated_by(family)


def sampled_pairs():
    """(kernel, sizes, target), the same in every run; small and unaligned sizes among them."""
    chosen = random.Random(2025)
    pairs = []
    listed = families()
    for family in listed:
        kernels = kernels_of(family)
        for kernel in chosen.sample(kernels, min(len(kernels), -(-PAIRS // len(listed)))):
            M, N, K, batch = _sizes_for(kernel, chosen)
            for compiled_for in _devices_of(kernel, chosen):
                name = f"{kernel.metadata.kernel_name}-{M}x{N}x{K}x{batch}-{compiled_for}"
                pairs.append(pytest.param(kernel, (M, N, K, batch), compiled_for, id=name))
    return pairs


def _sizes_for(kernel, chosen):
    """Of those that the kernel takes: a split along K needs a few products, and few tiles."""
    while True:
        M, N, K = (chosen.choice((1, 7, 64, 129, 1000, 4096)) for _ in range(3))
        batch = chosen.choice((None, None, 1, 3))
        if kernel.supports(arguments_for(kernel, M, N, K, batch, device="meta")):
            return M, N, K, batch


def _devices_of(kernel, chosen):
    """Each target itself; a newer architecture as well for one in five of those that it runs on."""
    for one in kernel.metadata.parsed_targets:
        yield str(one)
        if not one.suffix and one.cc < 90 and chosen.random() < 0.2:
            yield "sm_90"


@pytest.fixture(scope="module", autouse=True)
def example():
    with restored_registry():
        CUTEDSL.register(ExampleGemm)
        yield


def crowded_by_narrow_copies():
    """Of Ampere's GEMM: a thread has 128 accumulators and copies 4 bytes at a time. One of each
    design and majors, that writes the widest type."""
    (family,) = (f for f in CUTEDSL.families() if f.family == "sm80.gemm")
    found = {}
    for kernel in kernels_of(family):
        operands, design = kernel.metadata.operands, kernel.metadata.design
        crowded = design.accumulators == 128 and operands.A.alignment == 4
        if crowded and (operands.A.dtype, operands.out.dtype) == (torch.bfloat16, torch.float32):
            majors = operands.A.unit_mode, operands.B.unit_mode
            found.setdefault((design.threads, majors), kernel)
    return found


def test_few_threads_that_copy_narrowly_take_operands_that_are_alike():
    majors = [majors for threads, majors in crowded_by_narrow_copies() if threads == 128]
    assert sorted(majors) == [(-2, -1), (-1, -2)]


@pytest.mark.parametrize(
    "kernel",
    some(crowded_by_narrow_copies().values(), 1),
    ids=lambda kernel: kernel.metadata.kernel_name,
)
def test_threads_that_copy_narrowly_spill_nothing_on_newer_gpus(kernel):
    args = arguments_for(kernel, 256, 256, 256, device="meta")
    assert kernel.compile(args, cc="sm_90").resources.spill_bytes == 0


@pytest.mark.parametrize(("kernel", "sizes", "compiled_for"), sampled_pairs())
def test_what_is_offered_compiles_without_spills_and_fits_the_multiprocessor(
    kernel, sizes, compiled_for
):
    M, N, K, batch = sizes
    args = arguments_for(kernel, *supported_sizes(kernel, M, N, K), batch, device="meta")
    if kernel.supports(args).rule in TOO_MANY_PARTS:
        args = arguments_for(kernel, *supported_sizes(kernel, 64, 64, K), 1, device="meta")
    assert kernel in ka.get_kernels(args, cc=compiled_for, providers=["cutedsl"])

    artifact = kernel.compile(args, cc=compiled_for)
    assert artifact.target == target(compiled_for)
    assert artifact.signature == args.signature

    used = artifact.resources
    implementation = kernel.implementation()
    assert used.spill_bytes == 0
    assert used.threads == implementation.threads
    assert used.threads % 32 == 0
    assert 0 < used.threads <= 1024
    assert used.registers * used.threads <= REGISTERS
    assert used.shared_memory_bytes <= SHARED_MEMORY[artifact.target.major]


def one_of_each(condition):
    """The smallest kernel of each family for which the condition holds; where every case is asked
    for, of all types of A and B."""
    found = {}
    for family in families():
        if family.arguments is not ka.GemmArguments:
            continue
        kernels = [k for k in kernels_of(family) if condition(k.metadata)]
        for kernel in sorted(kernels, key=lambda k: prod(k.metadata.design.tile_shape)):
            operands = kernel.metadata.operands
            types = (operands.A.dtype, operands.B.dtype) if EVERY else ()
            found.setdefault((family, *types), kernel)
    return [pytest.param(k, id=k.metadata.kernel_name) for k in found.values()]


def multiplies_16_bits(metadata):
    return metadata.operands.A.dtype in (torch.float16, torch.bfloat16)


def multiplies_8_bits(metadata):
    return metadata.operands.A.dtype == torch.int8


def is_for(metadata, name):
    return metadata.targets == (name,) and metadata.kernel_class is not ExampleGemm


def parts_meet(metadata):
    return getattr(metadata.design, "cluster_shape", (1, 1, 1))[2] > 1


def instructions(kernel, compiled_for, sizes=(256, 256, 256)):
    return sass(kernel.compile(arguments_for(kernel, *sizes, device="meta"), cc=compiled_for))


AMPERE = one_of_each(lambda m: is_for(m, "sm_80") and multiplies_16_bits(m))
AMPERE_INT8 = one_of_each(lambda m: is_for(m, "sm_80") and multiplies_8_bits(m))
HOPPER = one_of_each(lambda m: is_for(m, "sm_90a") and multiplies_16_bits(m))
MEETING = one_of_each(lambda m: is_for(m, "sm_90a") and parts_meet(m))

if AMPERE:

    @pytest.mark.parametrize("kernel", AMPERE)
    def test_16_bit_ampere_kernels_multiply_by_tensor_cores_fed_by_ldmatrix(kernel):
        code = instructions(kernel, "sm_80")
        assert "HMMA" in code
        assert "LDSM" in code


if AMPERE_INT8:

    @pytest.mark.parametrize("kernel", AMPERE_INT8)
    def test_8_bit_ampere_kernels_multiply_by_tensor_cores_fed_by_ldmatrix(kernel):
        code = instructions(kernel, "sm_80")
        assert "IMMA" in code
        assert "LDSM" in code


if HOPPER:

    @pytest.mark.parametrize("kernel", HOPPER)
    def test_16_bit_hopper_kernels_multiply_by_wgmma_fed_by_tma(kernel):
        code = instructions(kernel, "sm_90a")
        assert "HGMMA" in code
        assert "UTMALDG" in code

    @pytest.mark.parametrize("dependent", [True, False])
    def test_a_dependent_launch_waits_for_the_kernel_before_it_touches_memory(dependent):
        metadata = HOPPER[0].values[0].metadata
        design = replace(metadata.design, dependent_launch=dependent)
        code = instructions(replace(metadata, kernel_name="one", design=design).rebuild(), "sm_90a")
        waits, touches = code.find("ACQBULK"), re.search(r"UTMALDG|LDG|STG|UTMASTG", code)
        assert touches
        assert ("PREEXIT" in code) == (waits >= 0) == dependent
        assert waits < touches.start()


@pytest.mark.parametrize("kernel", some(MEETING, 2))
def test_parts_that_meet_go_through_the_memory_of_their_cluster_in_whole_vectors(kernel):
    code = instructions(kernel, "sm_90a", (128, 128, 4096))
    # Memory of other blocks is in a window of the generic addresses.
    parts = kernel.metadata.design.split_k
    assert len(re.findall(r"\bLD\.E\.128", code)) % parts == 0 < code.count("LD.E.128")
    assert len(re.findall(r"\bST\.E\.128", code)) * parts == code.count("LD.E.128")
    assert code.count("UCGABAR_ARV") == code.count("UCGABAR_WAIT") == 2
    assert not re.search(r"\bLDL|\bSTL|ATOM|\bRED\b|LD\.E |ST\.E ", code)


@pytest.mark.parametrize("name", ["sm80.rmsnorm", "sm80.layernorm_backward", "sm80.elementwise"])
def test_kernels_of_rows_wait_for_the_one_before_where_gpus_let_them_start_early(name):
    (family,) = (one for one in families() if one.family == name)
    kernel = generated_by(family)[0]
    hopper, ampere = (instructions(kernel, cc) for cc in ("sm_90a", "sm_80"))
    assert 0 <= hopper.find("ACQBULK") < re.search(r"\bLDG|LDGSTS|\bSTG", hopper).start()
    assert "PREEXIT" in hopper
    assert "ACQBULK" not in ampere


def test_the_example_multiplies_without_tensor_cores():
    (kernel, *_) = kernels_of(ExampleGemm)
    code = instructions(kernel, "sm_80")
    assert "FFMA" in code
    assert "HMMA" not in code


def test_one_artifact_serves_every_size_of_a_signature():
    (kernel, *_) = kernels_of(ExampleGemm)
    small = kernel.compile(arguments_for(kernel, 8, 8, 8, device="meta"), cc=80)
    large = kernel.compile(arguments_for(kernel, 4096, 1000, 72, device="meta"), cc=80)
    assert large is small


def test_a_kernel_that_does_not_compile_is_a_named_error():
    class Broken(ExampleGemm):
        def implementation(self):
            from cutlass import cute

            @cute.jit
            def broken(a, b, out, stream):
                a.no_such_method()

            return broken

    described = kernels_of(ExampleGemm)[0].metadata
    kernel = Broken(replace(described, kernel_name="broken", kernel_class=Broken))
    with pytest.raises(ka.errors.CompileError, match="does not compile for sm_80"):
        kernel.compile(arguments_for(kernel, 8, 8, 8, device="meta"), cc=80)

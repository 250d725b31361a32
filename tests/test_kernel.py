"""supports, run and prepare of a kernel: kernel_api.kernel."""

import pytest
import torch
from support.data import arguments_for, gemm_arguments, gemm_tensors
from support.kernels import (
    CpuGemm,
    LoopGemm,
    cpu_kernel,
    cuda_kernel,
    exact_product,
    kernels_of,
)

import kernel_api as ka
from kernel_api.errors import (
    ArgumentError,
    DeviceError,
    SignatureError,
    UnsupportedError,
    WorkspaceError,
)
from kernel_api.space import Operands

BF16 = ("bf16", "bf16", "f32")


# supports --------------------------------------------------------------------------------


def test_supports_is_truthy_or_names_operand_expected_and_actual():
    kernel = cuda_kernel()
    assert kernel.supports(arguments_for(kernel, 64, 64, 64, device="meta"))
    status = kernel.supports(gemm_arguments(64, 64, 64, device="meta", types=("f16",) * 3))
    assert not status
    assert status.error == "A is float16; expected bfloat16"
    assert (status.operand, status.expected, status.actual) == ("A", "bfloat16", "float16")


@pytest.mark.parametrize("args", [None, 3, "args", torch.empty(2, 2)], ids=type)
def test_supports_says_no_to_what_is_no_arguments_object(args):
    status = cpu_kernel().supports(args)
    assert not status
    assert f"got {type(args).__name__}" in status.error


@pytest.mark.parametrize("given", [3, None, ka.GemmArguments, cpu_kernel])
def test_what_is_no_arguments_object_is_refused_with_what_it_is(given):
    status = cpu_kernel().supports(given)
    assert not status
    assert status.error.startswith("expected an arguments object")
    with pytest.raises(UnsupportedError, match="expected an arguments object"):
        cpu_kernel().compile(given)


def test_supports_says_no_to_arguments_of_another_operation():
    class OtherArguments(ka.arguments.Arguments):
        kind = "other"

    class Other(CpuGemm):
        arguments = OtherArguments
        operand_variants = CpuGemm.operand_variants

    other = Other(cpu_kernel().metadata)
    status = other.supports(gemm_arguments(4, 4, 4))
    assert status.error == "the kernel computes OtherArguments, these are GemmArguments"


def test_supports_says_no_to_scales_that_the_kernel_would_ignore():
    A, B, out = gemm_tensors(4, 4, 4)
    scaled = ka.ScaledOperand(A, torch.tensor(2.0), ka.ScaleMode.PER_TENSOR)
    status = cpu_kernel().supports(ka.GemmArguments(scaled, B, out))
    assert status.rule == "scales"
    assert status.operand == "A"


def test_the_classes_own_check_comes_after_the_others():
    class Rank3(CpuGemm):
        def _supports(self, args):
            if args.A.rank != 3:
                return ka.Status.fail("All operands must be rank 3.")
            return ka.Status.success()

    kernel = cpu_kernel(Rank3)
    assert kernel.supports(gemm_arguments(4, 4, 4, 2))
    assert kernel.supports(gemm_arguments(4, 4, 4)).error == "All operands must be rank 3."


def test_supports_that_returns_no_status_is_a_type_error_naming_the_class():
    class Careless(CpuGemm):
        def _supports(self, args):
            return True

    with pytest.raises(TypeError, match=r"Careless\._supports returned True; expected a Status"):
        cpu_kernel(Careless).supports(gemm_arguments(4, 4, 4))


# run -------------------------------------------------------------------------------------


def test_run_computes_into_out():
    args = gemm_arguments(5, 6, 7)
    assert cpu_kernel().run(args) is None
    assert torch.equal(args.out.tensor, exact_product(args).float())


def test_a_cpu_tensor_to_a_cuda_kernel_is_refused_naming_both_devices():
    kernel = cuda_kernel()
    args = gemm_arguments(64, 64, 64, types=BF16)
    with pytest.raises(UnsupportedError) as caught:
        kernel.run(args)
    assert "the operands are on cpu; the kernel runs on cuda" in str(caught.value)
    assert kernel.metadata.kernel_name in str(caught.value)
    assert caught.value.status.rule == "device"
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("make", [cpu_kernel, cuda_kernel])
def test_meta_tensors_are_compiled_for_but_not_run_on(make):
    kernel = make()
    args = arguments_for(kernel, 64, 64, 64, device="meta")
    assert kernel.supports(args)
    with pytest.raises(DeviceError, match="A is a meta or fake tensor"):
        kernel.run(args)
    with pytest.raises(DeviceError, match="A is a meta or fake tensor"):
        kernel.prepare(args)


def test_fake_tensors_are_not_run_on():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        args = gemm_arguments(4, 4, 4, device="meta")
        fake = ka.GemmArguments(torch.empty(4, 4), torch.empty(4, 4), torch.empty(4, 4))
    for one in (args, fake):
        with pytest.raises(DeviceError, match="A is a meta or fake tensor"):
            cpu_kernel().run(one)


@pytest.mark.parametrize("freed", ["before", "behind"])
@pytest.mark.parametrize("name", ["A", "B", "out"])
def test_what_has_no_memory_any_more_is_not_run_on(name, freed):
    tensors = dict(zip(("A", "B", "out"), gemm_tensors(4, 4, 4), strict=True))
    storage = tensors[name].untyped_storage()
    if freed == "before":
        storage.resize_(0)
    args = ka.GemmArguments(*tensors.values())
    storage.resize_(0)
    for kernel in ka.get_kernels(args):
        with pytest.raises(DeviceError, match=rf"{name} has shape \(4, 4\) and no memory"):
            kernel.run(args)
        with pytest.raises(DeviceError, match=rf"{name} has shape \(4, 4\) and no memory"):
            kernel.prepare(args)


def test_a_part_of_what_has_no_memory_any_more_is_not_run_on():
    whole, B, out = torch.ones(8, 4), torch.ones(4, 4), torch.ones(4, 4)
    A = whole[4:]
    whole.untyped_storage().resize_(0)
    assert A.data_ptr()
    with pytest.raises(DeviceError, match=r"A has shape .* and no memory"):
        ka.ops.gemm(A, B, out=out)


def test_scales_and_experts_without_memory_are_named():
    A, B, scale = torch.ones(4, 4), [torch.ones(4, 4), torch.ones(4, 4)], torch.ones(())
    offsets = torch.tensor([2, 4], dtype=torch.int32)
    scale.untyped_storage().resize_(0)
    scaled = ka.ScaledOperand(A, scale, ka.ScaleMode.PER_TENSOR)
    with pytest.raises(DeviceError, match=r"A's scale has shape \(\) and no memory"):
        ka.ops.gemm(scaled, B[0])
    B[1].untyped_storage().resize_(0)
    with pytest.raises(DeviceError, match=r"B\[1\] has shape \(4, 4\) and no memory"):
        ka.ops.grouped_gemm(A, B, offsets)


def test_a_tensor_that_wraps_others_has_no_memory_of_its_own():
    from torch.testing._internal.two_tensor import TwoTensor

    A = TwoTensor(torch.ones(4, 4), torch.ones(4, 4))
    with pytest.raises(DeviceError, match=r"A has shape .* and no memory.*or it wraps others"):
        cpu_kernel().run(ka.GemmArguments(A, torch.ones(4, 4), torch.ones(4, 4)))


def test_unsupported_arguments_are_refused_before_anything_is_written():
    A, B, out = gemm_tensors(4, 4, 4, types=("int16",) * 3)
    out.fill_(7)

    class FloatOnly(CpuGemm):
        operands = (Operands(A="f32", B="f32", out="f32", accumulator="f32", majors="strided"),)

    with pytest.raises(UnsupportedError, match="A is int16; expected float32"):
        cpu_kernel(FloatOnly).run(ka.GemmArguments(A, B, out))
    assert (out == 7).all()


@pytest.mark.parametrize("args", [None, 3, "args"])
def test_run_refuses_what_is_no_arguments_object(args):
    with pytest.raises((UnsupportedError, ArgumentError), match=f"got {type(args).__name__}"):
        cpu_kernel().run(args)


def test_checks_are_made_once_for_each_arguments_object():
    class Counting(CpuGemm):
        asked = 0

        def _supports(self, args):
            seen.append(args)
            return ka.Status.success()

    seen = []
    kernel = cpu_kernel(Counting)
    args = gemm_arguments(4, 4, 4)
    kernel.run(args)
    asked = len(seen)
    kernel.run(args)
    kernel.run(args)
    assert len(seen) == asked


def test_assume_supported_args_skips_supports():
    class Refusing(CpuGemm):
        def _supports(self, args):
            return ka.Status.fail("never")

    kernel = cpu_kernel(Refusing)
    args = gemm_arguments(4, 4, 4)
    with pytest.raises(UnsupportedError, match="never"):
        kernel.run(args)
    artifact = ka.CompiledArtifact(None, kernel, args.signature)
    kernel.run(args, artifact, assume_supported_args=True)
    assert torch.equal(args.out.tensor, exact_product(args).float())


def test_a_kernel_without_run_says_so():
    class Unfinished(CpuGemm):
        _run = ka.Kernel._run

    with pytest.raises(TypeError, match="Unfinished does not implement _run"):
        cpu_kernel(Unfinished).run(gemm_arguments(4, 4, 4))


# Workspace -------------------------------------------------------------------------------


class Scratch(CpuGemm):
    given = None

    def get_workspace_size(self, args):
        return 64

    def _run(self, args, artifact, stream, workspace=None):
        type(self).given = workspace.clone()
        workspace.fill_(255)
        super()._run(args, artifact, stream, workspace)


def test_a_workspace_is_allocated_and_zeroed_each_time():
    kernel = cpu_kernel(Scratch)
    args = gemm_arguments(4, 4, 4)
    for _ in range(3):
        type(kernel).given = None
        kernel.run(args)
        assert type(kernel).given.dtype is torch.uint8
        assert type(kernel).given.shape == (64,)
        assert not type(kernel).given.any()


@pytest.mark.parametrize("size", [64, 100])
def test_a_workspace_that_is_large_enough_is_used_as_it_is(size):
    kernel = cpu_kernel(Scratch)
    workspace = torch.full((size,), 3, dtype=torch.uint8)
    kernel.run(gemm_arguments(4, 4, 4), workspace=workspace)
    assert (type(kernel).given == 3).all()
    assert (workspace == 255).all()


@pytest.mark.parametrize("size", [0, 1, 63])
def test_a_workspace_that_is_too_small_is_refused_with_both_sizes(size):
    kernel = cpu_kernel(Scratch)
    args = gemm_arguments(4, 4, 4)
    args.out.tensor.fill_(7)
    workspace = torch.empty(size, dtype=torch.uint8)
    with pytest.raises(WorkspaceError, match=f"has {size} bytes; 64 are needed"):
        kernel.run(args, workspace=workspace)
    assert (args.out.tensor == 7).all()


def test_a_workspace_of_another_type_or_device_is_refused():
    kernel = cpu_kernel(Scratch)
    args = gemm_arguments(4, 4, 4)
    with pytest.raises(WorkspaceError, match=r"float32 on cpu; expected torch\.uint8 on cpu"):
        kernel.run(args, workspace=torch.empty(64))
    with pytest.raises(WorkspaceError, match=r"uint8 on meta; expected torch\.uint8 on cpu"):
        kernel.run(args, workspace=torch.empty(64, dtype=torch.uint8, device="meta"))


@pytest.mark.parametrize(
    "workspace",
    [torch.zeros(1, dtype=torch.uint8).expand(64), torch.zeros(128, dtype=torch.uint8)[::2]],
)
def test_a_workspace_that_has_not_the_bytes_that_it_shows_is_refused(workspace):
    with pytest.raises(WorkspaceError, match="expected contiguous"):
        cpu_kernel(Scratch).run(gemm_arguments(4, 4, 4), workspace=workspace)


@pytest.mark.parametrize("workspace", [64, b"0" * 64, [0] * 64], ids=type)
def test_a_workspace_that_is_no_tensor_is_refused(workspace):
    with pytest.raises(WorkspaceError):
        cpu_kernel(Scratch).run(gemm_arguments(4, 4, 4), workspace=workspace)


# prepare ---------------------------------------------------------------------------------


def test_a_prepared_launch_takes_new_tensors_of_the_signature():
    kernel = cpu_kernel()
    launch = kernel.prepare(gemm_arguments(4, 4, 4))
    for seed, extent in enumerate((4, 5, 6)):
        args = gemm_arguments(extent, extent, extent, seed=seed)
        launch(*args.tensors)
        assert torch.equal(args.out.tensor, exact_product(args).float())


@pytest.mark.parametrize(
    "options",
    [{"accumulator_type": "float64"}, {"fp32_precision": "tf32"}, {"fp32_precision": "ieee"}],
    ids=str,
)
def test_a_prepared_launch_keeps_the_options_it_was_prepared_with(options):
    kernel = cpu_kernel()
    args = gemm_arguments(4, 4, 4, **options)
    kernel.prepare(args)(*args.tensors)
    assert torch.equal(args.out.tensor, exact_product(args).float())


def test_a_prepared_launch_refuses_tensors_of_another_signature():
    launch = cpu_kernel().prepare(gemm_arguments(4, 4, 4))
    with pytest.raises(SignatureError):
        launch(*gemm_tensors(4, 4, 4, types=("f64",) * 3))


def test_prepare_refuses_what_run_would_refuse():
    with pytest.raises(UnsupportedError, match="the kernel runs on cuda"):
        cuda_kernel().prepare(gemm_arguments(64, 64, 64, types=BF16))


# Identity --------------------------------------------------------------------------------


def test_kernels_of_equal_metadata_are_equal():
    kernel = cuda_kernel()
    assert kernel.metadata.rebuild() == kernel
    assert hash(kernel.metadata.rebuild()) == hash(kernel)
    assert kernel != kernels_of(type(kernel))[1]
    assert kernel != kernel.metadata


def test_repr_is_the_name():
    kernel = LoopGemm(LoopGemm.metadata_of_tile(16))
    assert repr(kernel) == "<LoopGemm_tile16>"


# Epilogues -------------------------------------------------------------------------------


def test_a_kernel_with_an_epilogue_refuses_arguments_without_one():
    from dataclasses import replace

    plain = cpu_kernel()
    fused = type(plain)(replace(plain.metadata, epilogue="relu"))
    status = fused.supports(gemm_arguments(4, 4, 4))
    assert status.rule == "epilogue"
    assert "no epilogue is asked for" in status.error

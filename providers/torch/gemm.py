"""The dense matrix product by torch.mm and torch.bmm."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from kernel_api import _float32
from kernel_api.arguments import Arguments, GemmArguments, ScaleMode
from kernel_api.arguments.scaled import BLOCK, VECTOR_BYTES
from kernel_api.artifact import CompiledArtifact
from kernel_api.devices import require_streams
from kernel_api.dtypes import dtype
from kernel_api.kernel import Kernel, LauncherInOrder
from kernel_api.metadata import DesignMetadata
from kernel_api.operands import as_torch
from kernel_api.providers.streams import on_stream
from kernel_api.providers.torch import TorchProvider
from kernel_api.space import Miss, Operands, Space, rule

#: What is passed on as it is; what else there is becomes torch's, in the same memory.
_PLAIN = frozenset((torch.Tensor,))


class TorchProduct(Kernel):
    """One of torch's functions."""

    arguments: ClassVar[type[Arguments] | None] = GemmArguments
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def product(self, args: Any) -> Callable[..., None]:
        """Computes the operands' tensors, those like them of other arguments too. It keeps none
        but scales."""
        raise NotImplementedError

    def _run(
        self, args: Any, artifact: CompiledArtifact, stream: Any, workspace: Any = None
    ) -> None:
        with on_stream(stream, args.device.index):
            self.product(args)(*args.tensors)

    def _launcher(self, args: Any, artifact: CompiledArtifact) -> Callable[..., None]:
        launch, names = self._on_tensors(args), args.operand_names
        kinds = tuple((one.dtype, one.device, one.dim()) for one in args.tensors)
        blueprint, is_dense = args.blueprint(), type(args) is GemmArguments

        def checked(*tensors: Any, stream: Any = None, **others: Any) -> None:
            if not _PLAIN.issuperset(map(type, tensors)):
                tensors = tuple(map(as_torch, tensors, names))
            if others or len(tensors) != len(names) or (is_dense and not _fit(kinds, *tensors)):
                self.run(blueprint(*tensors, **others), artifact, stream)  # says what is wrong
            else:
                launch(*tensors, stream=stream)

        return checked

    def _launcher_in_order(self, args: Any, artifact: CompiledArtifact) -> LauncherInOrder:
        launch = self._on_tensors(args)  # which are of just these sizes: nothing is to be checked

        def launch_in_order(tensors: Sequence[Any], values: Sequence[Any]) -> None:
            launch(*tensors)

        return launch_in_order

    def _on_tensors(self, args: Any) -> Callable[..., None]:
        multiply, device, names = self.product(args), args.device, args.operand_names

        def launch(*tensors: Any, stream: Any = None) -> None:
            if not _PLAIN.issuperset(map(type, tensors)):
                tensors = tuple(map(as_torch, tensors, names))
            if stream is None:
                multiply(*tensors)
            else:
                require_streams(device, stream)
                with on_stream(stream, device.index):
                    multiply(*tensors)

        return launch


def _fit(kinds: tuple[Any, ...], *tensors: Any) -> bool:
    """Whether they are the operands of a product of these types, devices and ranks: torch would
    resize out, and says of the rest what only it knows."""
    if tuple([(one.dtype, one.device, one.dim()) for one in tensors]) != kinds:
        return False
    A, B, out = (one.shape for one in tensors)
    return bool(A[:-2] == B[:-2] and A[-1] == B[-2] and out == (*A[:-1], B[-1]))


_FLOAT32 = dtype("float32")


@TorchProvider.register
class TorchGemm(TorchProduct):
    """out = A · B by torch.mm, or torch.bmm for a batch."""

    family: ClassVar[str] = "torch.mm"
    operands = (
        Operands(
            A="f16 | bf16 | f32", B="like A", out="like A", accumulator="f32", majors="strided"
        ),
        Operands(A="f16 | bf16", B="like A", out="f32", accumulator="f32", majors="strided"),
        Operands(A="f64", B="f64", out="f64", accumulator="f64", majors="strided"),
    )
    space = Space()
    design = DesignMetadata

    @rule("torch widens 16-bit products to float32 on a GPU only")
    def _(operands: Any, args: Any) -> bool:
        widens = operands.out.dtype is not operands.A.dtype
        return not widens or args.device.type != "cpu"

    def product(self, args: Any) -> Callable[..., None]:
        if args.A.dtype is _FLOAT32:
            return functools.partial(multiply_into, fp32_precision=args.fp32_precision)
        multiply = torch.bmm if args.out.rank == 3 else torch.mm
        if args.A.dtype is not args.out.dtype:
            multiply = functools.partial(multiply, out_dtype=args.out.dtype.torch)
        return functools.partial(_without_gradient, multiply)


def _without_gradient(multiply: Any, A: Any, B: Any, out: Any) -> None:
    """torch writes into nothing that is to be differentiated; to ask costs less than to forbid."""
    if A.requires_grad or B.requires_grad or out.requires_grad:
        with torch.no_grad():
            multiply(A, B, out=out)
    else:
        multiply(A, B, out=out)


def multiply_into(A: Any, B: Any, out: Any, fp32_precision: str | None = None) -> None:
    """out = A · B, with float32 multiplied as asked whatever torch's own setting is."""
    multiply = torch.bmm if A.dim() == 3 else torch.mm
    with torch.no_grad(), _float32.products(fp32_precision):
        if out.dtype is A.dtype:
            multiply(A, B, out=out)
        else:
            multiply(A, B, out_dtype=out.dtype, out=out)


@TorchProvider.register
class TorchIntegerGemm(TorchProduct):
    """out = A · B of 8-bit integers by torch._int_mm."""

    family: ClassVar[str] = "torch.int_mm"
    operands = (Operands(A="i8", B="i8", out="i32", accumulator="i32", majors="strided"),)
    space = Space()
    design = DesignMetadata

    @rule("torch._int_mm takes matrices, not batches")
    def _(args: GemmArguments) -> bool:
        return args.out.rank == 2

    @rule("torch._int_mm writes a contiguous out")
    def _(args: GemmArguments) -> bool:
        return bool(args.out.tensor.is_contiguous())

    @rule("cuBLAS multiplies integers with more than 16 rows, N and K multiples of 8")
    def _(args: GemmArguments) -> bool:
        fits = args.M > 16 and args.N % 8 == 0 and args.K % 8 == 0
        return args.device.type == "cpu" or fits

    def product(self, args: Any) -> Callable[..., None]:
        return _integers_on_cpu if args.device.type == "cpu" else _integers


def _integers(A: Any, B: Any, out: Any) -> None:
    torch._int_mm(A, B, out=out)


def _integers_on_cpu(A: Any, B: Any, out: Any) -> None:
    torch._int_mm(_in_rows(A), _in_rows(B), out=out)


def _in_rows(matrix: Any) -> Any:
    """The matrix; a copy if its rows, or columns, are nearer than they are long, as of a broadcast
    or of a column that is transposed: torch._int_mm reads those wrong on the CPU."""
    (rows, columns), (row, column) = matrix.shape, matrix.stride()
    nearer = row < columns if column == 1 else row == 1 and column < rows
    return matrix.clone(memory_format=torch.contiguous_format) if nearer else matrix


def _of_8_bit_floats(out: str, **modes: str) -> Iterator[Operands]:
    """What torch._scaled_mm takes with such scales: cuBLAS has no product of two e5m2."""
    for a, b in (("e4m3", "e4m3 | e5m2"), ("e5m2", "e4m3")):
        yield Operands(
            A=a,
            B=b,
            out=out,
            accumulator="f32",
            majors="A:k B:k out:n",
            scales=modes,
            alignments=({"A": 16, "B": 16, "out": 16},),
            why_aligned="cuBLAS needs 8-bit floats in multiples of 16 bytes",
        )


class TorchScaledProduct(TorchProduct):
    """out = (A · scale) · (B · scale) of 8-bit floats by torch._scaled_mm."""

    space = Space()
    design = DesignMetadata

    @rule("torch._scaled_mm takes matrices, not batches")
    def _(args: GemmArguments) -> bool:
        return args.out.rank == 2

    @rule("torch._scaled_mm writes a contiguous out")
    def _(args: Any) -> bool:
        return bool(args.out.tensor.is_contiguous())

    @rule("cuBLAS multiplies 8-bit floats with N and K multiples of 16")
    def _(args: GemmArguments) -> bool:
        return args.device.type == "cpu" or (args.N % 16 == 0 and args.K % 16 == 0)


@TorchProvider.register
class TorchScaledGemm(TorchScaledProduct):
    """With one scale each, or one per row of A and column of B."""

    family: ClassVar[str] = "torch.scaled_mm"
    operands = (
        *_of_8_bit_floats("f16 | bf16 | f32", A="per_tensor", B="per_tensor"),
        # cuBLAS scales rows for bfloat16 results only.
        *_of_8_bit_floats("bf16", A="per_row", B="per_row"),
    )

    @rule("torch._scaled_mm takes scales without gaps")
    def _(args: Any) -> bool:
        return all(operand.scale.tensor.is_contiguous() for operand in (args.A, args.B))

    @rule("torch._scaled_mm takes one scale for all")
    def _(args: Any) -> bool:
        return all(
            operand.mode is not ScaleMode.PER_TENSOR or operand.scale.rank == 0
            for operand in (args.A, args.B)
        )

    @rule("torch before 2.13 scales rows on GPUs alone")
    def _(args: Any) -> bool:
        on_cpu = args.device.type == "cpu" and args.A.mode is ScaleMode.PER_ROW
        return not on_cpu or torch.__version__ >= "2.13"

    def product(self, args: Any) -> Callable[..., None]:
        scale_a, scale_b = args.A.scale.tensor, args.B.scale.tensor
        if args.A.mode is ScaleMode.PER_ROW:
            scale_a, scale_b = scale_a.unsqueeze(1), scale_b.unsqueeze(0)

        def multiply(A: Any, B: Any, out: Any) -> None:
            with torch.no_grad():
                torch._scaled_mm(A, B, scale_a, scale_b, out_dtype=out.dtype, out=out)

        return multiply


#: Blocks of K and rows of A whose scales cuBLAS reads at once. It takes others for granted where
#: blocks of K are fewer, and torch does not look.
_GROUP = 4
#: Of CUDA, since which cuBLAS has it.
_SCALES_BLOCKS = (12, 9)


@TorchProvider.register
class TorchBlockScaledGemm(TorchScaledProduct):
    """With one scale per 128 elements of a row of A and per 128x128 of B, which are copied first
    where they do not lie as cuBLAS reads them: along M, and along K."""

    family: ClassVar[str] = "torch.scaled_mm_blocks"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    targets: ClassVar[tuple[str, ...]] = ("sm_90a",)
    operands = tuple(_of_8_bit_floats("f16 | bf16 | f32", A="block_1x128", B="block_128x128"))

    @rule("cuBLAS scales blocks since CUDA 12.9")
    def _(args: Any) -> bool:
        cuda = torch.version.cuda
        return cuda is None or tuple(map(int, cuda.split(".")[:2])) >= _SCALES_BLOCKS

    @rule("cuBLAS scales at least one row, column and product in blocks")
    def _(args: Any) -> bool:
        return bool(min(args.M, args.N, args.K) > 0)

    @rule("cuBLAS reads scales of 4 blocks along K, and of 4 rows of A")
    def _(args: Any) -> bool | Miss:
        blocks = -(-args.K // BLOCK)
        if blocks % _GROUP == 0 and args.M % _GROUP == 0:
            return True
        return Miss(f"there are {blocks} blocks along K and {args.M} rows")

    def product(self, args: Any) -> Callable[..., None]:
        scales = args.A.scale.tensor, args.B.scale.tensor

        def multiply(A: Any, B: Any, out: Any) -> None:
            with torch.no_grad():
                scale_a, scale_b = map(_columns_together, scales)
                torch._scaled_mm(A, B, scale_a, scale_b, out_dtype=out.dtype, out=out)

        return multiply


def _columns_together(scale: Any) -> Any:
    """The matrix with contiguous columns, one behind the other, at a multiple of 16 bytes; a copy
    if it is not so."""
    strides = 1, scale.shape[0]
    if scale.stride() == strides and scale.data_ptr() % VECTOR_BYTES == 0:
        return scale
    return torch.empty_strided(scale.shape, strides, dtype=scale.dtype, device=scale.device).copy_(
        scale
    )

"""Base classes of the throwaway kernels that tests register.

``CpuGemm`` really computes, on the CPU; ``CudaGemm`` declares a space with majors and alignments
and compiles to a placeholder; ``LoopGemm`` writes ``generate_kernels`` as a loop.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

import kernel_api as ka
from kernel_api.metadata import (
    BLASDesignMetadata,
    DesignMetadata,
    GemmOperandsMetadata,
    KernelMetadata,
    TensorAttributes,
)
from kernel_api.space import Operands, Space, rule

ROW_MAJOR, COLUMN_MAJOR = (0, 0, 1), (0, 1, 0)

#: Whether tests that sample the registry run on all of it.
EVERY_KERNEL = os.environ.get("KERNEL_API_TEST_EVERY_KERNEL") == "1"


@functools.cache
def generated_by(kernel_class: type[ka.Kernel]) -> tuple[ka.Kernel, ...]:
    """All kernels of a class without an epilogue, made once for all tests of a process."""
    return tuple(kernel_class.generate_kernels(lambda metadata: True))


def sample_of(kernels: Sequence[ka.Kernel], seed: int = 0) -> list[ka.Kernel]:
    """Kernels drawn such that each class has all of its operands and all of its designs among them.

    ``KERNEL_API_TEST_EVERY_KERNEL=1`` takes them all.
    """
    if EVERY_KERNEL:
        return list(kernels)
    kept: dict[Any, ka.Kernel] = {}
    for kernel in random.Random(seed).sample(kernels, len(kernels)):
        kept.setdefault((type(kernel), kernel.metadata.operands), kernel)
        kept.setdefault((type(kernel), kernel.metadata.design), kernel)
    return list(dict.fromkeys(kept.values()))


class CpuGemm(ka.Kernel):
    """Any element types, any strides, on the CPU; computed in float64 (int64 for integers)."""

    arguments = ka.GemmArguments
    devices = ("cpu",)
    operands = (Operands(A="any", B="any", out="any", accumulator="any", majors="strided"),)
    space = Space()
    design = DesignMetadata

    def _run(self, args: Any, artifact: Any, stream: Any, workspace: Any = None) -> None:
        args.out.tensor.copy_(exact_product(args))


def exact_product(args: ka.GemmArguments) -> torch.Tensor:
    """A · B in float64, or int64 for integers."""
    A, B, _ = args.tensors
    wide = torch.float64 if A.dtype.is_floating_point else torch.int64
    return A.to(wide) @ B.to(wide)


class CudaGemm(ka.Kernel):
    """bf16 for any GPU; aligned designs first. Compiles to a string, never runs."""

    arguments = ka.GemmArguments
    targets: ClassVar[tuple[str, ...]] = ("sm_80",)
    operands = (
        Operands(
            A="bf16",
            B="like A",
            out="bf16 | f32",
            accumulator="f32",
            alignments=({"A": 16, "B": 16, "out": 16}, {}),
            why_aligned="copies need leading dimensions that are multiples of 16 bytes",
        ),
    )
    space = Space(tile_shape=((128, 128, 32), (64, 64, 32)), cluster_shape=((1, 1, 1),))
    design = BLASDesignMetadata

    @rule("the large tile is for aligned operands")
    def _(design: Any, operands: Any) -> bool:
        return design.tile_shape[0] == 64 or operands.A.divisibility > 1

    def compile(self, args: Any, cc: Any = None) -> ka.CompiledArtifact:
        return ka.CompiledArtifact(f"code for {cc}", self)

    def _run(self, args: Any, artifact: Any, stream: Any, workspace: Any = None) -> None:
        raise AssertionError("this kernel has no machine code to launch")


class LoopGemm(ka.Kernel):
    """float32 kernels written as a loop, one per tile extent in ``tiles``, on the CPU."""

    devices = ("cpu",)
    tiles: ClassVar[tuple[int, ...]] = (16, 32)

    @classmethod
    def generate_kernels(
        cls,
        metadata_filter: Callable[[KernelMetadata], bool],
        epilogue_args: Any = None,
        cc: int | None = None,
    ) -> Any:
        return [
            cls(metadata)
            for metadata in map(cls.metadata_of_tile, cls.tiles)
            if metadata_filter(metadata)
        ]

    @classmethod
    def metadata_of_tile(cls, tile: int, name: str | None = None) -> KernelMetadata:
        attributes = TensorAttributes("float32", ROW_MAJOR)
        return KernelMetadata(
            kernel_name=name or f"{cls.__qualname__}_tile{tile}",
            kernel_class=cls,
            operands=GemmOperandsMetadata(attributes, attributes, attributes, "float32"),
            design=BLASDesignMetadata((tile, tile, 1)),
        )

    def _run(self, args: Any, artifact: Any, stream: Any, workspace: Any = None) -> None:
        args.out.tensor.copy_(exact_product(args))


def kernels_of(kernel_class):
    return [
        kernel
        for operands in kernel_class.operand_variants()
        for kernel in kernel_class.kernels_for(operands)
    ]


def cpu_kernel(kernel_class=CpuGemm):
    """A kernel of a class made for this call, so that no other test has compiled it."""
    fresh = type(kernel_class)(kernel_class.__name__, (kernel_class,), {})
    (kernel,) = kernels_of(fresh)
    return kernel


def cuda_kernel(kernel_class=CudaGemm):
    fresh = type(kernel_class)(kernel_class.__name__, (kernel_class,), {})
    return kernels_of(fresh)[0]

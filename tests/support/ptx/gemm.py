"""Compiles a GEMM kernel of the sm80 family, and runs it on CPU tensors in the emulator."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

import numpy as np
import torch

import kernel_api as ka
from kernel_api.providers.cutedsl import compiler, machine_code
from kernel_api.targets import target
from support.ptx import GlobalMemory, Placed, Program, launch, parse, tensor_parameter

#: The implementation's order of each operand's last two modes.
_MODES = {"A": (-2, -1), "B": (-1, -2), "out": (-2, -1)}


@dataclass(frozen=True)
class EmulatedGemm:
    """A kernel compiled for the types, ranks and majors of some arguments."""

    kernel: ka.Kernel
    text: str
    program: Program
    shared_bytes: int

    @classmethod
    def compile(cls, kernel: ka.Kernel, args: ka.GemmArguments, cc: str = "sm_80") -> EmulatedGemm:
        placeholders = [
            compiler.fake_tensor(operand, kernel.metadata.operands.tensors[name])
            for name, operand in zip(args.operand_names, args.operands, strict=True)
        ]
        placeholders.append(compiler.current_stream_placeholder())
        with tempfile.TemporaryDirectory() as folder:
            compiled = compiler.compile(
                kernel.implementation(), placeholders, target(cc), f"--keep-ptx --dump-dir {folder}"
            )
            text = compiled.artifacts.PTX
        program = parse(text)
        resources = machine_code.resources(compiled)
        assert resources is not None
        return cls(
            kernel, text, program, resources.shared_memory_bytes - program.static_shared_bytes
        )

    def run(self, args: ka.GemmArguments) -> None:
        """Overwrites ``args.out``; EmulationError if the kernel does what it must not."""
        memory = GlobalMemory()
        placed = {name: self._place(memory, args, name) for name in args.operand_names}
        tile_m, tile_n, _ = self.kernel.metadata.design.tile_shape
        launch(
            self.program,
            memory,
            [self._parameter(args, operand) for operand in placed.values()],
            blocks=-(-args.M // tile_m) * -(-args.N // tile_n) * args.L,
            threads=self.kernel.metadata.design.threads,
            shared_bytes=self.shared_bytes,
        )
        assert memory.unwritten(placed["out"]) == 0, "a part of the output is not written"
        storage_bytes(args.out.tensor)[:] = memory.storage(placed["out"])

    def _place(self, memory: GlobalMemory, args: ka.GemmArguments, name: str) -> Placed:
        operand = getattr(args, name)
        itemsize = operand.dtype.itemsize
        return memory.place(
            name,
            storage_bytes(operand.tensor),
            operand.tensor.storage_offset() * itemsize,
            operand.shape,
            [stride * itemsize for stride in operand.stride],
            itemsize,
            alignment=self.kernel.metadata.operands.tensors[name].alignment,
            output=name in args.output_names,
        )

    def _parameter(self, args: ka.GemmArguments, placed: Placed) -> bytes:
        """(M, K), (N, K) and (M, N), then the batch; without the stride that is always 1."""
        operand = getattr(args, placed.name)
        modes = _MODES[placed.name] + ((0,) if operand.rank == 3 else ())
        return tensor_parameter(
            placed.pointer,
            [operand.shape[mode] for mode in modes],
            [operand.stride[mode] for mode in modes if mode != operand.unit_mode],
        )


def storage_bytes(tensor: torch.Tensor) -> np.ndarray:
    """All bytes of a CPU tensor's storage, padding included; not a copy."""
    everything = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return everything.numpy()

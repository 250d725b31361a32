"""Compiles a kernel of the library, and runs it on CPU tensors in the emulator, as on Hopper.

It takes the way of a real call: the kernel's own code compiles it and makes the arguments of the
launch; instead of the TVM-FFI function it finds one of ours.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch

import kernel_api as ka
from kernel_api import _compile_cache
from kernel_api._workspaces import ZEROED
from kernel_api.providers.cutedsl import compiler
from kernel_api.targets import Target, target
from support.ptx.gemm import storage_bytes
from support.ptx.hopper import launch
from support.ptx.host import HostFunction, HostTensor, Launch
from support.ptx.memory import GlobalMemory, Placed
from support.ptx.program import Program, parse_all

_ALIGNMENT = 128  # of a workspace

_DLPACK_CODES = {
    torch.bool: 6,
    torch.int8: 0,
    torch.int16: 0,
    torch.int32: 0,
    torch.int64: 0,
    torch.uint8: 1,
    torch.float16: 2,
    torch.float32: 2,
    torch.float64: 2,
    torch.bfloat16: 4,
    torch.float8_e4m3fn: 10,
    torch.float8_e5m2: 12,
    torch.float8_e8m0fnu: 14,
}


@dataclass(frozen=True)
class EmulatedKernel:
    """A kernel compiled for the signature of some arguments.

    Attributes:
        text: The PTX.
        programs: The kernels in it, by name.
    """

    kernel: Any
    artifact: Any
    text: str
    programs: dict[str, Program]
    host: HostFunction

    @classmethod
    def compile(cls, kernel: ka.Kernel, args: Any, cc: str = "sm_90a") -> EmulatedKernel:
        """Tests of a file often run a kernel on several operands: the last ones are kept."""
        key = kernel, args.signature, cc
        if key not in _compiled:
            if len(_compiled) == _KEPT:
                del _compiled[next(iter(_compiled))]
            _compiled[key] = cls._compile(kernel, args, target(cc))
        return _compiled[key]

    @classmethod
    def _compile(cls, kernel: ka.Kernel, args: Any, asked: Target) -> EmulatedKernel:
        """What is emulated spills nothing either, as long as it is compiled anyway; but attention,
        whose options, all at once, may take more registers than there are."""
        with tempfile.TemporaryDirectory() as folder:
            options = f"{compiler.OPTIONS} --keep-ptx --dump-dir {folder}"
            compilation = _compile_cache.Compilation(kernel, args, asked)
            token = _compile_cache._running.set(compilation)
            try:
                with mock.patch.object(compiler, "OPTIONS", options):
                    artifact = kernel._compile(args)
            finally:
                _compile_cache._running.reset(token)
            used = kernel.read_resources(artifact)
            crowded = kernel.family.partition(".")[2].startswith("sdpa")
            assert crowded or not used.spill_bytes, f"{kernel.metadata.kernel_name}: {used}"
            compiled = artifact.compiled_obj
            text = compiled.artifacts.PTX
        programs = {program.name: program for program in parse_all(text)}
        host = HostFunction(compiled, lambda name: list(programs[name].parameters.values()))
        return cls(kernel, artifact, text, programs, host)

    def with_text(self, text: str) -> EmulatedKernel:
        """The same with other PTX."""
        programs = {program.name: program for program in parse_all(text)}
        return replace(self, text=text, programs=programs)

    def run(self, args: Any, *, multiprocessors: int = 4, seed: int = 0) -> None:
        """Overwrites the outputs of `args`; EmulationError if the kernel does what it must not.

        Args:
            multiprocessors: Of the GPU that the kernel believes to be on.
            seed: Of the interleaving.
        """
        memory = _Tensors(args, self.kernel)
        with _pretended(multiprocessors):
            size = self.kernel.get_workspace_size(args)
            workspace = torch.full((size,), 0xFF, dtype=torch.uint8)
            if size:
                memory.add_workspace(workspace)
            asked = self._launch_arguments(args, workspace if size else None)
        copies = sum(getattr(self.kernel, "repacked", ()))
        for turn, one in enumerate(self.host.launches(*map(memory.argument, asked))):
            launch(
                self.programs[one.kernel],
                memory.memory,
                one,
                seed=seed,
                cuts_edges=self.kernel.family.startswith("sm90.gemm"),
                reads_at_once=0 < turn < copies,  # of two copies the second
                has_inputs=turn > 0 and copies < 2,
            )
        memory.copy_back()

    def launches(self, args: Any, *, multiprocessors: int = 132) -> list[Launch]:
        """What a call would launch, of operands of any size: nothing is read."""
        with _pretended(multiprocessors):
            size = self.kernel.get_workspace_size(args)
            workspace = torch.empty(size, dtype=torch.uint8) if size else None
            asked = self._launch_arguments(args, workspace)
        return self.host.launches(*map(_host_argument, asked))

    def _launch_arguments(self, args: Any, workspace: Any) -> tuple[Any, ...]:
        """What the kernel would call the TVM-FFI function with."""
        calls: list[tuple[Any, ...]] = []
        self.artifact.launchers.clear()
        with mock.patch.object(compiler, "raw_function", lambda _: lambda *a: calls.append(a)):
            self.kernel._run(args, self.artifact, None, workspace)
        self.artifact.launchers.clear()
        (call,) = calls
        return call


_KEPT = 16
_compiled: dict[tuple[ka.Kernel, Hashable, str], EmulatedKernel] = {}


class _Tensors:
    """Of a call, in emulated memory."""

    def __init__(self, args: Any, kernel: Any) -> None:
        self.memory = GlobalMemory()
        self._attributes = kernel.metadata.operands.tensors
        self._cuts_pieces = kernel.family.endswith("_repacked")
        self._placed: dict[int, tuple[torch.Tensor, Placed]] = {}  # by pointer
        self._outputs: list[str] = list(args.outputs)
        self._left = _bytes_left(args)
        self._addresses: dict[int, int] = {}
        # What is written in place of an operand is where that one is, too.
        operands = sorted(args.named_operands.items(), key=lambda o: o[0] not in args.overwriting)
        for name, operand in operands:
            added = name in (*args.accumulated, *args.overwriting)
            how = {"output": name in self._outputs and not added, "scratch": added}
            if getattr(operand, "discrete", False):
                self._add_each(name, operand, **how)
            else:
                self._add(name, operand.tensor, **how)

    def _add_each(self, name: str, operand: Any, **how: bool) -> None:
        """Matrices that lie anywhere, each by itself, and their addresses."""
        placed = self._add(name, operand.tensor)
        parts = {f"{name} {i}": part.tensor for i, part in enumerate(operand.memory)}
        pointers = [self._add(part, tensor, **how).pointer for part, tensor in parts.items()]
        self.memory.storage(placed)[:] = np.array(pointers, np.int64).view(np.uint8)
        if name in self._outputs:
            self._outputs.remove(name)
            self._outputs += parts
        if name in self._left:
            self._left.update(dict.fromkeys(parts, 0))

    def _add(
        self, name: str, tensor: torch.Tensor, *, output: bool = False, scratch: bool = False
    ) -> Placed:
        before = self._placed.get(tensor.data_ptr())
        if before is not None and before[0].numel() >= tensor.numel() > 0:
            return before[1]  # a view of the same elements
        itemsize = tensor.element_size()
        asked = self._attributes.get(name)
        placed = self.memory.place(
            name,
            storage_bytes(tensor),
            tensor.storage_offset() * itemsize,
            tensor.shape,
            [stride * itemsize for stride in tensor.stride()],
            itemsize,
            alignment=asked.alignment if asked is not None else _alignment(tensor),
            output=output,
            scratch=scratch,
            whole_pieces=self._cuts_pieces and not output,
        )
        self._placed[tensor.data_ptr()] = tensor, placed
        return placed

    def add_workspace(self, workspace: torch.Tensor) -> None:
        placed = self.memory.place(
            "workspace",
            storage_bytes(workspace),
            0,
            workspace.shape,
            (1,),
            1,
            alignment=_ALIGNMENT,
            scratch=True,
        )
        self._addresses[workspace.data_ptr()] = placed.pointer
        # The kernel fills its beginning with zeros, in the tensor, before it launches.
        self._placed[workspace.data_ptr()] = workspace, placed

    def argument(self, value: Any) -> Any:
        """As the host code takes it."""
        if isinstance(value, tuple):
            return tuple(map(self.argument, value))
        if not isinstance(value, torch.Tensor):
            if value in self._addresses:
                workspace, placed = self._placed[value]
                self.memory.storage(placed)[:] = storage_bytes(workspace)
            return self._addresses.get(value, value)
        found = self._placed.get(value.data_ptr())
        placed = found[1] if found else self._add(f"tensor {len(self._placed)}", value)
        return _host_tensor(value, placed.pointer)

    def copy_back(self) -> None:
        for tensor, placed in self._placed.values():
            if placed.name in self._outputs:
                if placed.name in self._left:
                    missing, left = self.memory.unwritten(placed), self._left[placed.name]
                    what = f"{missing} bytes of {placed.name} are not written"
                    assert missing == left, f"{what}; expected {left}" if left else what
                storage_bytes(tensor)[:] = self.memory.storage(placed)
            if placed.name == "workspace":
                left = self.memory.storage(placed)[:ZEROED]
                assert not left.any(), "the beginning of the workspace is not left zero"


def _host_tensor(tensor: torch.Tensor, pointer: int) -> HostTensor:
    kind = (_DLPACK_CODES[tensor.dtype], 8 * tensor.element_size(), 1)
    return HostTensor(pointer, kind, tuple(tensor.shape), tuple(tensor.stride()))


def _host_argument(value: Any) -> Any:
    """As the host code takes it, where it is."""
    if isinstance(value, tuple):
        return tuple(map(_host_argument, value))
    return _host_tensor(value, value.data_ptr()) if isinstance(value, torch.Tensor) else value


def _bytes_left(args: Any) -> dict[str, int]:
    """Of each output that is not added to, those that a kernel must not write."""
    partly, found = args.rows_written(), {}
    for name, operand in args.outputs.items():
        if name not in (*args.accumulated, *args.overwriting):
            tensor, left = operand.tensor, 0
            if name in partly:
                stays = torch.ones(tensor.shape[0], dtype=torch.bool)
                stays[partly[name]] = False
                left = int(stays.sum()) * tensor[0].numel() * tensor.element_size()
            found[name] = left
    return found


@contextmanager
def _pretended(multiprocessors: int) -> Iterator[None]:
    """A GPU with so many multiprocessors, wherever the library asks for them."""
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("kernel_api"):
                for function in ("sm_count", "multiprocessors_of"):
                    if hasattr(module, function):
                        stack.enter_context(
                            mock.patch.object(module, function, lambda *_: multiprocessors)
                        )
        yield


def _alignment(tensor: torch.Tensor) -> int:
    """Bytes that divide the address and all strides but the one of 1, and those of modes that have
    one place; 16 at most."""
    itemsize = tensor.element_size()
    modes = zip(tensor.shape, tensor.stride(), strict=True)
    strides = [stride for extent, stride in modes if stride != 1 and extent > 1]
    return math.gcd(16, *(stride * itemsize for stride in (tensor.storage_offset(), *strides)))


def poison(tensor: torch.Tensor) -> None:
    """Fill the whole storage with NaN."""
    storage_bytes(tensor)[:] = np.uint8(0xFF)

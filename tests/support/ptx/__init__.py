"""An emulator of PTX, which runs compiled kernels where there is no GPU.

``parse`` reads the text of a kernel, ``GlobalMemory`` holds its tensors, ``launch`` runs it. All
threads of a block execute an instruction at once, as numpy arrays. Beside the result, the emulator
finds what a GPU would let pass: accesses outside of tensors, reads of memory never written, races
between warps, reads of asynchronous copies that nobody has waited for.

It knows the instructions that this project's kernels for sm_80 compile to; any other is an error.
"""

from support.ptx.errors import EmulationError
from support.ptx.launch import launch, tensor_parameter
from support.ptx.memory import GlobalMemory, Placed
from support.ptx.program import Program, parse

__all__ = [
    "EmulationError",
    "GlobalMemory",
    "Placed",
    "Program",
    "launch",
    "parse",
    "tensor_parameter",
]

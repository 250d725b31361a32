"""Runs the host half of a compiled kernel against a CUDA driver of ours, which records launches.

What a kernel is launched with (tensor maps, layouts, grid, cluster, shared memory) is thus made
by the very code that makes it on a machine with a GPU. Nothing that it is given is read: pointers
may point anywhere.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cutlass._mlir._mlir_libs._cutlass_ir import _aot_support

from support.ptx.elf import LoadedObject
from support.ptx.errors import EmulationError

_SHARED_MEMORY = 227 * 1024  # what a block may ask for on Hopper
_SHARED_MEMORY_ATTRIBUTE = 97  # cudaDevAttrMaxSharedMemoryPerBlockOptin
_CLUSTER_ATTRIBUTE = 4  # cudaLaunchAttributeClusterDimension
_CUDA_DEVICE = 2  # kDLCUDA
# kTVMFFIInt, kTVMFFIFloat, kTVMFFIDLTensorPtr, kTVMFFIArray
_INT, _FLOAT, _TENSOR, _ARRAY = 1, 3, 7, 71
_OBJECT_HEADER = 24  # bytes of a TVMFFIObject


@dataclass(frozen=True)
class HostTensor:
    """What a kernel's host code learns of a tensor.

    Attributes:
        type: DLPack's code, bits of an element, lanes.
    """

    pointer: int
    type: tuple[int, int, int]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


Argument = HostTensor | int | float | tuple["Argument", ...]


@dataclass(frozen=True)
class Launch:
    """What the driver was asked to launch.

    Attributes:
        kernel: Its name in the PTX.
        parameters: Bytes of each.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    parameters: tuple[bytes, ...]


class HostFunction:
    """The TVM-FFI function of something that ``cute.compile`` returned.

    Args:
        sizes: Of the parameters of a kernel in bytes, by the kernel's name.
    """

    def __init__(self, compiled: Any, sizes: Callable[[str], Sequence[int]]) -> None:
        # What its export_to_c does, but for the time that optimising code takes that runs once.
        image = _aot_support.export_module_to_bytes(
            compiled.ir_module, format="o", opt_level=0, enable_pic=True
        )
        self._sizes = sizes
        self._launches: list[Launch] = []
        self._kernels: dict[int, str] = {}
        self._message = ""
        self._initialised = False
        self._functions = {name: self._callback(name) for name in _SIGNATURES}
        self._object = LoadedObject(image, self._resolve)
        prototype = ctypes.CFUNCTYPE(_int, _pointer, _pointer, ctypes.c_int32, _pointer)
        self._call = prototype(self._object.address(f"__tvm_ffi_{compiled.function_name}"))

    def launches(self, *args: Argument) -> list[Launch]:
        """What a call with these arguments would launch.

        Raises:
            EmulationError: with the text of the host code, if it refuses the arguments.
        """
        self._launches = []
        kept: list[Any] = []  # alive until the call returns
        packed = b"".join(_packed(arg, kept) for arg in args)
        result = ctypes.create_string_buffer(16)
        if self._call(None, packed, len(args), ctypes.addressof(result)):
            raise EmulationError(f"the host code refuses its arguments: {self._message}")
        return self._launches

    # The driver ----------------------------------------------------------------------------------

    def _resolve(self, name: str) -> int:
        if name == "_GLOBAL_OFFSET_TABLE_":
            return 0
        function = self._functions.get(name)
        if function is None:
            raise EmulationError(f"the host code calls {name}, which the emulator does not know")
        return ctypes.cast(function, _pointer).value or 0

    def _callback(self, name: str) -> Any:
        return ctypes.CFUNCTYPE(
            _int if name != "TVMFFIEnvGetStream" else _pointer, *_SIGNATURES[name]
        )(getattr(self, name.removeprefix("_")))

    def cuda_dialect_init_library_once(self, library: int, init: int, load: int, error: int) -> int:
        if self._initialised:
            return 0
        self._initialised = True
        ctypes.c_uint64.from_address(library).value = 1
        # They take pointers to the variables that hold their arguments, or the arguments.
        return ctypes.CFUNCTYPE(_int, _pointer, _int)(load)(library, 0)

    def cuda_dialect_unload_library_once(self, library: int) -> int:
        return 0

    def cudaLibraryLoadData(self, library: int, *_: int) -> int:
        return 0

    def cudaGetDevice(self, device: int) -> int:
        ctypes.c_int32.from_address(device).value = 0
        return 0

    def cudaSetDevice(self, device: int) -> int:
        return 0

    def cudaDeviceGetAttribute(self, value: int, attribute: int, device: int) -> int:
        found = _SHARED_MEMORY if attribute == _SHARED_MEMORY_ATTRIBUTE else 0
        ctypes.c_int32.from_address(value).value = found
        return 0

    def cudaLibraryGetKernel(self, kernel: int, library: int, name: int) -> int:
        handle = len(self._kernels) + 1
        self._kernels[handle] = ctypes.string_at(name).decode()
        ctypes.c_uint64.from_address(kernel).value = handle
        return 0

    def cuKernelGetAttribute(self, value: int, attribute: int, kernel: int, device: int) -> int:
        ctypes.c_int32.from_address(value).value = 0
        return 0

    def cudaFuncSetAttribute(self, kernel: int, attribute: int, value: int) -> int:
        return 0

    def cudaKernelSetAttributeForDevice(
        self, kernel: int, attribute: int, value: int, device: int
    ) -> int:
        return 0

    def cudaLaunchKernelEx(self, config: int, kernel: int, arguments: int) -> int:
        """A cudaLaunchConfig_t; its attributes are 72 bytes each, the value at byte 8."""
        fields = struct.unpack("<6IQQQI", ctypes.string_at(config, 52))
        grid, block, shared, _, attributes, count = fields[:3], fields[3:6], *fields[6:]
        cluster = (1, 1, 1)
        for i in range(count):
            kind, *value = struct.unpack("<I4x3I", ctypes.string_at(attributes + 72 * i, 20))
            if kind == _CLUSTER_ATTRIBUTE:
                cluster = tuple(value)
        name = self._kernels.get(kernel)
        if name is None:
            return 400  # cudaErrorInvalidResourceHandle
        sizes = self._sizes(name)
        pointers = (ctypes.c_uint64 * len(sizes)).from_address(arguments)
        parameters = tuple(
            ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)
        )
        self._launches.append(Launch(name, grid, block, cluster, shared, parameters))
        return 0

    def printf(self, form: int) -> int:
        """By code that is there for callers without TVM-FFI."""
        return 0

    # TVM-FFI -------------------------------------------------------------------------------------

    def TVMFFIEnvGetStream(self, device_type: int, device: int) -> int:
        return 0

    def TVMFFIErrorSetRaisedFromCStr(self, kind: int, message: int) -> int:
        self._message = ctypes.string_at(message).decode()
        return 0

    def TVMFFIErrorSetRaisedFromCStrParts(self, kind: int, parts: int, count: int) -> int:
        pointers = (ctypes.c_uint64 * count).from_address(parts)
        self._message = "".join(ctypes.string_at(p).decode() for p in pointers if p)
        return 0

    def CuteDSLRT_TVMFFISetRaisedCudaError(self, error: int) -> int:
        self._message = f"CUDA error {error}"
        return 0


_int, _pointer = ctypes.c_int, ctypes.c_void_p
_address = ctypes.c_uint64
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuda_dialect_init_library_once": (_address,) * 4,
    "cuda_dialect_unload_library_once": (_address,),
    "_cudaLibraryLoadData": (_address,) * 2,
    "_cudaGetDevice": (_address,),
    "_cudaSetDevice": (_int,),
    "_cudaDeviceGetAttribute": (_address, _int, _int),
    "_cudaLibraryGetKernel": (_address,) * 3,
    "_cuKernelGetAttribute": (_address, _int, _address, _int),
    "_cudaFuncSetAttribute": (_address, _int, _int),
    "_cudaKernelSetAttributeForDevice": (_address, _int, _int, _int),
    "_cudaLaunchKernelEx": (_address,) * 3,
    "printf": (_address,),
    "TVMFFIEnvGetStream": (_int, _int),
    "TVMFFIErrorSetRaisedFromCStr": (_address, _address),
    "TVMFFIErrorSetRaisedFromCStrParts": (_address, _address, _int),
    "CuteDSLRT_TVMFFISetRaisedCudaError": (_int,),
}


def _packed(arg: Argument, kept: list[Any]) -> bytes:
    """A TVMFFIAny: the type, then the value or a pointer to a DLTensor or an array object."""
    if isinstance(arg, int):
        return struct.pack("<iIq", _INT, 0, arg)
    if isinstance(arg, float):
        return struct.pack("<iId", _FLOAT, 0, arg)
    if isinstance(arg, tuple):
        data = ctypes.create_string_buffer(b"".join(_packed(one, kept) for one in arg))
        cell = struct.pack("<QqqQ", ctypes.addressof(data), len(arg), len(arg), 0)
        array = ctypes.create_string_buffer(bytes(_OBJECT_HEADER) + cell)
        kept += [data, array]
        return struct.pack("<iIQ", _ARRAY, 0, ctypes.addressof(array))
    rank = len(arg.shape)
    shape = (ctypes.c_int64 * rank)(*arg.shape)
    strides = (ctypes.c_int64 * rank)(*arg.strides)
    tensor = ctypes.create_string_buffer(
        struct.pack(
            "<QiiiBBHQQQ",
            arg.pointer,
            *(_CUDA_DEVICE, 0),
            rank,
            *arg.type,
            ctypes.addressof(shape),
            ctypes.addressof(strides),
            0,
        )
    )
    kept += [shape, strides, tensor]
    return struct.pack("<iIQ", _TENSOR, 0, ctypes.addressof(tensor))

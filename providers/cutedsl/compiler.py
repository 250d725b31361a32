"""The only place that calls ``cute.compile``."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kernel_api import _compile_cache, _locks, _log
from kernel_api._code_files import temporary_folder
from kernel_api.dtypes import dtype
from kernel_api.errors import CompileError
from kernel_api.metadata import TensorAttributes
from kernel_api.operands import Operand
from kernel_api.targets import Target

logger = _log.logger(__name__)

# The compiler aborts the process when two threads are in it.
_lock = _locks.lock()

OPTIONS = "--enable-tvm-ffi --opt-level 3"

#: That imports the DSL, from when it is asked for.
_loading: _Loading | None = None

#: What the DSL advises about a kernel's loops and arguments is for its author, not for its user.
_ADVICE = (re.compile("This static loop has"), re.compile("Argument .* cannot be converted"))

#: The first compute capability whose kernels may start while the one before still ends.
DEPENDENT_LAUNCH = 90

#: The architecture that the DSL assumes where there is no GPU.
_WITHOUT_GPU = "sm_100a"


class _Loading(threading.Thread):
    """Imports all of the DSL that compiling needs."""

    error: BaseException | None = None

    def run(self) -> None:
        try:
            import cutlass.cute
            import cutlass.cute.runtime
            import cutlass.cutlass_dsl.tvm_ffi_provider  # noqa: F401
        except BaseException as error:
            self.error = error


def load() -> None:
    """Import the DSL, in a thread of its own: an interrupt ends the wait for it and no more.

    An import that is broken off cannot be repeated: what the DSL has registered with native code
    stays there. Raises what the import raises.
    """
    global _loading
    loading = _loading
    if loading is None:
        loading = _Loading(name="kernel_api-loads-the-DSL")
        loading.start()
        _loading = loading
    loading.join()
    if loading.error is not None:
        _loading = None
        raise loading.error


def compile(
    implementation: Callable[..., None], args: Sequence[Any], target: Target, options: str = ""
) -> Any:
    """Compile a ``cute.jit`` callable for a target; a GPU is not needed.

    Raises CompileError from whatever the DSL raised, and for what cannot be called so.
    """
    _check_call(implementation, args)
    import cutlass.cute as cute

    _look_for_no_gpu()
    started = time.perf_counter()
    wanted = f"--gpu-arch {target} {OPTIONS} {options}".strip()
    try:
        with _lock, _without_advice():
            compiled = cute.compile(implementation, *args, options=wanted)
    except Exception as error:
        name = type(implementation).__name__
        raise CompileError(f"{name} does not compile for {target}: {error}") from error
    logger.info(
        "compiled %s for %s in %.2f s",
        type(implementation).__name__,
        target,
        time.perf_counter() - started,
    )
    return compiled


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """``warnings.catch_warnings`` would take back what other threads set meanwhile."""
    ours = [("ignore", text, Warning, None, 0) for text in _ADVICE]
    filters: Any = warnings.filters
    filters[:0] = ours
    try:
        yield
    finally:
        for one in ours:
            with contextlib.suppress(ValueError):
                filters.remove(one)


def _check_call(implementation: Callable[..., None], args: Sequence[Any]) -> None:
    """Raise CompileError where it does not take these; the DSL would call that a bug of its own."""
    try:
        taken = inspect.signature(implementation)
    except (TypeError, ValueError):  # nothing that says what it takes
        return
    try:
        taken.bind(*args)
    except TypeError as error:
        name = getattr(implementation, "__qualname__", f"{type(implementation).__name__}.__call__")
        given = ", ".join(type(one).__name__.removeprefix("_Fake").lower() for one in args)
        raise CompileError(
            f"{name} takes ({', '.join(taken.parameters)}); it is called with {len(args)} "
            f"arguments: {given}"
        ) from error


def target_cc() -> int:
    """Compute capability that the running compilation is for; 0 if there is none."""
    running = _compile_cache.running()
    return running.target.cc if running is not None and running.target is not None else 0


def _look_for_no_gpu() -> None:
    """Where none is visible, spare the DSL the search: what it takes instead is what it would find.

    It asks the driver dozens of times, because it asks for each message that it makes of the
    driver's answer; processes that do so at once wait for each other for a minute.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        return
    from cutlass.cutlass_dsl import CuTeDSL

    settings: Any = CuTeDSL._get_dsl().envar
    if getattr(settings, "_arch", "") is None:
        settings.arch = _WITHOUT_GPU


def fake_tensor(operand: Operand, attributes: TensorAttributes | None) -> Any:
    """A placeholder of the operand's type, rank and major, with symbolic sizes and strides."""
    import cutlass.cute as cute

    divisibility = attributes.divisibility if attributes is not None else 1
    rank = operand.rank
    unit = operand.unit_mode
    shape = tuple(cute.sym_int() for _ in range(rank))
    stride = tuple(
        1 if unit is not None and mode == rank + unit else cute.sym_int64(divisibility=divisibility)
        for mode in range(rank)
    )
    element = operand.dtype.cutlass
    return cute.runtime.make_fake_tensor(
        element, shape, stride, assumed_align=divisibility * operand.dtype.itemsize
    )


def placeholder(value: Any, alignment: int | None = None) -> Any:
    """For a torch tensor of any sizes and strides, or a Python number known at run time.

    alignment: Of a tensor whose last mode has stride 1 and is a multiple of it, as the other
        strides are, in bytes; None: nothing is known of it.
    """
    import cutlass
    import cutlass.cute as cute

    if isinstance(value, int):
        return cutlass.Int64(1)
    if isinstance(value, float):
        return cutlass.Float32(1.0)
    tensor = value
    element = dtype(tensor.dtype)
    rank, whole = tensor.dim(), (alignment or element.itemsize) // element.itemsize
    shape = tuple(cute.sym_int() for _ in range(rank))
    stride = tuple(cute.sym_int64(divisibility=whole) for _ in range(rank))
    if alignment is not None:
        shape = (*shape[:-1], cute.sym_int(divisibility=whole))
        stride = (*stride[:-1], 1)
    return cute.runtime.make_fake_tensor(
        element.cutlass, shape, stride, assumed_align=alignment or element.itemsize
    )


def address_placeholder() -> Any:
    """A run-time address."""
    import cutlass

    return cutlass.Int64(0)


def current_stream_placeholder() -> Any:
    """A stream argument that TVM-FFI fills with torch's current stream at each call."""
    from cutlass.cute.runtime import make_fake_stream

    return make_fake_stream(use_tvm_ffi_env_stream=True)


def int32_placeholders(count: int) -> list[Any]:
    """Run-time 32-bit integers."""
    if not count:
        return []
    import cutlass

    return [cutlass.Int32(1)] * count


def raw_function(compiled: Any) -> Callable[..., None]:
    """The TVM-FFI function behind a compiled object, without its keyword wrapper."""
    function = getattr(compiled, "_tvm_ffi_function", None)
    found: Callable[..., None] = function if function is not None else compiled
    return found


def object_code(compiled: Any, function_name: str) -> bytes | None:
    """A relocatable object file of what ``cute.compile`` returned, made once; None for others.

    Raises LinkError where no temporary file can be written.
    """
    if not hasattr(compiled, "export_to_c"):
        return None
    made: dict[str, bytes] = vars(compiled).setdefault("_kernel_api_object_code", {})
    with _lock, temporary_folder() as folder:
        if function_name not in made:
            path = folder / "kernel.o"
            compiled.export_to_c(object_file_path=str(path), function_name=function_name)
            made[function_name] = path.read_bytes()
    return made[function_name]


def load_object(path: Path, function_name: str) -> Callable[..., None]:
    """The function in an object file, through the DSL's run-time library."""
    load()
    import cutlass.cute as cute

    function: Callable[..., None] = cute.runtime.load_module(str(path), enable_tvm_ffi=True)[
        function_name
    ]
    return function

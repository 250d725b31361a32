"""What is asked of arguments before a kernel is, and what is said where they do not do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kernel_api._numbers import whole_number
from kernel_api.arguments import Arguments, EpilogueArguments
from kernel_api.arguments.experts import memory_of
from kernel_api.errors import ArgumentError, DeviceError, EpilogueError, WorkspaceError

if TYPE_CHECKING:
    from kernel_api.epilogue import Graph
    from kernel_api.operands import Operand


def require_arguments(args: object) -> Arguments:
    """The arguments, or an ArgumentError that says what was passed instead."""
    if not isinstance(args, Arguments):
        raise ArgumentError(not_arguments(args))
    return args


def require_data(args: Arguments) -> None:
    """Raise DeviceError for arguments that can be compiled for, but not run on.

    Storages are asked again: they may have been freed since the arguments were made.
    """
    for operand in args._all_operands():
        if (
            operand.mode is not None
            or operand.discrete
            or not (operand._address or operand.address)
            or not operand.tensor.untyped_storage().nbytes()
        ):
            _require_memory(args, operand)


def _require_memory(args: Arguments, operand: Operand) -> None:
    scale = getattr(operand, "scale", None)
    parts = memory_of(operand)
    for part in parts if scale is None else (*parts, scale):
        if part.address and part.tensor.untyped_storage().nbytes():
            continue
        if not part.has_data:
            raise DeviceError(
                f"{args._name_of(operand)} is a meta or fake tensor: it can be compiled for, not "
                f"run on"
            )
        if 0 not in part.shape:
            name = args._name_of(scale if part is scale else operand)
            place = f"[{parts.index(part)}]" if len(parts) > 1 and part is not scale else ""
            raise DeviceError(
                f"{name}{place} has shape {part.shape} and no memory: its storage was freed, or it "
                f"wraps others"
            )


def not_arguments(given: object) -> str:
    """Why what is no arguments object is refused."""
    return f"expected an arguments object such as GemmArguments, got {type(given).__name__}"


def epilogue_mismatch(own: Graph | str | None, asked: EpilogueArguments | None) -> str | None:
    """Why a kernel with one epilogue does not compute another."""
    if asked is None:
        return None if own is None else f"no epilogue is asked for; the kernel applies {own}"
    if own is None:
        return "an epilogue is asked for; the kernel stores the accumulator as it is"
    if asked.identity == (own if isinstance(own, str) else own.identity):
        return None
    return f"another epilogue is asked for, {asked.graph}; the kernel applies {own}"


def device_of(args: object) -> Any:
    """That of the operands; None for what is no arguments object, which is refused later."""
    return args.device if isinstance(args, Arguments) else None


def checked_workspace(name: str, asked: Any, device: Any, given: Any) -> Any:
    """The workspace that a run was given, or zeros where it was given none and needs one.

    name, asked: Of the kernel class, and what its ``get_workspace_size`` gave.
    """
    size = whole_number(asked or 0)
    if size is None or size < 0:
        raise WorkspaceError(f"{name}.get_workspace_size gave {asked!r}; expected bytes, or 0")
    if given is None:
        if not size:
            return None
        import torch

        return torch.zeros(size, dtype=torch.uint8, device=device)
    if not hasattr(given, "numel"):
        raise WorkspaceError(
            f"the workspace is a {type(given).__name__}; expected a torch.uint8 tensor"
        )
    if str(given.dtype) != "torch.uint8" or given.device != device:
        raise WorkspaceError(
            f"the workspace is {given.dtype} on {given.device}; expected torch.uint8 on {device}"
        )
    if given.numel() < size:
        raise WorkspaceError(f"the workspace has {given.numel()} bytes; {size} are needed")
    if not given.is_contiguous():
        raise WorkspaceError(f"the workspace has strides {given.stride()}; expected contiguous")
    return given


def with_operands(launch: Callable[..., None], prepared: dict[str, Any]) -> Callable[..., None]:
    """The launch, with operands that are taken where a call names no others."""

    def launch_with(*tensors: Any, stream: Any = None, **operands: Any) -> None:
        for name, value in operands.items():
            if name not in prepared:
                raise EpilogueError(f"there is no operand {name}; there are {', '.join(prepared)}")
            if type(value) is int and type(prepared[name]) is float:
                operands[name] = float(value)
        launch(*tensors, stream=stream, **{**prepared, **operands})

    return launch_with

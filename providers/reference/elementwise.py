"""What is done to every element of a matrix, in float64."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from kernel_api.arguments import ElementwiseArguments
from kernel_api.artifact import CompiledArtifact
from kernel_api.epilogue.tracing import RESULT
from kernel_api.kernel import Kernel
from kernel_api.metadata import DesignMetadata, NormOperandsMetadata
from kernel_api.providers.reference import ReferenceProvider
from kernel_api.providers.reference.allowance import changes
from kernel_api.providers.reference.epilogue import evaluate, held, rounded, saturated
from kernel_api.providers.streams import on_stream
from kernel_api.space import Operands, Space

Values = dict[str, Any]


@ReferenceProvider.register
class ReferenceElementwise(Kernel):
    """Any epilogue of a matrix, computed in float64 and rounded once; any types, any strides."""

    family: ClassVar[str] = "reference.elementwise"
    arguments = ElementwiseArguments
    devices = ("cpu", "cuda")
    any_epilogue = True
    operands = (Operands(x="any", out="any", accumulator="any", majors="strided"),)
    operands_metadata = NormOperandsMetadata
    space = Space()
    design = DesignMetadata

    def _run(
        self, args: Any, artifact: CompiledArtifact, stream: Any, workspace: Any = None
    ) -> None:
        with torch.no_grad(), on_stream(stream, args.device.index):
            if _is_copy(args):
                args.out.tensor.copy_(args.x.tensor)
                return
            for name, values in _computed(args, wide=True).items():
                written = args.outputs[name]
                written.tensor.copy_(rounded(values, written.dtype))

    @classmethod
    def exact(cls, args: Any) -> Values:
        """The oracle of ``verify``: what is stored, before it is rounded (but x as it is, which is
        rounded to integers); in float64, or in int64 where x becomes integers."""
        if _is_copy(args):
            x = args.x.tensor
            return {"out": x.double() if args.x.dtype.is_float else x.to(torch.int64)}
        found = _computed(args, wide=True)
        if args.epilogue is None and not args.out.dtype.is_float:
            whole = rounded(found["out"], args.out.dtype)  # all agree on it
            return {"out": whole.to(torch.int64)}
        return {n: saturated(found[n], o.dtype).double() for n, o in args.outputs.items()}

    @classmethod
    def same_dtype(cls, args: Any) -> Values:
        """Outputs as torch computes them in the type of the arithmetic, rounded once; integers
        that an epilogue computes are not rounded."""
        if _is_copy(args):
            return {"out": args.x.tensor}
        found = _computed(args, wide=False)
        return {name: held(found[name], o.dtype) for name, o in args.outputs.items()}

    @staticmethod
    def allowance(args: Any) -> Values:
        """Of an epilogue's outputs: what they change by where every element of the accumulator is
        off by its last place, and half a unit of integers. Of x as it is: nothing."""
        if args.epilogue is None or not args.writes_anything:
            return {}
        x = _accumulator(args).double()
        error = torch.nan_to_num(x, posinf=0.0, neginf=0.0).abs() * _unit(args)
        exact = ReferenceElementwise.exact(args)
        least = {n: 0.0 if o.dtype.is_float else 0.5 for n, o in args.outputs.items()}

        def evaluated(value: Any) -> Values:
            found = _evaluated(args, value, wide=True)
            return {n: saturated(one, args.outputs[n].dtype).double() for n, one in found.items()}

        return changes(x, error, exact, least, args.epilogue.graph, evaluated)


def _is_copy(args: Any) -> bool:
    """Whether the bits are to stay as they are."""
    return args.epilogue is None and args.x.dtype is args.out.dtype


def _unit(args: Any) -> float:
    return 2.0**-52 if args.accumulator_type.bits == 64 else 2.0**-23


def _accumulator(args: Any) -> Any:
    return args.x.tensor.to(args.accumulator_type.torch)


def _computed(args: Any, *, wide: bool) -> Values:
    """Every output, in the shape that it is stored with."""
    x = _accumulator(args)
    if args.epilogue is None:
        return {"out": x.double() if wide else x}
    return _evaluated(args, x, wide=wide)


def _evaluated(args: Any, x: Any, *, wide: bool) -> Values:
    """The same of an accumulator."""
    epilogue, double = args.epilogue, args.accumulator_type.bits == 64
    found = evaluate(epilogue.graph, x, epilogue.operands, wide=wide, double=double)
    found = {"out": found.pop(RESULT), **found}
    return {name: found[name].reshape(o.shape) for name, o in args.outputs.items()}

"""How arguments of kernels are made of what stands for the tensors of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from kernel_api.arguments import EpilogueArguments
from kernel_api.arguments.base import Arguments
from kernel_api.graph._planning.frame import Frame, Layout
from kernel_api.graph._planning.region import Region
from kernel_api.graph._planning.steps import Build, DeclineError, Take
from kernel_api.graph._tensor import Tensor

#: Makes arguments of what stands for tensors, the out and the epilogue.
Make = Callable[[Take, Any, "EpilogueArguments | None"], Arguments]


@dataclass(frozen=True)
class FusedBuilds:
    """An operation whose kernel computes an epilogue.

    Attributes:
        accumulator: What the epilogue starts from.
        frame: How tensors are seen as the kernel's matrices.
        make: Makes the arguments.
        region: What is computed; none before the region is known.
        scratch: A matrix for D where nothing that is stored is one, and the kernel writes D all the
            same.
        needs_out: Whether it does.
    """

    accumulator: Tensor
    frame: Frame
    make: Make
    region: Region | None = None
    scratch: tuple[Tensor, ...] = field(default=())
    needs_out: bool = True

    def with_region(self, region: Region) -> FusedBuilds:
        """For the nodes and results that a region has now."""
        kept = replace(region, nodes=list(region.nodes), stored=list(region.stored))
        mains = [t for t in kept.stored if self.frame.is_main(t.dim)]
        scratch: tuple[Tensor, ...] = ()
        if not mains and (self.needs_out or not kept.stored):
            like = self.accumulator
            own = Tensor(None, name=f"{like}::scratch", dim=like.dim, stride=like.stride)
            own.data_type, own.is_virtual = like.data_type, True
            scratch = (own,)
        return replace(self, region=kept, scratch=scratch)

    def __call__(self, take: Take) -> Arguments:
        region = self.region
        assert region is not None
        main = self._main(region)
        out = None if main is None else take(main, self._layout(main))
        if region.is_plain and not self.scratch:
            return self.make(take, out, None)
        others = [t for t in region.stored if t is not main]
        operands = {
            name: take(o.tensor, o.layout, name=name) for name, o in region.operands().items()
        }
        outputs = {
            f"o{i}": take(tensor, self._stored_layout(tensor), name=f"o{i}")
            for i, tensor in enumerate(others)
        }
        first = self.accumulator if main is None or self.scratch else main
        function = region.function(first, others)
        return self.make(take, out, EpilogueArguments(function, **operands, **outputs))

    def _main(self, region: Region) -> Tensor | None:
        """D: the last matrix that is stored; None where there is none."""
        if self.scratch:
            return self.scratch[0]
        mains = [t for t in region.stored if self.frame.is_main(t.dim)]
        return mains[-1] if mains else None

    def _stored_layout(self, tensor: Tensor) -> Layout:
        """Of what is stored beside D: without the modes that it was reduced over."""
        shape, stride = self._layout(tensor)
        lost = self.frame.reduced(tensor.dim) or (False,) * len(shape)
        kept = [mode for mode, is_lost in enumerate(lost) if not is_lost]
        return tuple(shape[mode] for mode in kept), tuple(stride[mode] for mode in kept)

    def _layout(self, tensor: Tensor) -> Layout:
        layout = self.frame.of(tensor)
        if layout is None:
            raise DeclineError(f"{tensor} is no matrix in the modes of the kernel")
        return layout


@dataclass(frozen=True)
class PlainBuilds:
    """An operation whose kernel has no epilogue.

    Attributes:
        make: Makes the arguments.
        scratch: Results that the kernel writes and nobody needs.
    """

    make: Build
    scratch: tuple[Tensor, ...] = ()

    def __call__(self, take: Take) -> Arguments:
        return self.make(take)


#: Whether a result of a node is needed by the caller or by another node.
Needed = Callable[[Tensor], bool]

#: What an operation becomes: builds to try, or why there are none.
Anchored = Iterable["PlainBuilds | FusedBuilds"] | str

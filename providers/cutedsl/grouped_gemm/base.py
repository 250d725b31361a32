"""What the grouped GEMM families share: how they are launched, and when groups of rows fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

from kernel_api._cached_property import cached_property
from kernel_api._estimated_sizes import told_apart
from kernel_api.arguments import EpilogueArguments, ScaleMode
from kernel_api.arguments.experts import Experts
from kernel_api.arguments.grouped import GroupedGemmArguments
from kernel_api.artifact import CompiledArtifact
from kernel_api.epilogue import Graph
from kernel_api.metadata import GroupedGemmOperandsMetadata
from kernel_api.operands import Operand
from kernel_api.providers.cutedsl.epilogue.operands import (
    full_outputs,
    reduction_sizes,
)
from kernel_api.providers.cutedsl.epilogue.plan import Plan, plan
from kernel_api.providers.cutedsl.gemm import machine, model
from kernel_api.providers.cutedsl.gemm.fusing import FusedGemm
from kernel_api.providers.cutedsl.kernel import CuteDslKernel
from kernel_api.space import Miss, rule


def most_row_tiles(rows: int, groups: int, rows_per_tile: int) -> int:
    """That any offsets can cut so many rows into; each group begins with a tile of its own."""
    return min(rows, (rows + groups * (rows_per_tile - 1)) // rows_per_tile)


def out_in_halves(epilogue: EpilogueArguments | None) -> bool:
    """Whether tiles take columns of out in turns, some of the left half, some of the right one."""
    planned = plan(epilogue.graph) if epilogue is not None else None
    if epilogue is None or not isinstance(planned, Plan):
        return False
    return epilogue.graph.output_shape("D").columns in planned.halves


class CuteDslGroupedGemm(FusedGemm):
    """A grouped GEMM. Its kernels always take more than operands: row indices as there are, then
    the values of an epilogue. They serve groups, K and T of any size, 0 included."""

    arguments = GroupedGemmArguments
    operands_metadata = GroupedGemmOperandsMetadata

    @cached_property
    def takes_more(self) -> bool:
        return True

    def more_values(self, args: GroupedGemmArguments) -> dict[str, Any]:
        return {**args.launch_values, **super().more_values(args)}

    def workspace_for(self, *tensors: Any) -> int:
        A, B, out, offsets = (tensor.shape for tensor in tensors)
        if self.ragged == "K":
            return self._with_reductions(0, A[0], B[-1], offsets[0])
        return self._with_reductions(0, out[0], self._columns(out[-1]), offsets[0])

    @classmethod
    def estimated_by(cls, args: Any) -> Hashable | None:
        return dense_problem(args, RowTiles(1, 1)), told_apart(args.T), args.L

    def _columns(self, of_out: int) -> int:
        """Of the product, which an epilogue may make more or less of."""
        graph = self.metadata.epilogue
        if not isinstance(graph, Graph):
            return of_out
        return int(of_out / graph.output_shape("D").columns)

    def get_workspace_size(self, args: Any) -> int:
        return self._with_reductions(0, args.M, args.N, args.L)

    def _launcher(self, args: Any, artifact: CompiledArtifact) -> Callable[..., None]:
        return CuteDslKernel._launcher(self, args, artifact)


class RaggedRowsGemm(CuteDslGroupedGemm):
    """Groups of rows, each with a matrix B of its own."""

    ragged: ClassVar[str | None] = "M"

    @rule("vectors lie along K in A and along N in out, because groups begin at any row")
    def _(operands: GroupedGemmOperandsMetadata) -> bool:
        found = (operands.A, operands.out)
        return all(one.unit_mode == -1 or one.divisibility == 1 for one in found)

    @rule("what an epilogue writes lies along N, where out is written in vectors")
    def _(operands: GroupedGemmOperandsMetadata, args: GroupedGemmArguments) -> bool | Miss:
        if args.epilogue is None or operands.out.divisibility == 1:
            return True
        for name, operand in full_outputs(args.epilogue).items():
            if operand.unit_mode != -1:
                return Miss(f"{name} has strides {operand.stride}")
        return True

    @rule("rows that are gathered lie along K, those that are scattered along N")
    def _(args: GroupedGemmArguments) -> bool | Miss:
        for index, name in (("row_index", "A"), ("out_row_index", "out")):
            operand = getattr(args, name)
            if index in args.indices and operand.unit_mode != -1:
                return Miss(f"{index} is given and {name} has strides {operand.stride}")
        return True

    @rule("rows that are gathered carry no scales of their own, but in blocks")
    def _(args: GroupedGemmArguments) -> bool | Miss:
        alone = args.row_index is None or args.A.mode is not ScaleMode.PER_ROW
        return alone or Miss("A carries one per row")

    @rule("an epilogue reduces rows, columns of a group or groups, and draws no random numbers")
    def _(args: GroupedGemmArguments) -> bool | Miss:
        for node in () if args.epilogue is None else args.epilogue.graph.nodes:
            if node.op == "uniform":
                return Miss("it draws some")
            if node.op == "reduce" and node["axis"] == "all":
                return Miss("it reduces all groups to one value")
        return True

    def _reductions(self, M: int, N: int, L: int) -> tuple[int, int]:
        """Counters of rows, and parts, are as many as row tiles; other counters as groups."""
        graph = self.metadata.epilogue
        if not isinstance(graph, Graph):
            return 0, 0
        stay, _ = reduction_sizes(graph, self.tiling(0, N), 1)
        least = self.tiling(1, N)  # rows of a group are cut into whole clusters of tiles
        rows = least.tiles[0] * least.tile[0]
        most = self.tiling(most_row_tiles(M, L, rows) * rows, N)
        counters, parts = reduction_sizes(graph, most, 1)
        return counters + (L - 1) * stay, parts


class ExpertPointersGemm(CuteDslGroupedGemm):
    """Matrices that lie anywhere, one per group: kernels take their addresses, and before what an
    epilogue has the columns of one and its stride that is not 1.

    Attributes:
        anywhere: Which operand they are.
    """

    experts: ClassVar[str | None] = "pointers"
    anywhere: ClassVar[str] = "B"

    @rule("B or out lies anywhere, and not both")
    def _(args: GroupedGemmArguments) -> bool:
        return args.B.discrete != args.out.discrete

    def more_values(self, args: GroupedGemmArguments) -> dict[str, Any]:
        one, found = getattr(args, self.anywhere), super().more_values(args)
        pitch = one.stride[-2 if one.unit_mode == -1 else -1]
        # Names that no operand of an epilogue has.
        columns = {f"columns of {self.anywhere}": one.shape[-1], f"pitch of {self.anywhere}": pitch}
        described = {**args.launch_values, **columns}
        return {**described, **{n: value for n, value in found.items() if n not in described}}

    def _expert_matrices(self) -> Any:
        """What the implementation knows of them."""
        from kernel_api.implementations.common.expert_matrices import ExpertMatrices

        one = self.metadata.operands.tensors[self.anywhere]
        assert one.dtype is not None
        # B is (K, N), and (N, K) to the implementation.
        unit_mode = int((one.unit_mode == -1) != (self.anywhere == "B"))
        return ExpertMatrices(one.dtype.cutlass, unit_mode, one.alignment)

    def cute_compile(self, implementation: Callable[..., None], *args: Any, **how: Any) -> Any:
        given = (_addresses() if isinstance(arg, Experts) else arg for arg in args)
        return super().cute_compile(implementation, *given, **how)


def _addresses() -> Any:
    """What stands for those of all matrices."""
    import cutlass
    import cutlass.cute as cute

    return cute.runtime.make_fake_tensor(cutlass.Int64, (cute.sym_int(),), (1,), assumed_align=8)


class RaggedSumGemm(CuteDslGroupedGemm):
    """Groups of what is summed over, each with a matrix out of its own."""

    ragged: ClassVar[str | None] = "K"

    @rule("what is added to is made of floats of 16 or 32 bits")
    def _(args: GroupedGemmArguments) -> bool | Miss:
        fits = args.out.dtype.is_float and args.out.dtype.bits in (16, 32)
        return not args.accumulate or fits or Miss(f"out is {args.out.dtype}")


# What the performance model is asked -----------------------------------------------------


@dataclass(frozen=True)
class _Dense:
    """A dense product that moves and computes about what a grouped one does."""

    M: int
    N: int
    K: int
    L: int
    operands: tuple[Operand, ...]
    epilogue: Any


class RowTiles(NamedTuple):
    """What a design makes of groups of rows.

    Attributes:
        rows: Of what a group is cut into: a cluster's tiles.
        multiplied: Of these, how many are multiplied together: others, behind the end of a group,
            are passed over.
    """

    rows: int
    multiplied: int


def dense_problem(args: GroupedGemmArguments, tiles: RowTiles) -> model.Problem:
    """As the performance model takes it. Every group ends with a tile that is not full, and those
    without rows read no matrix: tokens are taken to go anywhere. One group has all of them."""
    asked: Any
    operands = args.operands[:3]
    if args.ragged == "K":
        of_group = -(-told_apart(args.T) // args.L)
        asked = _Dense(args.M, args.N, of_group, args.L, operands, args.epilogue)
        return model.Problem.of(asked)
    T = max(told_apart(args.T), 1)
    share = 1 - (1 - 1 / args.L) ** T
    groups = args.L * share
    rows = T / groups
    counted = tiles_of_a_group if args.L > 1 else _tiles_of_all
    per_group = counted(rows, tiles.rows) * tiles.rows
    multiplied = counted(rows, tiles.multiplied) * tiles.multiplied
    # Whole tiles, which the model does not round up once more.
    most_likely = max(round(groups * per_group / tiles.rows), 1) * tiles.rows
    asked = _Dense(most_likely, args.N, args.K, 1, operands, args.epilogue)
    problem = model.Problem.of(asked)
    read = round(share * problem.B_bytes)
    return replace(problem, B_bytes=read, filled=multiplied / per_group)


def tiles_of_a_group(rows: float, rows_per_tile: int) -> float:
    """On average, where groups have anything between half of so many rows and half as many more:
    a router does not deal them out evenly."""
    least, most = rows / 2, 3 * rows / 2
    of_all = int(least // rows_per_tile)  # beside the first one
    of_some = math.ceil(most / rows_per_tile) - 1
    between = of_some - of_all
    beyond = between * most - rows_per_tile * between * (of_all + 1 + of_some) / 2
    return 1 + of_all + beyond / rows


def _tiles_of_all(rows: float, rows_per_tile: int) -> float:
    return math.ceil(rows / rows_per_tile)


@lru_cache(maxsize=1)
def _problems(key: Any) -> dict[RowTiles, model.Problem]:
    """Those of the last arguments asked about."""
    return {}


def predict(
    args: GroupedGemmArguments,
    tiles: RowTiles,
    candidate: model.Candidate,
    constants: machine.Constants,
) -> float:
    """Seconds for one design."""
    known = _problems(args.key)
    if tiles not in known:
        known[tiles] = dense_problem(args, tiles)
    return model.seconds(known[tiles], candidate, constants)

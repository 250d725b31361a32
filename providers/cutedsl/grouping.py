"""The family that sorts rows by group, and how it is compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from kernel_api.arguments import GroupRowsArguments
from kernel_api.artifact import CompiledArtifact
from kernel_api.metadata import DesignMetadata, GroupRowsOperandsMetadata
from kernel_api.providers.cutedsl import CuTeDSLProvider, compiler
from kernel_api.providers.cutedsl.extents import counted_in_32_bits
from kernel_api.providers.cutedsl.indexed import weight_is_float
from kernel_api.providers.cutedsl.kernel import BareWhereSizesAreKnown, by_place
from kernel_api.space import Miss, Operands, Space, rule

#: That the smallest design has room for, and the largest.
_FEWEST_GROUPS, _MOST_GROUPS = 255, 2047
#: Pairs that one CTA sorts as soon as many do in several launches.
_MOST_PAIRS = 2**15
#: Seconds of a launch, of waiting for 32 pairs that a warp counts and then places, and of a slot.
_OVERHEAD, _TURN, _SLOT = 2.7e-6, 1.07e-6, 2e-9
#: Of the work for a pair, and what is added to it where neighbours are of many groups.
_PAIR, _SCATTERED, _MANY_GROUPS = 0.7e-9, 1.1e-9, 64


@dataclass(frozen=True)
class GroupRowsDesign(DesignMetadata):
    """How many warps sort, each of which has a count of every group.

    Attributes:
        threads: Of the CTA.
        most_groups: That shared memory has room for.
    """

    threads: int
    most_groups: int

    def label(self) -> str:
        return f"threads{self.threads}_groups{self.most_groups}"


@CuTeDSLProvider.register
class Sm80GroupRows(BareWhereSizesAreKnown):
    """Rows sorted by group, by one CTA in one launch; for every GPU from Ampere on."""

    family: ClassVar[str] = "sm80.group_rows"
    arguments = GroupRowsArguments
    targets: ClassVar[tuple[str, ...]] = ("sm_80",)
    takes_more = True
    operands = (
        Operands(
            index="i32 | i64",
            offsets="i32",
            row_index="i32",
            place="i32",
            accumulator="i32",
            majors="strided",
        ),
    )
    operands_metadata = GroupRowsOperandsMetadata
    design = GroupRowsDesign
    space = Space(
        GroupRowsDesign(1024, _FEWEST_GROUPS),
        GroupRowsDesign(1024, 511),
        GroupRowsDesign(512, 1023),
        GroupRowsDesign(256, _MOST_GROUPS),
    )

    @rule("there are 2047 groups at most, of each of which every warp has a count")
    def _(args: GroupRowsArguments) -> bool | Miss:
        if args.L <= _MOST_GROUPS:
            return True
        return Miss(f"there are {args.L}", f"would match with {_MOST_GROUPS} or fewer")

    @rule("groups have room and take half of it, unless it is the least")
    def _(design: GroupRowsDesign, args: GroupRowsArguments) -> bool:
        smallest = design.most_groups == _FEWEST_GROUPS
        return design.most_groups >= args.L and (smallest or design.most_groups < 2 * args.L)

    @rule("one CTA sorts 32768 pairs at most: of more, several sort sooner")
    def _(args: GroupRowsArguments) -> bool | Miss:
        pairs = args.M * args.k
        return pairs <= _MOST_PAIRS or Miss(f"there are {pairs}")

    counts_in_32_bits = counted_in_32_bits
    weight_is_float = weight_is_float

    def more_values(self, args: Any) -> dict[str, Any]:
        values: dict[str, Any] = args.launch_values
        return values

    def implementation(self) -> Callable[..., None]:
        from kernel_api.implementations.sm80.group_rows import GroupRows

        design = self._design
        built: Callable[..., None] = GroupRows(
            design.threads,
            design.most_groups,
            dependent_launch=compiler.target_cc() >= compiler.DEPENDENT_LAUNCH,
        )
        return built

    def _launcher(self, args: Any, artifact: CompiledArtifact) -> Callable[..., None]:
        return by_place(super()._launcher(args, artifact), args)

    def predict(self, args: GroupRowsArguments) -> float:
        pairs = args.M * args.k
        turns = -(-pairs // int(self._design.threads))
        work = _PAIR + _SCATTERED * min(1.0, args.L / _MANY_GROUPS)
        return _OVERHEAD + turns * _TURN + pairs * work + args.L * _SLOT

"""The fewest kernels that a graph becomes: regions grown from their anchors."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from kernel_api.graph._enums import data_type
from kernel_api.graph._node import Node
from kernel_api.graph._planning.anchors import ANCHORS
from kernel_api.graph._planning.builds import FusedBuilds, PlainBuilds
from kernel_api.graph._planning.fold import folded, is_double, why_not
from kernel_api.graph._planning.frame import memory_frames
from kernel_api.graph._planning.products import elementwise
from kernel_api.graph._planning.refusal import Refusal
from kernel_api.graph._planning.region import Region, Units
from kernel_api.graph._planning.rewriting import rewritten
from kernel_api.graph._planning.steps import (
    KernelStep,
    Prober,
    Step,
    TorchStep,
    ViewStep,
    view_of,
)
from kernel_api.graph._tensor import Tensor, memory_order

#: Seconds that two kernels have to save over one that computes the same.
_WORTH_A_LAUNCH = 10e-6


class Partition(NamedTuple):
    """The steps of a graph in the order that they run, and what could not be fused."""

    steps: tuple[Step, ...]
    refusals: tuple[Refusal, ...]


def partition(nodes: list[Node], prober: Prober) -> Partition:
    """Deal the nodes out to kernels; what no kernel takes is left to torch.

    Args:
        nodes: In order, all known.
        prober: Finds the kernels for arguments on the device that is planned for.
    """
    found = rewritten(needed(nodes), prober)
    made = _Partitioner(found.nodes, prober)
    made.refusals += found.refusals
    made.take_anchors()
    made.take_views()
    made.take_chains()
    made.take_rest()
    return Partition(tuple(made.in_order()), tuple(made.refusals))


def needed(nodes: list[Node]) -> list[Node]:
    """The nodes without those that nothing comes of."""
    read: set[int] = set()
    kept: list[Node] = []
    for node in reversed(nodes):
        if any(not t.is_virtual or id(t) in read for t in node.writes):
            kept.append(node)
            read |= {id(t) for t in node.reads}
    return kept[::-1]


class _Partitioner:
    def __init__(self, nodes: list[Node], prober: Prober) -> None:
        self.nodes, self.prober = nodes, prober
        self.units = Units(nodes)
        self.steps: list[Step] = []
        self.refusals: list[Refusal] = []

    # The passes --------------------------------------------------------------------------

    def take_anchors(self) -> None:
        for node in self.nodes:
            anchor = ANCHORS.get(node.op)
            if anchor is None or not self.units.is_free(node):
                continue
            if is_double(node) and next(node.reads).data_type is not data_type.DOUBLE:
                self.refusals.append(Refusal(node, "has no kernel", "it computes in DOUBLE"))
                continue
            builds = anchor(node, functools.partial(self.units.leaves, members={id(node)}))
            if isinstance(builds, str):
                self.refusals.append(Refusal(node, "has no kernel", builds))
                continue
            self._take(node, list(builds))

    def take_views(self) -> None:
        for node in self.nodes:
            if self.units.is_free(node) and all(view_of(t) is not None for t in node.writes):
                self.units.merge([node])
                self.steps.append(ViewStep(node))

    def take_chains(self) -> None:
        for node in self.nodes:
            if self.units.is_free(node) and why_not(node) is None:
                self._take_chain(node)

    def take_rest(self) -> None:
        for node in self.nodes:
            if self.units.is_free(node):
                self.units.merge([node])
                self.steps.append(TorchStep((node,)))
                why = None if node.op in ANCHORS else why_not(node)
                if why is not None:
                    self.refusals.append(Refusal(node, "is left to torch", why))

    def in_order(self) -> list[Step]:
        """The steps, each behind those whose results it reads."""
        pending, ordered = list(self.steps), []
        written = {id(t): step for step in pending for node in step.nodes for t in node.writes}
        done: set[int] = set()
        position = {id(node): i for i, node in enumerate(self.nodes)}
        pending.sort(key=lambda step: min(position[id(node)] for node in step.nodes))
        while pending:
            step = next(
                s
                for s in pending
                if all(
                    id(t) not in written or written[id(t)] is s or id(written[id(t)]) in done
                    for node in s.nodes
                    for t in node.reads
                )
            )
            pending.remove(step)
            ordered.append(step)
            done.add(id(step))
        return ordered

    # One kernel --------------------------------------------------------------------------

    def _take(self, node: Node, builds: list[PlainBuilds | FusedBuilds]) -> None:
        """The step of an anchor, with all that folds into it; the build that covers most."""
        best: KernelStep | None = None
        refusals: list[Refusal] = []
        for build in builds:
            found: list[Refusal] = []
            step = self._step_of(node, build, found)
            if step is not None and (best is None or len(step.nodes) > len(best.nodes)):
                best, refusals = step, found
            elif best is None:
                refusals += found
        self.refusals += refusals
        if best is not None:
            self.units.merge(best.nodes)
            self.steps.append(best)

    def _step_of(
        self, node: Node, build: PlainBuilds | FusedBuilds, refusals: list[Refusal]
    ) -> KernelStep | None:
        if not isinstance(build, FusedBuilds):
            step = self.prober.step((node,), build)
            if isinstance(step, str):
                refusals.append(Refusal(node, "has no kernel", step))
                return None
            return step
        region = Region(node, build.accumulator, build.frame)
        return self._grown(region, build, refusals)

    def _take_chain(self, first: Node) -> None:
        """A kernel of element-wise nodes alone: that of the modes which take most of them."""
        best: KernelStep | None = None
        refusals: list[Refusal] = []
        for region, build in self._chains(first):
            found: list[Refusal] = []
            step = self._grown(region, build, found)
            if step is not None and (best is None or len(step.nodes) > len(best.nodes)):
                best, refusals = step, found
            elif best is None:
                refusals = found
        self.refusals += refusals
        if best is not None:
            self.units.merge(best.nodes)
            self.steps.append(best)

    def _chains(self, first: Node) -> Iterator[tuple[Region, FusedBuilds]]:
        tensors = [t for t in first.inputs.values() if isinstance(t, Tensor)]
        longest = max((_size(t) for t in tensors), default=0)
        for main in tensors:
            if _size(main) != longest or main.is_pass_by_value:
                continue
            order = memory_order(main.dim, main.stride)
            for frame in memory_frames([main, *tensors, *first.writes], order):
                yield Region(None, main, frame), elementwise(main, frame)

    def _grown(
        self, region: Region, build: FusedBuilds, refusals: list[Refusal]
    ) -> KernelStep | None:
        """The step of the largest region that a kernel takes."""
        self._grow(region, refusals)
        while True:
            if region.anchor is None and not region.nodes:
                return None
            region.stored = self._stored(region)
            # Others find it in the memory of what it is a view of, so that would have to be stored.
            view = next((t for t in region.stored if view_of(t) is not None), None)
            step: KernelStep | str = f"others read {view}, which is a view"
            if view is None:
                step = self.prober.step(region.covered, build.with_region(region))
            if not isinstance(step, str):
                return self._cheaper(step, region, build, refusals)
            if not region.nodes:
                node = region.anchor
                assert node is not None
                refusals.append(Refusal(node, "has no kernel", step))
                return None
            dropped = region.nodes[-1]
            refusals.append(Refusal(dropped, f"is not part of {_title(region)}", step))
            self._drop(region, dropped)

    def _cheaper(
        self, step: KernelStep, region: Region, build: FusedBuilds, refusals: list[Refusal]
    ) -> KernelStep:
        """The step; or the anchor alone, where its best kernels take no such epilogue and are so
        much faster that another pass over the result costs less."""
        if region.anchor is None or not region.nodes or step.predicted is None:
            return step
        bare = Region(region.anchor, region.accumulator, region.frame)
        bare.stored = [region.accumulator]
        alone = self.prober.step(bare.covered, build.with_region(bare))
        if isinstance(alone, str) or alone.predicted is None:
            return step
        if type(alone.kernel) is type(step.kernel):
            return step
        another = self._pass_over(region)
        if another is None or step.predicted - (alone.predicted + another) < _WORTH_A_LAUNCH:
            return step
        why = (
            f"{step.title} would take {step.predicted * 1e6:.0f} us, {alone.title} "
            f"{alone.predicted * 1e6:.0f} us and another pass {another * 1e6:.0f} us"
        )
        refusals += [
            Refusal(node, f"is not part of {_title(region)}", why) for node in region.nodes
        ]
        return alone

    def _pass_over(self, region: Region) -> float | None:
        """Seconds that a kernel takes to read the result of the anchor and write as much."""
        tensor = region.accumulator
        frame = region.frame
        chain = Region(None, tensor, frame)
        chain.stored = [tensor]
        step = self.prober.step((), elementwise(tensor, frame).with_region(chain))
        return None if isinstance(step, str) else step.predicted

    def _drop(self, region: Region, node: Node) -> None:
        """Take a node out, and what only it needed."""
        region.nodes.remove(node)
        self._prune(region)

    def _prune(self, region: Region) -> None:
        """Leave no node in that does not depend on the accumulator, and feeds nothing in or others
        as well: such a result is not stored."""
        changed = True
        while changed:
            changed = False
            needed = {id(t) for n in region.nodes for t in n.reads}
            members = {id(n) for n in region.nodes}
            live = self._depending(region)
            for node in list(region.nodes):
                serves = any(id(t) in needed for t in node.writes)
                leaves = any(self.units.leaves(t, members) for t in node.writes)
                if id(node) not in live and (leaves or not serves):
                    region.nodes.remove(node)
                    changed = True

    def _depending(self, region: Region) -> set[int]:
        values, nodes = {id(region.accumulator)}, set()
        for node in region.nodes:
            if any(id(t) in values for t in node.reads):
                nodes.add(id(node))
                values |= {id(t) for t in node.writes}
        return nodes

    # Growing -----------------------------------------------------------------------------

    def _grow(self, region: Region, refusals: list[Refusal]) -> None:
        for node in self.nodes:
            inner = region.inner
            if not self.units.is_free(node) or node in region.covered:
                continue
            if not any(id(t) in inner for t in node.reads):
                continue
            pulled = self._joining(region, node)
            if isinstance(pulled, str):
                if node.op in ANCHORS:
                    continue
                refusals.append(Refusal(node, f"is not part of {_title(region)}", pulled))
                continue
            region.nodes += pulled
        position = {id(node): i for i, node in enumerate(self.nodes)}
        region.nodes.sort(key=lambda node: position[id(node)])

    def _joining(self, region: Region, node: Node) -> list[Node] | str:
        """The node, behind those that can only serve it; or why it cannot join."""
        why = _why_not_in(region, node)
        if why is not None:
            return why
        behind = self.units.behind(region.covered or [node])
        joined = [node]
        pending = [node]
        inner = region.inner
        while pending:
            for tensor in pending.pop().reads:
                producer = self.units.producer.get(id(tensor))
                if id(tensor) in inner or producer is None or producer in joined:
                    continue
                if id(producer) in behind:
                    return f"it needs {tensor}, which is computed from what the kernel writes"
                if self._serves_only(producer, [*region.nodes, *joined], region):
                    joined.insert(0, producer)
                    pending.append(producer)
        trial = Region(region.anchor, region.accumulator, region.frame, [*region.nodes, *joined])
        for operand in trial.operands().values():
            if operand.layout is None:
                return f"{operand.tensor} is no matrix in the modes of the kernel"
        for one in joined:
            for tensor in one.writes:
                if region.frame.of(tensor) is None:
                    return f"{tensor} is no matrix in the modes of the kernel"
        return joined

    def _serves_only(self, producer: Node, members: list[Node], region: Region) -> bool:
        """Whether a node is needed by these alone, and can be computed with them.

        Args:
            members: Of the epilogue: what the anchor reads has to be in memory.
        """
        if not self.units.is_free(producer) or _why_not_in(region, producer) is not None:
            return False
        if producer.op in ("glu_pair", "slice", "rope", "reduction"):
            return False
        ids = {id(node) for node in members}
        return not any(self.units.leaves(t, ids) for t in producer.writes)

    def _stored(self, region: Region) -> list[Tensor]:
        members = {id(node) for node in region.nodes}
        found = [] if region.anchor is None else [region.accumulator]
        found += [t for node in region.nodes for t in node.writes]
        live = self._depending(region)
        own = {id(t) for n in region.nodes if id(n) in live for t in n.writes}
        own.add(id(region.accumulator))
        if region.anchor is not None:
            members.add(id(region.anchor))
        return [t for t in found if id(t) in own and self.units.leaves(t, members)]


def _why_not_in(region: Region, node: Node) -> str | None:
    """Why a node cannot be part of a region, whatever else is; None if it can."""
    if is_double(node) and not region.in_double:
        return "it computes in DOUBLE, and the kernel in FLOAT"
    fold = folded(node, region.frame)
    return fold if isinstance(fold, str) else None


def _size(tensor: Tensor) -> int:
    size = 1
    for extent in tensor.dim:
        size *= extent
    return size


def _title(region: Region) -> str:
    anchor = region.anchor
    return f"the kernel of {anchor}" if anchor is not None else "an element-wise kernel"

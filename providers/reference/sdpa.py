"""Attention and its gradient in float64."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from kernel_api import _float32
from kernel_api.arguments import SdpaArguments, SdpaBackwardArguments
from kernel_api.artifact import CompiledArtifact
from kernel_api.kernel import Kernel
from kernel_api.metadata import (
    DesignMetadata,
    SdpaBackwardOperandsMetadata,
    SdpaOperandsMetadata,
)
from kernel_api.providers.reference import ReferenceProvider
from kernel_api.providers.reference.epilogue import rounded
from kernel_api.providers.reference.sdpa_scores import Attention, Rows
from kernel_api.providers.streams import on_stream
from kernel_api.space import Operands, Space

Values = dict[str, Any]

_INFINITY = float("inf")

#: What a row has that sees nothing, but for zeros.
_OF_NOTHING = {"lse": -_INFINITY, "score_max": -_INFINITY}

#: Tensor cores add products of 8-bit floats to accumulators of some 14 bits, and cut off what is
#: behind; sums on the way to a score are larger than it is. Of values more keys are cut off.
_EIGHT_BITS, _CUT_OFF = 2.0**-10, 1024.0


class ReferenceAttention(Kernel):
    """Computed in float64 and rounded once; every option, any floating types, any strides."""

    devices = ("cpu", "cuda")
    space = Space()
    design = DesignMetadata
    computation: ClassVar[type[_Computation]]

    def _run(
        self, args: Any, artifact: CompiledArtifact, stream: Any, workspace: Any = None
    ) -> None:
        with torch.no_grad(), on_stream(stream, args.device.index):
            for name, values in self.exact(args).items():
                written = args.outputs[name]
                written.tensor.copy_(rounded(values, written.dtype))

    @classmethod
    def exact(cls, args: Any) -> Values:
        """The oracle of ``verify``: what is stored, before it is rounded, in float64."""
        return cls.computation(args, torch.float64).values()

    @classmethod
    def same_dtype(cls, args: Any) -> Values:
        """Outputs as torch computes them in the type of the arithmetic, where what is multiplied
        is rounded to the operands' type."""
        with _float32.products("ieee"):
            found = cls.computation(args, args.accumulator_type.torch, rounds=True).values()
        return {name: rounded(one, args.outputs[name].dtype) for name, one in found.items()}

    @classmethod
    def allowance(cls, args: Any) -> Values:
        """What one rounding of each factor costs, if they are independent, and some of the
        arithmetic at the scale of the data; and what a kernel is off by that has no subnormal
        numbers."""
        computation = cls.computation(args, torch.float64, bounds=True)
        return {
            name: torch.nan_to_num(one, posinf=0.0) + computation.smallest
            for name, one in computation.values().items()
        }


class _Computation:
    """One pass over all scores.

    Args:
        rounds: Whether probabilities, and their gradients, are rounded to the type of the operands
            before they are multiplied.
        bounds: Whether values are the errors that are allowed.
    """

    def __init__(
        self, args: Any, wide: torch.dtype, *, rounds: bool = False, bounds: bool = False
    ) -> None:
        self.args, self.attention, self._wide = args, Attention(args, wide), wide
        self._rounds, self._bounds = rounds, bounds
        #: Half a unit in the last place of what is multiplied, and what arithmetic is off by.
        self._unit: float = torch.finfo(args.Q.dtype.torch).eps / 2
        self._small = 2.0**-22
        if args.K.dtype.bits == 8 and args.device.type == "cuda":
            self._small = _EIGHT_BITS * max(1.0, args.S_kv / _CUT_OFF)
        if args.accumulator_type.bits == 64:
            self._small = (args.S_kv + args.S_q + args.D) * 2.0**-50
        self.smallest: float = torch.finfo(args.accumulator_type.torch).tiny

    def values(self) -> Values:
        """Every output."""
        raise NotImplementedError

    def factor(self, values: Any) -> Any:
        """As it is multiplied."""
        return rounded(values, self.args.Q.dtype).to(self._wide) if self._rounds else values

    def new(self, name: str, fill: float = 0.0) -> Any:
        """Of an output's shape."""
        shape = self.args.outputs[name].shape
        return torch.full(shape, fill, dtype=self._wide, device=self.args.device)

    def flushed(self, values: Any) -> Any:
        """What they are off by if none that is subnormal is kept."""
        return values.abs().clamp_max(self.smallest)

    def products(self, rows: Rows) -> tuple[Any, Any, Any, Any]:
        """(q, k, v, q·k) of some queries, with the heads of queries."""
        attention, b = self.attention, rows.b
        q, k, v = self.operands(b)
        q = q[:, rows.start : rows.stop]
        descale = attention.descale("descale_q", b) * attention.descale("descale_k", b)
        v = v * attention.descale("descale_v", b)
        return q, k, v, q @ k.transpose(1, 2) * descale

    def operands(self, b: int) -> tuple[Any, Any, Any]:
        """q, k and v of a sequence, with the heads of queries."""
        attention, args = self.attention, self.args
        q = attention.converted(attention.of_queries(args.Q.tensor, b))
        k, v = (attention.of_keys(one.tensor, b) for one in (args.K, args.V))
        return q, *(attention.for_each_query_head(attention.converted(one)) for one in (k, v))


class _Forward(_Computation):
    def values(self) -> Values:
        attention, fills = self.attention, {} if self._bounds else _OF_NOTHING
        found = {name: self.new(name, fills.get(name, 0.0)) for name in self.args.outputs}
        for rows in attention.rows():
            part, computed = slice(rows.start, rows.stop), self._rows(rows)
            for name, one in found.items():
                of_sequence = attention.of_queries if name == "out" else attention.of_lse
                of_sequence(one, rows.b)[:, part] = computed[name]
        return found

    def _rows(self, rows: Rows) -> Values:
        """Every output, asked for or not."""
        q, _, v, products = self.products(rows)
        scores, _, keep = self.attention.scores(rows, products)
        shape = q.shape[:2]
        largest = scores.amax(-1) if rows.keys else scores.new_full(shape, -_INFINITY)
        if "sink" in self.args.further:
            sink = self.attention.per_head("sink").squeeze(-1).expand(shape)
            largest = torch.maximum(largest, sink)
        shift = torch.where(largest == -_INFINITY, 0.0, largest)
        p = torch.exp(scores - shift.unsqueeze(-1))
        total = p.sum(-1)
        if "sink" in self.args.further:
            total = total + torch.exp(sink - shift)
        inverse = torch.where(total == 0, 0.0, 1 / total).unsqueeze(-1)
        kept = p if keep is None else p * keep
        if not self._bounds:
            out, lse = self.factor(kept) @ v * inverse, torch.log(total) + shift
            # Relative to a largest score of infinity no score is a number, nor is their sum.
            largest = torch.where(total.isnan(), total, largest)
            return {"out": out, "lse": lse, "score_max": largest, "score_sum_exp": total}
        kept, flushed = kept * inverse, self.flushed(p * inverse)
        of_scores = self._small * (1 + _largest(scores))
        random = (kept.square() @ v.square()).sqrt()
        error = of_scores.unsqueeze(-1) * kept + (flushed if keep is None else flushed * keep)
        allowed = self._unit * random + error @ v.abs()
        statistics = {"lse": of_scores, "score_max": of_scores, "score_sum_exp": of_scores * total}
        return {"out": allowed, **statistics}


class _Backward(_Computation):
    def values(self) -> Values:
        args, attention = self.args, self.attention
        found = {name: self.new(name) for name in args.outputs}
        for rows in attention.rows():
            self._add(rows, found)
        return found

    def _add(self, rows: Rows, found: Values) -> None:
        args, attention, b = self.args, self.attention, rows.b
        part = slice(rows.start, rows.stop)
        q, k, v, products = self.products(rows)
        scores = attention.scores(rows, products)
        lse = attention.converted(attention.of_lse(args.lse.tensor, b)[:, part]).unsqueeze(-1)
        out, dO = (
            attention.converted(attention.of_queries(one.tensor, b)[:, part])
            for one in (args.out, args.dO)
        )
        p = torch.where(lse == -_INFINITY, 0.0, torch.exp(scores.values - lse))
        delta = (out * dO).sum(-1, keepdim=True)
        keep = 1.0 if scores.keep is None else scores.keep
        dP = dO @ v.transpose(1, 2) * keep
        dS = p * (dP - delta)
        error = None
        if self._bounds:
            largest = dO.norm(dim=-1, keepdim=True) * v.norm(dim=-1).unsqueeze(1)
            error = p * (largest * keep + (out * dO).abs().sum(-1, keepdim=True))
            error = error * self._relative(scores.values) + self.flushed(p) * (dP - delta).abs()
            error = error + self.flushed(dS)
        self._beside(rows, found, dS if error is None else error, lse, delta)
        slope = attention.slope(rows, scores)
        if slope is not None:
            dS = torch.where(dS == 0, 0.0, dS * slope)
            if error is not None:
                error = error * torch.nan_to_num(slope).abs() + self.flushed(dS)
        scale = attention.number(args.scale)
        scale = abs(scale) if self._bounds else scale
        kept = p * keep
        error_of_kept = None
        if self._bounds:
            error_of_kept = (kept * self._relative(scores.values) + self.flushed(p) * keep).mT
        of_keys = self._product(dS.mT, q, None if error is None else error.mT) * scale
        of_values = self._product(kept.mT, dO, error_of_kept)
        own = attention.of_queries(found["dQ"], b)[:, part]
        own += self._product(dS, k, error) * scale
        for name, gradient in (("dK", of_keys), ("dV", of_values)):
            own = attention.of_keys(found[name], b)
            own += attention.summed_over_groups(gradient)

    def _product(self, left: Any, right: Any, error: Any) -> Any:
        """left · right with left as it is multiplied; or what that may be off by, if left is by
        an error."""
        if error is None:
            return self.factor(left) @ right
        random = (left.square() @ right.square()).sqrt()
        return self._unit * random + error @ right.abs()

    def _relative(self, scores: Any) -> Any:
        """What the exponential of scores is off by, of itself."""
        return self._small * (1 + _largest(scores).unsqueeze(-1))

    def _beside(self, rows: Rows, found: Values, dS: Any, lse: Any, delta: Any) -> None:
        """Gradients of bias and sink."""
        attention = self.attention
        if "dBias" in found:
            own = attention.of_bias(found["dBias"], rows)
            summed = [mode for mode in range(3) if own.shape[mode] == 1]
            own += dS.sum(summed, keepdim=True) if summed else dS
        if "dSink" in found:
            share = torch.exp(attention.per_head("sink") - lse)
            share = torch.where(lse == -_INFINITY, 0.0, share)
            if self._bounds:
                share, delta = self._small * share + self.flushed(share), -delta.abs()
            found["dSink"] -= (share * delta).squeeze(-1).sum(-1)


def _largest(scores: Any) -> Any:
    """The largest finite magnitude of each row."""
    finite = torch.where(torch.isfinite(scores), scores, 0.0).abs()
    return finite.amax(-1) if scores.shape[-1] else finite.sum(-1)


@ReferenceProvider.register
class ReferenceSdpa(ReferenceAttention):
    """Attention, with every mask and option."""

    family: ClassVar[str] = "reference.sdpa"
    arguments = SdpaArguments
    operands = (
        Operands(Q="any", K="any", V="any", out="any", accumulator="any", majors="strided"),
    )
    operands_metadata = SdpaOperandsMetadata
    computation = _Forward


@ReferenceProvider.register
class ReferenceSdpaBackward(ReferenceAttention):
    """The gradient of attention, with every mask and option."""

    family: ClassVar[str] = "reference.sdpa_backward"
    arguments = SdpaBackwardArguments
    operands = (
        Operands(
            Q="any",
            K="any",
            V="any",
            out="any",
            dO="any",
            lse="any",
            dQ="any",
            dK="any",
            dV="any",
            accumulator="any",
            majors="strided",
        ),
    )
    operands_metadata = SdpaBackwardOperandsMetadata
    computation = _Backward

"""Random products of groups: any form, types, majors, strides, groups, indices, scales, epilogues;
what they come to, in a loop over the groups that shares nothing with the library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import torch

import kernel_api as ka
from kernel_api import epilogue as ep
from kernel_api.dtypes import dtype
from support.data import fill, strided_empty

_MODES = ka.ScaleMode

#: Element types of A, B and out, of which some have no kernel; and those that have.
_TYPES = (
    ("bfloat16", "bfloat16", "bfloat16"),
    ("bfloat16", "bfloat16", "bfloat16"),
    ("float16", "float16", "float32"),
    ("float32", "float32", "float32"),
    ("float8_e4m3fn", "float8_e5m2", "bfloat16"),
    ("float8_e4m3fn", "float8_e4m3fn", "float32"),
    ("int8", "int8", "int32"),
    ("float64", "float64", "float64"),
    ("bfloat16", "float16", "float32"),
    ("float16", "float16", "float8_e4m3fn"),
    ("complex64", "complex64", "float32"),
)
_WITH_KERNELS = {"M": (*_TYPES[1:3], *_TYPES[4:7]), "K": _TYPES[1:3]}
_SCALES = (
    None,
    None,
    (_MODES.PER_TENSOR, _MODES.PER_TENSOR),
    (_MODES.PER_ROW, _MODES.PER_ROW),
    (_MODES.PER_ROW, _MODES.PER_TENSOR),
    (_MODES.BLOCK_1x128, _MODES.BLOCK_128x128),
    (_MODES.PER_ROW, None),
)
#: How what has a matrix per group is given.
_GIVEN = ("dense", "dense", "list", "pointers")
_SIZES = st.one_of(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.lists(st.sampled_from((0, 1, 31, 65)), min_size=1, max_size=4),
)
_ALIGNED = st.sampled_from((16, 32, 64, 144))
_EXTENTS = st.one_of(st.integers(0, 20), st.sampled_from((16, 32, 64, 136)))


@dataclass(frozen=True)
class Fused:
    """An epilogue, and what it makes of the accumulator of one group in float64.

    Attributes:
        columns: Of out, per column of the product.
        operands: From sizes (rows, N, groups) and whether rows are cut to shapes of what it reads.
        outputs: The same to the shapes of what it writes beside out.
        group: (accumulator, what is read of the group) to every output, out first.
    """

    fn: Callable[..., Any]
    columns: float
    operands: Callable[..., dict[str, tuple[int, ...]]]
    outputs: Callable[..., dict[str, tuple[int, ...]]]
    group: Callable[..., dict[str, torch.Tensor]]


def _weighted(accum, alpha, bias):
    return accum * alpha + bias


def _glu(accum, alpha):
    gate, up = ep.glu_pair(accum * alpha, granularity=1)
    return ep.silu(gate) * up, ep.amax(accum, None)


def _glu_of_group(accum, alpha):
    x = accum * alpha
    gate, up = x[..., 0::2], x[..., 1::2]
    largest = accum.abs().max() if accum.numel() else accum.new_zeros(())
    return {"out": gate * torch.sigmoid(gate) * up, "largest": largest}


def _summing(accum, alpha):
    y = accum * alpha
    return y, ep.sum(y, -1)


FUSED = {
    "weighted": Fused(
        _weighted,
        1,
        lambda rows, N, E, ragged: {"alpha": (E, 1, 1), "bias": (E, 1, N)},
        lambda rows, N, E, ragged: {},
        lambda accum, alpha, bias: {"out": accum * alpha + bias},
    ),
    "pairs": Fused(
        _glu,
        0.5,
        lambda rows, N, E, ragged: {"alpha": (E, 1, 1)},
        lambda rows, N, E, ragged: {"largest": (E,)},
        _glu_of_group,
    ),
    "sums of rows": Fused(
        _summing,
        1,
        lambda rows, N, E, ragged: {"alpha": (E, 1, 1)},
        lambda rows, N, E, ragged: {"sums": (rows,) if ragged else (E, rows)},
        lambda accum, alpha: {"out": accum * alpha, "sums": (accum * alpha).sum(-1)},
    ),
}


@dataclass(frozen=True)
class Problem:
    """One of them; `arguments` makes it on a device, the same numbers every time.

    Attributes:
        ragged: The form: ``"M"`` or ``"K"``.
        sizes: Of the groups.
        slack: Tokens behind the last.
        other: M of ragged K, K of ragged M.
        pads, offsets: Of A, B and out, in elements.
        given: How what has a matrix per group is given: one tensor, a list, or addresses.
        defect: What is wrong with the arguments; None if nothing.
    """

    ragged: str
    types: tuple[str, str, str]
    sizes: tuple[int, ...]
    slack: int
    N: int
    other: int
    layouts: str = "ttt"
    pads: tuple[int, int, int] = (0, 0, 0)
    offsets: tuple[int, int, int] = (0, 0, 0)
    given: str = "dense"
    scales: Any = None
    indices: tuple[str, ...] = ()
    accumulate: bool = False
    fused: str | None = None
    precision: str | None = None
    defect: str | None = None
    seed: int = 0
    kept: list[Any] = field(default_factory=list, compare=False, repr=False)

    @property
    def E(self) -> int:
        return len(self.sizes)

    @property
    def T(self) -> int:
        return sum(self.sizes) + self.slack

    @property
    def groups(self) -> list[slice]:
        ends = torch.tensor(self.sizes).cumsum(0).tolist()
        return list(map(slice, [0, *ends], ends))

    @property
    def out_columns(self) -> int:
        return int(self.N * (FUSED[self.fused].columns if self.fused else 1))

    def _shapes(self) -> list[tuple[int, ...]]:
        T, N, E, other = self.T, self.N, self.E, self.other
        if self.ragged == "K":
            return [(other, T), (T, N), (E, other, self.out_columns)]
        rows = 23 if "row_index" in self.indices else T
        out_rows = T + 5 if "out_row_index" in self.indices else T
        return [(rows, other), (E, other, N), (out_rows, self.out_columns)]

    def arguments(self, device: str = "cpu") -> ka.GroupedGemmArguments:
        """Raises what the arguments raise."""
        operands: list[Any] = [
            self._tensor(place, shape, device) for place, shape in enumerate(self._shapes())
        ]
        named: dict[str, Any] = {"accumulate": self.accumulate, "fp32_precision": self.precision}
        if self.fused:
            named["epilogue"] = self._epilogue(device)
        self._scale(operands, named)
        per_group = 1 if self.ragged == "M" else 2
        operands[per_group] = self._as_given(operands[per_group])
        offsets = torch.tensor(self.sizes, device=device).cumsum(0).int()
        random = torch.Generator().manual_seed(self.seed)
        picked = torch.randint(23, (self.T,), generator=random).int().to(device)
        placed = torch.randperm(self.T + 5, generator=random)[: self.T].int().to(device)
        for name, index in (("row_index", picked), ("out_row_index", placed)):
            if name in self.indices:
                named[name] = index
        if self.defect:
            DEFECTS[self.defect][0](self, operands, named)
            offsets = named.pop("offsets", offsets)
        return ka.GroupedGemmArguments(*operands, offsets, **named)

    def _tensor(self, place: int, shape: tuple[int, ...], device: str) -> torch.Tensor:
        how = {"pad": self.pads[place], "offset": self.offsets[place], "device": device}
        made = strided_empty(shape, dtype(self.types[place]).torch, self.layouts[place], **how)
        return made if device == "meta" else fill(made, 3 * self.seed + place)

    def _as_given(self, tensor: Any) -> Any:
        if self.given == "dense":
            return tensor
        parts = list(tensor.unbind())
        if self.given == "list":
            return parts
        addresses = [part.data_ptr() for part in parts]
        self.kept.append(tensor)
        joined = tensor.storage_offset() * tensor.element_size() | 128
        for address in addresses:
            joined |= address
        alignment = joined & -joined
        return ka.ExpertPointers(
            torch.tensor(addresses, dtype=torch.int64, device=tensor.device),
            shape=parts[0].shape,
            stride=parts[0].stride(),
            dtype=tensor.dtype,
            alignment=alignment,
        )

    def _scale(self, operands: list[Any], named: dict[str, Any]) -> None:
        """Give A and B their scales."""
        for place, mode in enumerate(self.scales or ()):
            if mode is None:
                continue
            tensor = operands[place]
            scale = self._values(self._scale_shape(place, mode, tensor.shape), tensor.device, place)
            scale = scale.abs() + 0.25
            if place == 1 and self.ragged == "M" and self.given != "dense":
                named["B_scale"] = scale
            else:
                operands[place] = ka.ScaledOperand(tensor, scale, mode)

    def _scale_shape(self, place: int, mode: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
        *batch, rows, columns = shape
        if mode is _MODES.PER_TENSOR:
            return tuple(batch)
        if mode is _MODES.PER_ROW:
            return (*batch, columns if place else rows)
        if place:
            return (*batch, -(-rows // 128), -(-columns // 128))
        return (rows, -(-columns // 128))

    def _values(self, shape: tuple[int, ...], device: Any, seed: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(100 * self.seed + seed)
        return torch.randn(shape, generator=random).to(device)

    def _epilogue(self, device: str) -> ka.EpilogueArguments:
        assert self.fused
        how = FUSED[self.fused]
        rows = self.T if self.ragged == "M" else self.other
        sizes = (rows, self.N, self.E, self.ragged == "M")
        read = {
            name: self._values(shape, device, 10 + place)
            for place, (name, shape) in enumerate(how.operands(*sizes).items())
        }
        written = {
            name: torch.empty(shape, device=device) for name, shape in how.outputs(*sizes).items()
        }
        return ka.EpilogueArguments(how.fn, **read, **written)

    # What they come to ---------------------------------------------------------------------

    def expected(
        self, args: ka.GroupedGemmArguments, before: torch.Tensor, wide: Any
    ) -> dict[str, torch.Tensor]:
        """Every output, of rows only those that belong to a group, computed in `wide`.

        before: What out held.
        """
        A, B = (self._real(args, place, wide) for place in (0, 1))
        found: dict[str, list[torch.Tensor]] = {}
        for group, tokens in enumerate(self.groups):
            product = self._product(args, A, B, group, tokens)
            outputs = {"out": product}
            if self.fused:
                read = {
                    name: one.tensor.to(wide)[group] for name, one in args.epilogue.inputs.items()
                }
                outputs = FUSED[self.fused].group(product, **read)
            if self.accumulate:
                outputs["out"] = outputs["out"] + before[group].to(wide)
            for name, values in outputs.items():
                found.setdefault(name, []).append(values)
        per_token = [n for n in found if self.ragged == "M" and n in ("out", "sums")]
        return {
            name: torch.cat(parts) if name in per_token else torch.stack(parts)
            for name, parts in found.items()
        }

    def _product(self, args: Any, A: Any, B: Any, group: int, tokens: slice) -> torch.Tensor:
        if self.ragged == "K":
            return A[:, tokens] @ B[tokens]
        rows: Any = tokens
        if args.row_index is not None:
            rows = args.row_index.tensor[tokens].long()
        return A[rows] @ B[group]

    def _real(self, args: Any, place: int, wide: Any) -> torch.Tensor:
        shape = self._shapes()[place]
        stored = self._tensor(place, shape, "cpu").to(wide)
        mode = (self.scales or (None, None))[place]
        if mode is None:
            return stored
        scale = self._values(self._scale_shape(place, mode, shape), "cpu", place).abs() + 0.25
        scale = scale.to(wide)
        if mode is _MODES.PER_TENSOR:
            return stored * scale[..., None, None]
        if mode is _MODES.PER_ROW:
            return stored * (scale[..., None, :] if place else scale[..., :, None])
        if place:
            scale = scale.repeat_interleave(128, -2)[..., : shape[-2], :]
        return stored * scale.repeat_interleave(128, -1)[..., : shape[-1]]


# What is wrong with some -------------------------------------------------------------------


def _wide_offsets(problem, operands, named):
    named["offsets"] = torch.tensor(problem.sizes).cumsum(0)


def _more_offsets(problem, operands, named):
    named["offsets"] = torch.zeros(problem.E + 1, dtype=torch.int32)


def _other_sum(problem, operands, named):
    operands[0] = torch.zeros(*operands[0].shape[:-1], operands[0].shape[-1] + 1)


def _flat_out(problem, operands, named):
    operands[2] = torch.zeros(3)


def _option_of_the_other_form(problem, operands, named):
    if problem.ragged == "M":
        named["accumulate"] = True
    else:
        named["row_index"] = torch.zeros(problem.T, dtype=torch.int32)


#: What is done to the operands, and what the error says.
DEFECTS = {
    "wide offsets": (_wide_offsets, "offsets is int64; expected int32"),
    "more offsets": (_more_offsets, "offsets has shape"),
    "another sum": (_other_sum, "A has "),
    "an out of one mode": (_flat_out, "out rank 1"),
    "an option of the other form": (_option_of_the_other_form, " and the groups are "),
}


# Drawn -------------------------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn, often: bool = False) -> Problem:
    """Whatever the arguments take; now and then what they do not. Often: what kernels take."""
    common = often and draw(st.integers(0, 4)) > 0
    ragged = draw(st.sampled_from("MMK"))
    types = draw(st.sampled_from(_WITH_KERNELS[ragged] if common else _TYPES))
    extents = _ALIGNED if common else _EXTENTS
    plain = common or draw(st.booleans())
    pads = st.sampled_from((0, 0, 1, 3, 8))
    scales = draw(st.sampled_from(_SCALES))
    if common and not types[0].startswith("float8"):
        scales = None
    given = draw(st.sampled_from(_GIVEN))
    if ragged == "K" and scales and _MODES.BLOCK_1x128 in scales:
        scales = None
    if types[0].startswith("complex"):
        scales = None
    fused = draw(st.sampled_from((None, None, *FUSED))) if types[2] != "float64" else None
    if scales or types[0].startswith(("int", "complex")):
        fused = None
    N = draw(extents)
    layouts = "".join(draw(st.sampled_from("tn")) for _ in range(3))
    if common or draw(st.booleans()):
        layouts = "ntt" if ragged == "K" else "tnt"
    indices = ("row_index", "out_row_index")
    return Problem(
        ragged,
        types,
        tuple(draw(_SIZES)),
        draw(st.sampled_from((0, 0, 3))),
        2 * N if fused == "pairs" else N,
        draw(extents),
        layouts,
        *((draw(pads), draw(pads), draw(pads)) if not plain else (0, 0, 0) for _ in range(2)),
        given=given,
        scales=scales,
        indices=tuple(n for n in indices if ragged == "M" and draw(st.integers(0, 3)) == 0),
        accumulate=ragged == "K" and types[2] != "float8_e4m3fn" and draw(st.booleans()),
        fused=fused,
        precision=draw(st.sampled_from((None, "tf32"))),
        defect=draw(st.sampled_from((None,) * 8 + tuple(DEFECTS))),
        seed=draw(st.integers(0, 99)),
    )


def _of_each_form() -> list[Problem]:
    """One for every family of kernels of the GPU."""
    bf16, fp8 = ("bfloat16",) * 3, ("float8_e4m3fn", "float8_e5m2", "bfloat16")
    sizes = {"sizes": (5, 0, 7), "slack": 3, "N": 32, "other": 64}
    found = []
    for given in ("dense", "list", "pointers"):
        found += [
            Problem("M", bf16, layouts="tnt", given=given, **sizes),
            Problem("K", bf16, layouts="ntt", given=given, accumulate=True, **sizes),
            Problem("M", fp8, layouts="tnt", given=given, scales=_SCALES[3], **sizes),
        ]
    return [*found, Problem("M", ("int8", "int8", "int32"), layouts="tnt", **sizes)]


OF_EACH_FORM = _of_each_form()

"""What the arguments of attention share, forward and backward."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, ClassVar

from kernel_api._numbers import real_number, whole_number
from kernel_api._score import ScoreFunction
from kernel_api._sketch import Sketch
from kernel_api.arguments import _attention_checks as checks
from kernel_api.arguments.base import Arguments, alike, check_number
from kernel_api.arguments.dropout import Dropout, one_number
from kernel_api.dtypes import DType, dtype
from kernel_api.epilogue.graph import Graph
from kernel_api.errors import ArgumentError, EpilogueError
from kernel_api.masks import Mask
from kernel_api.operands import Operand, as_torch

_FLOAT32, _FLOAT64 = dtype("float32"), dtype("float64")

#: Tensors beside the operands, in the order of launch values, those of functions follow.
TENSORS = (
    *checks.STATISTICS, "bias", "alibi", "sink", "seq_lens_q", "seq_lens_kv", "cu_seqlens_q",
    "cu_seqlens_kv", "page_table", "descale_q", "descale_k", "descale_v", "blocks", "dBias",
    "dSink",
)  # fmt: skip

#: Launch values that no keyword of the constructor has the name of.
_BOUNDS = ("left", "right", "left_end", "right_end")
_STATE = ("dropout_p", "dropout_seed", "dropout_offset")

#: What launches call the operands of functions begins with these.
_MASK, _SCORE = "mask_", "score_"

_Fitting = tuple[Any, ...]

#: Layouts of plain operands, with their mask, that passed all checks but the one for addresses.
_fitting: set[_Fitting] = set()
_FITTING_KEPT = 4096


class AttentionArguments(Arguments):
    """Attention of queries to keys and values, or the gradient of it.

    Attributes:
        further: Tensors beside the operands that are there, by the names of launch values.
        scale: What products of queries and keys are multiplied with.
        softcap: None without one.
        mask, score, dropout: None without one.
        max_seqlen_q, max_seqlen_kv: Of packed queries and packed keys; else None.
        values_in_keys: Whether V is the first columns of K, in the same memory.
    """

    __slots__ = (
        "K",
        "Q",
        "V",
        "dropout",
        "further",
        "mask",
        "max_seqlen_kv",
        "max_seqlen_q",
        "out",
        "scale",
        "score",
        "softcap",
        "values_in_keys",
    )

    Q: Operand
    K: Operand
    V: Operand
    out: Operand
    further: dict[str, Operand]
    scale: float
    softcap: float | None
    mask: Mask | None
    score: ScoreFunction | None
    dropout: Dropout | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    values_in_keys: bool

    #: Keywords of tensors that the constructor takes, of those in ``TENSORS``.
    tensor_names: ClassVar[tuple[str, ...]]

    def _begin(self, operands: tuple[Operand, ...]) -> None:
        """Keep the operands; before all else."""
        self.operands = operands
        self.Q, self.K, self.V, self.out = operands[:4]
        self.accumulator_type = _FLOAT64 if operands[0].dtype is _FLOAT64 else _FLOAT32
        self.epilogue = self.softcap = self.mask = self.score = self.dropout = None
        self.max_seqlen_q = self.max_seqlen_kv = None
        self.values_in_keys = False
        self._signature = self._key = None
        self._accepted = {}

    def _known(
        self, look: _Fitting, written: Iterable[Operand], every: tuple[Operand, ...]
    ) -> bool:
        """Whether plain operands like these passed before; what asks for addresses is checked."""
        if look not in _fitting:
            return False
        self.device = every[0].device
        if not checks.all_apart(every):
            for out in written:
                self._check_apart(out, every)
        return True

    @staticmethod
    def _remember(look: _Fitting) -> None:
        if len(_fitting) >= _FITTING_KEPT:
            _fitting.clear()
        _fitting.add(look)

    def _take(self, options: Mapping[str, Any]) -> None:
        """Keep what is beside the operands, by the constructor's keywords, and check everything."""
        self.softcap = checks.softcap_of(options["softcap"], self.accumulator_type)
        self.mask = checks.instance_of("mask", options["mask"], Mask)
        self.dropout = checks.instance_of("dropout", options["dropout"], Dropout)
        self.score = score_of(options["score_mod"], options["score_operands"])
        given = {name: options.get(name) for name in TENSORS}
        if self.mask is not None and self.mask.blocks is not None:
            given["blocks"] = self.mask.blocks.table
        self.further = {n: operand_of(one, n) for n, one in given.items() if one is not None}
        for name, one in self._function_operands.items():
            if name in TENSORS:
                raise EpilogueError(
                    f"an operand of score_mod is called {name.removeprefix(_SCORE)}; launches take "
                    f"it as {name}, which is taken by the arguments: choose another name"
                )
            if isinstance(one, Operand):
                self.further[name] = one
        for name in ("max_seqlen_q", "max_seqlen_kv"):
            whole = whole_number(options[name])
            setattr(self, name, options[name] if whole is None else whole)
        checks.check(self)
        for name in ("bias", "dBias"):
            if name in self.further:
                self.further[name] = _like_scores(self.further[name], name)
        self._check_devices()
        self._check_outputs()

    # What there is -----------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """What is beside the operands: an Operand, or None."""
        if name in TENSORS:
            return self.further.get(name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def is_packed(self) -> bool:
        """Whether sequences of different lengths stand one behind the other: Q (T, H, D). So do
        keys that are not in pages."""
        return "cu_seqlens_q" in self.further

    @property
    def is_paged(self) -> bool:
        """Whether K and V are pages: (pages, H_kv, page_size, D)."""
        return "page_table" in self.further

    @property
    def is_padded(self) -> bool:
        """Whether sequences have lengths of their own within the modes of the operands."""
        return "seq_lens_q" in self.further or "seq_lens_kv" in self.further

    @property
    def B(self) -> int:
        """Sequences."""
        return self.further["cu_seqlens_q"].shape[0] - 1 if self.is_packed else self.Q.shape[0]

    @property
    def H(self) -> int:
        """Heads of queries."""
        return self.Q.shape[1]

    @property
    def H_kv(self) -> int:
        """Heads of keys and values; each is for H / H_kv neighbouring heads of queries."""
        return self.K.shape[1]

    @property
    def S_q(self) -> int:
        """Queries of a sequence, at most."""
        return self.Q.shape[2] if self.max_seqlen_q is None else self.max_seqlen_q

    @property
    def S_kv(self) -> int:
        """Keys of a sequence, at most."""
        if self.is_paged:
            return self.further["page_table"].shape[1] * self.K.shape[2]
        return self.K.shape[2] if self.max_seqlen_kv is None else self.max_seqlen_kv

    @property
    def D(self) -> int:
        """Elements of a query and of a key."""
        return self.Q.shape[-1]

    @property
    def D_v(self) -> int:
        """Elements of a value."""
        return self.V.shape[-1]

    @property
    def page_size(self) -> int | None:
        return self.K.shape[2] if self.is_paged else None

    @property
    def bounds(self) -> dict[str, int]:
        """Of the band that is visible, see :attr:`kernel_api.masks.Mask.bounds`."""
        return {} if self.mask is None else self.mask.bounds

    @property
    def block_shape(self) -> tuple[int, int] | None:
        """Queries and keys of a block of the table ``blocks``."""
        blocks = None if self.mask is None else self.mask.blocks
        return None if blocks is None else blocks.block_shape

    @property
    def mask_graph(self) -> Graph | None:
        """Of all mask functions together; its operand x is the launch value ``mask_x``."""
        return None if self.mask is None else self.mask.graph

    @property
    def score_graph(self) -> Graph | None:
        """Of the score function; its operand x is the launch value ``score_x``."""
        return None if self.score is None else self.score.graph

    @property
    def sizes(self) -> dict[str, int]:
        names = ("B", "H", "H_kv", "S_q", "S_kv", "D", "D_v")
        found = {name: getattr(self, name) for name in names}
        if self.is_packed:  # few sequences may be as long as the longest
            found["T"] = self.Q.shape[0]
            if not self.is_paged:
                found["T_kv"] = self.K.shape[0]
        return found

    @property
    def least_factor(self) -> float:
        """A tanh of scores adds to their error."""
        return 0.0 if self.softcap is None else 3.0

    @property
    def named_operands(self) -> dict[str, Operand]:
        named = dict(zip(self.operand_names, self.operands, strict=True))
        state = {} if self.dropout is None else self.dropout.tensors
        return {**named, **self.further, **state}

    @property
    def outputs(self) -> dict[str, Operand]:
        named = {**dict(zip(self.operand_names, self.operands, strict=True)), **self.further}
        return {name: named[name] for name in self.output_names if name in named}

    @property
    def launch_values(self) -> dict[str, Any]:
        """Tensors and numbers beside the operands, by name: what a launch may be given anew. Those
        that are not there have no name here; the order is always the same."""
        further = self.further
        found = {name: further[name].tensor for name in TENSORS if name in further}
        found.update(values_of_functions(self.mask, self.score))
        return {**found, **self._numbers()}

    @property
    def _function_operands(self) -> dict[str, Operand | float]:
        return _operands_of_functions(self.mask, self.score)

    def _numbers(self) -> dict[str, Any]:
        found: dict[str, Any] = {"scale": self.scale}
        if self.softcap is not None:
            found["softcap"] = self.softcap
        found.update(self.bounds)
        if self.dropout is not None:
            found.update(self.dropout.values)
        for name in ("max_seqlen_q", "max_seqlen_kv"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        return found

    def draw_indices(self, random: Any) -> None:
        """Sequences of equal length that fill what there is, pages in order, and a log-sum-exp
        that the scores of a row may have."""
        from kernel_api.arguments._attention_data import draw

        draw(self)

    # Made again --------------------------------------------------------------------------

    def rebuilt(self, /, *tensors: Any, **others: Any) -> AttentionArguments:
        """The same problem on other tensors: the operands, then ``lse`` of the forward pass, or by
        the names of launch values. Those that are not given stay."""
        placed = ("lse",) if len(tensors) > len(self.operands) else ()
        kept = {name: value for name, value in self.launch_values.items() if name not in placed}
        made = self.blueprint()(*tensors, **{**kept, **others})
        assert isinstance(made, AttentionArguments)
        return made

    def blueprint(self) -> Callable[..., Arguments]:
        kind, count = type(self), len(self.operands)
        own, behind = self.operand_names, self._behind_operands()
        makers = [operand.maker() for operand in self.operands]
        mask, score = _without_data(self.mask, self.score)
        names, known = self.tensor_names, (*self.launch_values, "lse")
        options = self._lasting_options()

        def make(*tensors: Any, **values: Any) -> Arguments:
            unknown = [name for name in values if name not in known]
            if unknown:
                raise ArgumentError(
                    f"these {kind.__name__} take no {unknown[0]}; they take {', '.join(known)}"
                )
            check_number(tensors, own, behind)
            given = {**options, **{n: values[n] for n in names if n in values}}
            given.update((n, values[n]) for n in _SCALARS if n in values)
            given.update(zip(behind, tensors[count:], strict=False))
            if mask is not None:
                bounds = {name: values[name] for name in _BOUNDS if name in values}
                operands = _own(mask.operands, values, _MASK)
                given["mask"] = mask.rebuilt(bounds, values.get("blocks"), operands)
            if score is not None:
                operands = _own(score.operands, values, _SCORE)
                given["score_mod"] = score.with_operands(operands)
            if "dropout_p" in values:
                given["dropout"] = Dropout(*(values[name] for name in _STATE))
            return kind(*alike(tensors[:count], makers), **given)

        return make

    def _behind_operands(self) -> tuple[str, ...]:
        """Names of tensors that a launch takes by their places, too."""
        return () if "lse" in self.operand_names else ("lse",)

    def checked(self, launch: Callable[..., None]) -> Callable[..., None]:
        """A launch with the head dimensions and the page size that kernels are chosen and compiled
        for."""
        count, D, D_v, page_size = len(self.operands), self.D, self.D_v, self.page_size
        within = self.values_in_keys
        operands, behind = self.operand_names, self._behind_operands()
        state = () if self.dropout is None else tuple(self.dropout.tensors)

        # Written out: a launch costs little more.
        def checked_launch(*tensors: Any, **others: Any) -> None:
            if len(tensors) < count:
                check_number(tensors, operands, behind)
            if not hasattr(tensors[0], "shape"):  # arrays that have DLPack alone
                named = zip(tensors, (*operands, *behind), strict=False)
                tensors = tuple(as_torch(one, name) for one, name in named)
            if tensors[0].shape[-1] != D:
                raise _prepared_for("Q", "D", tensors[0].shape[-1], D)
            if tensors[2].shape[-1] != D_v:
                raise _prepared_for("V", "D_v", tensors[2].shape[-1], D_v)
            if page_size is not None and tensors[1].shape[2] != page_size:
                raise _prepared_for("K", "page_size", tensors[1].shape[2], page_size)
            if within and not _begin_together(tensors[1], tensors[2]):
                raise ArgumentError(
                    "V lies apart from K; the launch is prepared for values that are the first "
                    "columns of K: pass K[..., :D_v], or prepare another launch"
                )
            if state:
                others.update((name, one_number(others[name])) for name in state)
            launch(*tensors, **others)

        return checked_launch

    def _own_options(self) -> dict[str, Any]:
        """What the constructor takes beside launch values."""
        return {}

    def _lasting_options(self) -> dict[str, Any]:
        """The same, of all arguments that a launch is prepared for."""
        return self._own_options()

    def _keywords(self) -> dict[str, Any]:
        names = self.tensor_names
        tensors = {n: self.further[n] for n in TENSORS if n in self.further and n in names}
        objects = {"mask": self.mask, "score_mod": self.score, "dropout": self.dropout}
        present = {name: one for name, one in objects.items() if one is not None}
        numbers = {n: one for n, one in self._numbers().items() if n in _SCALARS}
        return {**tensors, **present, **numbers, **self._own_options()}

    # What tells two problems apart -------------------------------------------------------

    def _options(self) -> tuple[Hashable, ...]:
        further = self.further
        if not further and nothing(self.mask, self.score, self.dropout, self.softcap):
            return (*self._own_options().values(),)
        tensors = tuple([(n, o.dtype.name, o.rank, o.unit_mode) for n, o in further.items()])
        numbers = tuple([(n, type(one).__name__) for n, one in self._function_numbers()])
        state: tuple[Hashable, ...] = ()
        if self.dropout is not None:
            state = tuple([(n, getattr(one, "shape", None) is None) for n, one in self._state()])
        values = tuple(self._numbers())
        graphs = tuple([g.identity if g else None for g in (self.mask_graph, self.score_graph)])
        pages = (self.page_size, self.block_shape)
        return (tensors, numbers, state, values, *pages, *graphs, *self._own_options().values())

    def _function_numbers(self) -> list[tuple[str, Any]]:
        given = self._function_operands.items()
        return [(name, one) for name, one in given if not isinstance(one, Operand)]

    def _state(self) -> list[tuple[str, Any]]:
        assert self.dropout is not None
        return [("seed", self.dropout.seed), ("offset", self.dropout.offset)]

    @property
    def key(self) -> tuple[Hashable, ...]:
        if self._key is None:
            further = tuple([(o.layout, o.alignment) for o in self.further.values()])
            bounds = tuple(self.bounds.values())
            scale = None if self.scale >= checks.LEAST else self.scale  # kernels take those above
            numbers = (scale, self.max_seqlen_q, self.max_seqlen_kv)
            self._key = (*super().key, further, bounds, *numbers)
        return self._key

    def _all_operands(self) -> tuple[Operand, ...]:
        return tuple(self.named_operands.values())

    def __repr__(self) -> str:
        q, out = self.Q.dtype.short, self.operands[3].dtype.short
        form = "packed " * self.is_packed + "paged " * self.is_paged
        heads, dims = (
            one if one == other else f"{one}/{other}"
            for one, other in ((self.H, self.H_kv), (self.D, self.D_v))
        )
        beside = [name for name in self.further if name != "lse"]
        parts = [repr(self.mask)] if self.mask is not None else []
        parts += ["softcap"] * (self.softcap is not None) + ["score_mod"] * (self.score is not None)
        parts += ["dropout"] * (self.dropout is not None)
        parts += [name for name in beside if not name.startswith((_MASK, "blocks"))]
        parts += [name for name, on in self._own_options().items() if on]
        return (
            f"{type(self).__name__}({form}{self.B}x{heads}x{self.S_q}x{self.S_kv} (B x H x S_q x "
            f"S_kv), D = {dims}, {q} -> {out}"
            f"{''.join(f', {part}' for part in parts)}, on {self.device})"
        )


def are_in_keys(K: Operand, V: Operand) -> bool:
    """Whether V is the first columns of K, in the same memory; not all of them, as where tokens
    attend to themselves by chance."""
    if K.address != V.address or K.shape[:-1] != V.shape[:-1] or K.dtype is not V.dtype:
        return False
    if not K.shape or V.shape[-1] >= K.shape[-1] or not _step_alike(V.shape, K.stride, V.stride):
        return False
    if K.address:
        return True
    one, other = K.tensor, V.tensor
    if isinstance(one, Sketch) or isinstance(other, Sketch):
        return False
    same = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return bool(same and one.storage_offset() == other.storage_offset())


def _begin_together(K: Any, V: Any) -> bool:
    """The same of tensors whose extents are known to fit."""
    if not (hasattr(K, "data_ptr") and hasattr(V, "data_ptr")):  # arrays of other libraries
        K, V = as_torch(K, "K"), as_torch(V, "V")
    same = K.data_ptr() == V.data_ptr()
    return bool(same and _step_alike(V.shape, K.stride(), V.stride()))


def _step_alike(shape: tuple[int, ...], one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether strides are the same; that of a single head is what torch made of it."""
    if one == other:
        return True
    return all(a == b for extent, a, b in zip(shape, one, other, strict=True) if extent > 1)


def _prepared_for(name: str, letter: str, given: int, prepared: int) -> ArgumentError:
    return ArgumentError(
        f"{name} has {letter} = {given}; the launch is prepared for {letter} = {prepared}: prepare "
        f"another one"
    )


def nothing(*values: Any) -> bool:
    """Whether all are None."""
    for value in values:  # noqa: SIM110 (a generator costs more)
        if value is not None:
            return False
    return True


_SCALARS = ("scale", "softcap", "max_seqlen_q", "max_seqlen_kv")


def _own(operands: Iterable[str], values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Of launch values, those of a function's operands, by the names that it has for them."""
    return {name: values[prefix + name] for name in operands if prefix + name in values}


def values_of_functions(mask: Mask | None, score: ScoreFunction | None) -> dict[str, Any]:
    """Of launch values, those that a mask and a function of scores bring."""
    found: dict[str, Any] = {}
    if mask is not None and mask.blocks is not None:
        found["blocks"] = mask.blocks.table.tensor
    for name, one in _operands_of_functions(mask, score).items():
        found[name] = getattr(one, "tensor", one)
    return found


def _without_data(
    mask: Mask | None, score: ScoreFunction | None
) -> tuple[Mask | None, ScoreFunction | None]:
    """The same on tensors that have no memory."""

    def emptied(operands: Mapping[str, Operand | float]) -> dict[str, Any]:
        return {
            name: one.tensor.to("meta") if isinstance(one, Operand) else one
            for name, one in operands.items()
        }

    if mask is not None and not mask.is_simple:
        table = None if mask.blocks is None else mask.blocks.table.tensor.to("meta")
        mask = mask.rebuilt(mask.bounds, table, emptied(mask.operands))
    return mask, None if score is None else score.with_operands(emptied(score.operands))


def _operands_of_functions(
    mask: Mask | None, score: ScoreFunction | None
) -> dict[str, Operand | float]:
    found: dict[str, Operand | float] = {}
    for prefix, one in ((_MASK, mask), (_SCORE, score)):
        if one is not None:
            found.update((prefix + name, value) for name, value in one.operands.items())
    return found


def score_of(fn: Any, operands: Any) -> ScoreFunction | None:
    operands = operands_of_score(operands)
    if fn is None:
        if operands:
            raise ArgumentError("score_operands are given and score_mod is not; they are its own")
        return None
    if isinstance(fn, ScoreFunction):
        return fn.with_operands(operands) if operands else fn
    return ScoreFunction(fn, True, operands)


def operands_of_score(operands: Any) -> Mapping[str, Any]:
    """What ``score_operands`` gives by name."""
    if operands is None:
        return {}
    if not isinstance(operands, Mapping):
        raise ArgumentError(
            f"score_operands is a {type(operands).__name__}; expected a dict of operands by name"
        )
    return operands


def operand_of(value: Any, name: str) -> Operand:
    if not isinstance(value, Operand):
        return Operand(value, name)
    if value.mode is not None:
        raise ArgumentError(
            f"{name} is a ScaledOperand; attention takes plain tensors, and descale_q, descale_k, "
            f"descale_v"
        )
    return value


def like_scores(bias: Any) -> Any:
    """A bias as tensor of four modes: those that lack in front are 1."""
    lacking = 4 - bias.dim()
    return bias if lacking <= 0 else bias[(None,) * lacking]


def _like_scores(bias: Operand, name: str) -> Operand:
    return bias if bias.rank == 4 else Operand(like_scores(bias.tensor), name)


def scale_of(scale: Any, D: int, scores: DType) -> float:
    """The given one, or 1 / √D; scores: the type that it is multiplied in."""
    if scale is None:
        return 1.0 / math.sqrt(D) if D else 1.0
    if type(scale) is float and -checks.LARGEST <= scale <= checks.LARGEST:
        return scale
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise ArgumentError(f"scale is {scale!r}; expected a finite number, or None for 1/√D")
    found = real_number("scale", scale)
    if not math.isfinite(found):
        raise ArgumentError(f"scale is {scale!r}; expected a finite number")
    checks.require_held("scale", found, scores)
    return found

"""Numbers with a scale for each block (OCP Microscaling Formats, version 1.0)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kernel_api.errors import GraphError
from kernel_api.graph._builder import Builder
from kernel_api.graph._enums import data_type, element_type
from kernel_api.graph._kinds import WHOLE, Kind, list_of, whole
from kernel_api.graph._node import Node, Operation, settle, strides_of
from kernel_api.graph._options import one_whole, optional_whole, whole_or_wholes
from kernel_api.graph._tensor import memory_order, packed_strides

#: Types that data may have, and scales.
_DATA = (data_type.FP8_E4M3, data_type.FP8_E5M2)
_SCALES = (data_type.FP8_E8M0, data_type.FLOAT)


class QuantizeMethods(Builder):
    """Conversions between numbers and blocks that share a scale."""

    def block_scale_quantize(
        self,
        input: Any,
        block_size: int,
        axis: int | None = None,
        transpose: bool = False,
        compute_data_type: Any = None,
        name: str | None = None,
    ) -> Any:
        """Rounds to 8-bit floats, a block of neighbours at a time.

        Args:
            input: Of any dim.
            block_size: Elements of a block; the last block of a row may be shorter.
            axis: Along which blocks lie; the last by default.
            transpose: Kept for compatibility; only False is supported, see ``transpose``.

        Returns:
            (Y, scale): Y FP8_E4M3, or FP8_E5M2 if that is set, in the dim of the input; scale in
            this dim with ⌈extent / block_size⌉ along the axis, FP8_E8M0, or FLOAT if that is set.
            The scale of a block is its largest magnitude / the largest finite one of Y, of FP8_E8M0
            rounded up to a power of two; the smallest there is (of FLOAT the smallest that is
            normal) at least, as of zeros, and the largest finite one at most, as of infinities.
            input ≈ Y · scale. A block with NaN is NaN as a whole.

        Raises:
            GraphError: ``block_size`` is less than 1, or ``transpose`` is set.
        """
        size = one_whole("block_scale_quantize", "block_size", block_size)
        mode = optional_whole("block_scale_quantize", "axis", axis)
        if size < 1:
            raise GraphError(
                f"block_scale_quantize has block_size = {block_size}; expected 1 or more"
            )
        if transpose:
            raise GraphError(
                "block_scale_quantize has transpose = True; transpose its result instead"
            )
        return self._add(
            "block_scale_quantize", {"input": input}, name=name, compute=compute_data_type,
            block_size=size, axis=-1 if mode is None else mode,
        )  # fmt: skip

    def block_scale_dequantize(
        self,
        input: Any,
        descale: Any = None,
        block_size: int | list[int] | tuple[int, ...] = 32,
        compute_data_type: Any = None,
        name: str | None = None,
        *,
        scale: Any = None,
        axis: int | None = None,
    ) -> Any:
        """Y = input · descale, of each block.

        Args:
            input: Of any dim.
            descale: In this dim, but ⌈extent / block_size⌉ along the axis; ``scale`` is another
                name of it.
            block_size: Elements of a block along the axis; or one number for each mode.
            axis: Along which blocks lie; the last by default.

        Raises:
            GraphError: not one of ``descale`` and ``scale`` is given, or ``block_size`` is less
                than 1.
        """
        if (descale is None) == (scale is None):
            raise GraphError("block_scale_dequantize takes descale= or scale=, which are the same")
        found = whole_or_wholes("block_scale_dequantize", "block_size", block_size)
        sizes = [found] if isinstance(found, int) else found
        mode = optional_whole("block_scale_dequantize", "axis", axis)
        if not sizes or min(sizes) < 1:
            raise GraphError(
                f"block_scale_dequantize has block_size = {block_size}; expected 1 or more"
            )
        given = {"input": input, "descale": scale if descale is None else descale}
        return self._add(
            "block_scale_dequantize", given, name=name, compute=compute_data_type,
            block_size=sizes, axis=-1 if mode is None else mode,
        )  # fmt: skip


class BlockScaleQuantize(Operation):
    """8-bit floats, and the scale of each block."""

    name = "block_scale_quantize"
    result = ("Y", "scale")
    inputs = ("input",)
    attributes: ClassVar[dict[str, Kind]] = {"block_size": whole(1), "axis": WHOLE}

    def infer(self, node: Node) -> None:
        x = node.input("input")
        axis = _axis(node, x.dim)
        blocks = list(x.dim)
        blocks[axis] = -(-blocks[axis] // node["block_size"])
        settle(node, node.outputs["Y"], x.dim, strides_of(x), data_type.FP8_E4M3)
        order = memory_order(x.dim, x.stride)
        scale = node.outputs["scale"]
        settle(node, scale, tuple(blocks), packed_strides(blocks, order), data_type.FP8_E8M0)
        for tensor, allowed in ((node.outputs["Y"], _DATA), (scale, _SCALES)):
            if tensor.data_type not in allowed:
                names = " or ".join(one.name for one in allowed)
                raise GraphError(
                    f"{tensor}, which {node} writes, is {tensor.data_type.name}; expected {names}"
                )

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        from kernel_api.providers.reference.epilogue import rounded

        x = given["input"].to(node.arithmetic)
        axis, size = _axis(node, tuple(x.shape)), node["block_size"]
        data, kind = (element_type(node.outputs[name].data_type) for name in ("Y", "scale"))
        extent = x.shape[axis]
        padded: Any = torch.nn.functional.pad(x.transpose(axis, -1), (0, -extent % size))
        largest = padded.unflatten(-1, (-1, size)).abs().amax(-1)
        limits = torch.finfo(kind.torch)
        exact = (largest / torch.finfo(data.torch).max).clamp(limits.tiny, limits.max)
        scale = rounded(exact, kind).to(x.dtype)
        spread = scale.repeat_interleave(size, dim=-1)[..., :extent].transpose(axis, -1)
        return {"Y": rounded(x / spread, data), "scale": scale.transpose(axis, -1)}


class BlockScaleDequantize(Operation):
    """Each block times its scale."""

    name = "block_scale_dequantize"
    result = ("Y",)
    inputs = ("input", "descale")
    attributes: ClassVar[dict[str, Kind]] = {"block_size": list_of(whole(1)), "axis": WHOLE}

    def infer(self, node: Node) -> None:
        x, descale = node.input("input"), node.input("descale")
        sizes = _block_sizes(node, x.dim)
        expected = tuple(-(-n // size) for n, size in zip(x.dim, sizes, strict=True))
        if descale.dim != expected:
            raise GraphError(
                f"{node} has descale of dim {list(descale.dim)}; its input {list(x.dim)} has "
                f"{list(expected)} blocks"
            )
        settle(node, node.outputs.get("Y"), x.dim, strides_of(x))

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        x, descale = (given[name].to(node.arithmetic) for name in ("input", "descale"))
        for mode, size in enumerate(_block_sizes(node, tuple(x.shape))):
            if size > 1:
                descale = descale.repeat_interleave(size, dim=mode).narrow(mode, 0, x.shape[mode])
        return {"Y": x * descale}


def _axis(node: Node, dim: tuple[int, ...]) -> int:
    axis: int = node["axis"]
    if not -len(dim) <= axis < len(dim):
        raise GraphError(f"{node} has axis {axis}; its input has dim {list(dim)}")
    return axis % len(dim)


def _block_sizes(node: Node, dim: tuple[int, ...]) -> list[int]:
    """Elements of a block along each mode."""
    given: list[int] = node["block_size"]
    if len(given) == len(dim):
        return given
    if len(given) == 2 and len(dim) > 2:
        return [1] * (len(dim) - 2) + given
    if len(given) != 1:
        raise GraphError(
            f"{node} has block_size {given}; its input has {len(dim)} modes: expected one number, "
            f"or one for each"
        )
    sizes = [1] * len(dim)
    sizes[_axis(node, dim)] = given[0]
    return sizes

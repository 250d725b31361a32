"""Convolutions of one to three spatial modes, and their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from kernel_api._float32 import exact_convolutions
from kernel_api.errors import GraphError
from kernel_api.graph._builder import Builder
from kernel_api.graph._enums import convolution_mode, member_of
from kernel_api.graph._kinds import Kind, either, list_of, one_of, whole
from kernel_api.graph._node import Node, Operation, settle
from kernel_api.graph._options import whole_or_wholes
from kernel_api.graph._tensor import packed_strides

_Numbers = int | Sequence[int] | None
_Mode = convolution_mode


class ConvolutionMethods(Builder):
    """Convolutions.

    Dims are (N, C, spatial...) of images and (K, C / groups, spatial...) of filters, whatever the
    memory order; results lie channels last unless their strides are set. Paddings, strides and
    dilations are one number per spatial mode, or one for all; ``padding`` is for both sides,
    ``pre_padding`` and ``post_padding`` for one each. ``convolution_mode`` CONVOLUTION turns the
    filter round.
    """

    def conv_fprop(
        self,
        image: Any,
        weight: Any,
        padding: _Numbers = None,
        stride: _Numbers = None,
        dilation: _Numbers = None,
        pre_padding: _Numbers = None,
        post_padding: _Numbers = None,
        convolution_mode: Any = "CROSS_CORRELATION",
        compute_data_type: Any = None,
        name: str | None = None,
    ) -> Any:
        """Y (N, K, o...), o = 1 + (i + pre + post − dilation · (k − 1) − 1) // stride.

        Args:
            image: (N, C, i...).
            weight: (K, C / groups, k...); the number of groups is what C is of its mode 1.

        Raises:
            GraphError: ``padding`` is given beside ``pre_padding`` or ``post_padding``.
        """
        sides = (padding, pre_padding, post_padding)
        how = _attributes("conv_fprop", sides, stride, dilation, convolution_mode)
        given = {"image": image, "weight": weight}
        return self._add("conv_fprop", given, name=name, compute=compute_data_type, **how)

    def conv_dgrad(
        self,
        loss: Any = None,
        filter: Any = None,
        padding: _Numbers = None,
        stride: _Numbers = None,
        dilation: _Numbers = None,
        pre_padding: _Numbers = None,
        post_padding: _Numbers = None,
        convolution_mode: Any = "CROSS_CORRELATION",
        compute_data_type: Any = None,
        name: str | None = None,
        *,
        weight: Any = None,
    ) -> Any:
        """DX (N, C, i...): the gradient of the image.

        Its dim has to be set where a stride is not 1, or the filter has groups; else it is
        inferred.

        Args:
            loss: (N, K, o...), the gradient of Y.
            filter: (K, C / groups, k...); ``weight`` is another name of it.

        Raises:
            GraphError: not one of ``filter`` and ``weight`` is given, or loss is not.
        """
        if (filter is None) == (weight is None) or loss is None:
            raise GraphError("conv_dgrad takes loss, and filter= or weight=, which are the same")
        sides = (padding, pre_padding, post_padding)
        how = _attributes("conv_dgrad", sides, stride, dilation, convolution_mode)
        given = {"loss": loss, "filter": weight if filter is None else filter}
        return self._add("conv_dgrad", given, name=name, compute=compute_data_type, **how)

    def conv_wgrad(
        self,
        image: Any,
        loss: Any,
        padding: _Numbers = None,
        stride: _Numbers = None,
        dilation: _Numbers = None,
        pre_padding: _Numbers = None,
        post_padding: _Numbers = None,
        convolution_mode: Any = "CROSS_CORRELATION",
        compute_data_type: Any = None,
        name: str | None = None,
    ) -> Any:
        """DW (K, C / groups, k...): the gradient of the filter.

        Its dim has to be set where a stride is not 1, or the filter has groups; else it is
        inferred.

        Args:
            image: (N, C, i...).
            loss: (N, K, o...), the gradient of Y.
        """
        sides = (padding, pre_padding, post_padding)
        how = _attributes("conv_wgrad", sides, stride, dilation, convolution_mode)
        given = {"image": image, "loss": loss}
        return self._add("conv_wgrad", given, name=name, compute=compute_data_type, **how)


def _attributes(
    op: str, sides: tuple[Any, Any, Any], stride: Any, dilation: Any, mode: Any
) -> dict[str, Any]:
    padding, pre, post = sides
    if padding is not None and (pre is not None or post is not None):
        raise GraphError(
            f"padding = {padding} is given beside pre_padding = {pre} and post_padding = {post}; "
            f"it is for both sides"
        )
    if padding is None:
        before = _numbers(op, "pre_padding", pre, 0)
        behind = _numbers(op, "post_padding", post, 0)
    else:
        before = behind = _numbers(op, "padding", padding, 0)
    return {
        "pre_padding": before,
        "post_padding": behind,
        "stride": _numbers(op, "stride", stride, 1),
        "dilation": _numbers(op, "dilation", dilation, 1),
        "mode": member_of(_Mode, mode).name,
    }


def _numbers(op: str, option: str, given: Any, default: int) -> int | list[int]:
    """A number for all modes, or one for each."""
    if given is None:
        return default
    found = whole_or_wholes(op, option, given)
    return default if found == [] else found


#: Paddings, and steps: a number for all modes, or one for each.
_PADDINGS = either(whole(0), list_of(whole(0)))
_STEPS = either(whole(1), list_of(whole(1)))


class _Geometry:
    """The numbers of a node, one per spatial mode."""

    def __init__(self, node: Node, rank: int) -> None:
        if not 3 <= rank <= 5:
            raise GraphError(
                f"{node} has tensors of {rank} modes; expected (N, C, spatial...) with 1 to 3 "
                f"spatial modes"
            )
        self._node, self.spatial = node, rank - 2
        self.pre, self.post = self._of("pre_padding"), self._of("post_padding")
        self.stride, self.dilation = self._of("stride"), self._of("dilation")

    def _of(self, name: str) -> tuple[int, ...]:
        given = self._node[name]
        found = (given,) * self.spatial if isinstance(given, int) else tuple(given)
        if len(found) != self.spatial or min(found) < (0 if "padding" in name else 1):
            raise GraphError(
                f"{self._node} has {name} = {given}; expected {self.spatial} numbers, one for each "
                f"spatial mode"
            )
        return found

    def output(self, image: tuple[int, ...], filter: tuple[int, ...]) -> tuple[int, ...]:
        """Spatial extents of Y."""
        sizes = zip(image, filter, self.pre, self.post, self.stride, self.dilation, strict=True)
        return tuple(
            1 + (i + pre + post - dilation * (k - 1) - 1) // stride
            for i, k, pre, post, stride, dilation in sizes
        )

    @property
    def is_open(self) -> bool:
        """Whether the extents of Y leave those of the image open."""
        return any(one != 1 for one in self.stride)


def _channels_last(dim: tuple[int, ...]) -> tuple[int, ...]:
    return packed_strides(dim, (0, *range(2, len(dim)), 1))


def _check_groups(node: Node, C: int, per_group: int, K: int) -> None:
    if not C or not per_group or C % per_group or K % (C // per_group):
        raise GraphError(
            f"{node} has images of C = {C} channels and filters ({K}, {per_group}, ...); expected "
            f"(K, C / groups, ...) with C at least 1 and K a multiple of the groups"
        )


def _output_dim(node: Node, image: tuple[int, ...], filter: tuple[int, ...]) -> tuple[int, ...]:
    """The dim of Y; raises GraphError where there is none."""
    geometry = _Geometry(node, len(image))
    _check_groups(node, image[1], filter[1], filter[0])
    spatial = geometry.output(image[2:], filter[2:])
    if min(*image[2:], *filter[2:]) < 1:
        raise GraphError(
            f"{node} has an image {list(image)} and a filter {list(filter)}; expected spatial "
            f"extents of 1 or more"
        )
    if min(spatial) < 1:
        raise GraphError(
            f"{node} has an image {list(image)} that is smaller than its filter {list(filter)}, "
            f"with the paddings and dilations that it has"
        )
    return (image[0], filter[0], *spatial)


class _Convolution(Operation):
    attributes: ClassVar[dict[str, Kind]] = {
        "pre_padding": _PADDINGS,
        "post_padding": _PADDINGS,
        "stride": _STEPS,
        "dilation": _STEPS,
        "mode": one_of(_Mode.__members__),
    }

    def _check(
        self, node: Node, image: tuple[int, ...], filter: tuple[int, ...], loss: tuple[int, ...]
    ) -> None:
        """Raise GraphError unless the three belong together."""
        expected = _output_dim(node, image, filter)
        if loss != expected:
            raise GraphError(
                f"{node} has an image {list(image)} and a filter {list(filter)}, which give "
                f"{list(expected)}, but {list(loss)}"
            )

    @staticmethod
    def _same_rank(node: Node, *names: str) -> _Geometry:
        dims = [node.input(name).dim for name in names]
        if len({len(dim) for dim in dims}) > 1:
            shown = " and ".join(f"{n} {list(dim)}" for n, dim in zip(names, dims, strict=True))
            raise GraphError(f"{node} has {shown}; expected as many modes of each")
        return _Geometry(node, len(dims[0]))


class ConvFprop(_Convolution):
    """Y = image ∗ weight."""

    name = "conv_fprop"
    result = ("Y",)
    inputs = ("image", "weight")

    def infer(self, node: Node) -> None:
        self._same_rank(node, "image", "weight")
        dim = _output_dim(node, node.input("image").dim, node.input("weight").dim)
        settle(node, node.outputs.get("Y"), dim, _channels_last(dim))

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        image, weight = _floating(node, given["image"], given["weight"])
        if _is_empty(image, weight):
            return {"Y": image.new_zeros(node.outputs["Y"].dim)}
        geometry = _Geometry(node, image.dim())
        with exact_convolutions():
            Y = torch.ops.aten.convolution(
                _padded(image, geometry), _turned(node, weight), None, geometry.stride,
                [0] * geometry.spatial, geometry.dilation, False, [0] * geometry.spatial,
                image.shape[1] // weight.shape[1],
            )  # fmt: skip
        return {"Y": Y}


class ConvDgrad(_Convolution):
    """The gradient of the image."""

    name = "conv_dgrad"
    result = ("DX",)
    inputs = ("loss", "filter")

    def infer(self, node: Node) -> None:
        geometry = self._same_rank(node, "loss", "filter")
        loss, weight, DX = node.input("loss").dim, node.input("filter").dim, node.outputs["DX"]
        if not DX.dim:
            if geometry.is_open:
                raise GraphError(
                    f"{DX}, which {node} writes, has no dim, and a stride of {geometry.stride} "
                    f"leaves it open; call set_dim"
                )
            sizes = zip(
                loss[2:], weight[2:], geometry.pre, geometry.post, geometry.dilation, strict=True
            )
            spatial = [o + dilation * (k - 1) - pre - post for o, k, pre, post, dilation in sizes]
            dim = (loss[0], weight[1], *spatial)
        else:
            dim = DX.dim
        self._check(node, dim, weight, loss)
        settle(node, DX, dim, _channels_last(dim))

    def free_dims(self, node: Node) -> bool:
        loss, weight, DX = node.input("loss"), node.input("filter"), node.outputs["DX"]
        return not _Geometry(node, loss.rank).is_open and DX.dim[1] == weight.dim[1]

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        loss, weight = _floating(node, given["loss"], given["filter"])
        image = loss.new_zeros(node.outputs["DX"].dim)
        if _is_empty(loss, weight):
            return {"DX": image}
        geometry = _Geometry(node, image.dim())
        gradient = _gradients(geometry, image, _turned(node, weight), loss, (True, False))[0]
        for mode, pre in enumerate(geometry.pre):
            gradient = gradient.narrow(mode + 2, pre, image.shape[mode + 2])
        return {"DX": gradient}


class ConvWgrad(_Convolution):
    """The gradient of the filter."""

    name = "conv_wgrad"
    result = ("DW",)
    inputs = ("image", "loss")

    def infer(self, node: Node) -> None:
        geometry = self._same_rank(node, "image", "loss")
        image, loss, DW = node.input("image").dim, node.input("loss").dim, node.outputs["DW"]
        if not DW.dim:
            if geometry.is_open:
                raise GraphError(
                    f"{DW}, which {node} writes, has no dim, and a stride of {geometry.stride} "
                    f"leaves it open; call set_dim"
                )
            sizes = zip(
                image[2:], loss[2:], geometry.pre, geometry.post, geometry.dilation, strict=True
            )
            spatial = [(i + pre + post - o) // dilation + 1 for i, o, pre, post, dilation in sizes]
            dim = (loss[1], image[1], *spatial)
        else:
            dim = DW.dim
        self._check(node, image, dim, loss)
        settle(node, DW, dim, _channels_last(dim))

    def free_dims(self, node: Node) -> bool:
        image, DW = node.input("image"), node.outputs["DW"]
        return not _Geometry(node, image.rank).is_open and DW.dim[1] == image.dim[1]

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        image, loss = _floating(node, given["image"], given["loss"])
        weight = image.new_zeros(node.outputs["DW"].dim)
        if _is_empty(image, loss):
            return {"DW": weight}
        geometry = _Geometry(node, image.dim())
        gradient = _gradients(geometry, image, weight, loss, (False, True))[1]
        return {"DW": _turned(node, gradient)}


def _is_empty(*tensors: Any) -> bool:
    """Whether there is nothing to multiply, of which torch does not know all cases."""
    return not all(one.numel() for one in tensors)


def _gradients(
    geometry: _Geometry, image: Any, weight: Any, loss: Any, wanted: tuple[bool, bool]
) -> Any:
    """Of the padded image, and of the filter."""
    import torch

    with exact_convolutions():
        return torch.ops.aten.convolution_backward(
            loss, _padded(image, geometry), weight, None, geometry.stride,
            [0] * geometry.spatial, geometry.dilation, False, [0] * geometry.spatial,
            image.shape[1] // weight.shape[1], [*wanted, False],
        )  # fmt: skip


def _floating(node: Node, *tensors: Any) -> list[Any]:
    """In the type of the arithmetic; integers in float64, in which their products are exact."""
    import torch

    whole = not any(one.is_floating_point() for one in tensors)
    return [one.to(torch.float64 if whole else node.arithmetic) for one in tensors]


def _padded(image: Any, geometry: _Geometry) -> Any:
    import torch

    pairs = zip(reversed(geometry.pre), reversed(geometry.post), strict=True)
    sides = [side for pair in pairs for side in pair]
    return torch.nn.functional.pad(image, sides) if any(sides) else image


def _turned(node: Node, weight: Any) -> Any:
    """The filter as a cross-correlation reads it."""
    if node["mode"] != "CONVOLUTION":
        return weight
    return weight.flip(tuple(range(2, weight.dim())))

"""Methods of a graph for norms."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

from kernel_api.errors import GraphError
from kernel_api.graph._builder import Builder
from kernel_api.graph._enums import member_of, norm_forward_phase
from kernel_api.graph._operations.norm import check_deviation
from kernel_api.graph._options import number, refused

_Phase = norm_forward_phase


class NormMethods(Builder):
    """Norms; :mod:`kernel_api.graph._operations.norm` has the formulas and the dims.

    ``epsilon`` is a number, or a tensor that is passed by value. With ``zero_centered_gamma`` the
    gain is 1 + scale. ``norm_forward_phase`` INFERENCE gives None in place of statistics; without
    it, as in TRAINING, they are there. They have the dims of the input, with 1 in place of the
    normalised modes, and are FLOAT.
    """

    def layernorm(
        self,
        input: Any,
        scale: Any,
        bias: Any = None,
        epsilon: Any = 1e-5,
        zero_centered_gamma: bool = False,
        name: str | None = None,
        *,
        norm_forward_phase: Any = None,
        compute_data_type: Any = None,
    ) -> Any:
        """Y = (x − mean) / √(variance + ε) · scale + bias (Ba, Kiros and Hinton, 2016).

        Args:
            input: Of any dim.
            scale, bias: (1, C, H, W): the modes that are not 1 are normalised; or (D,).

        Returns:
            (Y, mean, inv_var).
        """
        return self._norm(
            "layernorm", input, scale, bias, epsilon, norm_forward_phase, compute_data_type, name,
            zero_centered_gamma=bool(zero_centered_gamma),
        )  # fmt: skip

    def rmsnorm(
        self,
        input: Any,
        scale: Any,
        epsilon: Any = 1e-5,
        name: str | None = None,
        *,
        bias: Any = None,
        zero_centered_gamma: bool = False,
        norm_forward_phase: Any = None,
        compute_data_type: Any = None,
    ) -> Any:
        """Y = x / √(mean(x²) + ε) · scale + bias (Zhang and Sennrich, 2019).

        Args:
            input: Of any dim.
            scale, bias: As of ``layernorm``.

        Returns:
            (Y, inv_var).
        """
        return self._norm(
            "rmsnorm", input, scale, bias, epsilon, norm_forward_phase, compute_data_type, name,
            zero_centered_gamma=bool(zero_centered_gamma),
        )  # fmt: skip

    def adalayernorm(
        self,
        input: Any,
        scale: Any,
        bias: Any = None,
        epsilon: Any = 1e-5,
        name: str | None = None,
        *,
        norm_forward_phase: Any = None,
        compute_data_type: Any = None,
    ) -> Any:
        """``layernorm`` whose scale and bias are each batch's own.

        Args:
            input: (N, ..., D).
            scale, bias: (N, 1, ..., D): the modes behind the first that are not 1 are normalised.

        Returns:
            (Y, mean, inv_var).
        """
        return self._norm(
            "adalayernorm", input, scale, bias, epsilon, norm_forward_phase, compute_data_type,
            name,
        )  # fmt: skip

    def instancenorm(
        self,
        input: Any,
        scale: Any,
        bias: Any = None,
        epsilon: Any = 1e-5,
        name: str | None = None,
        *,
        norm_forward_phase: Any = None,
        compute_data_type: Any = None,
    ) -> Any:
        """Each channel of each image is normalised.

        Args:
            input: (N, C, spatial...).
            scale, bias: (1, C, 1, ...), or (C,).

        Returns:
            (Y, mean, inv_var), statistics (N, C, 1, ...).
        """
        return self._norm(
            "instancenorm", input, scale, bias, epsilon, norm_forward_phase, compute_data_type,
            name,
        )  # fmt: skip

    def batchnorm(
        self,
        input: Any,
        scale: Any,
        bias: Any,
        in_running_mean: Any = None,
        in_running_var: Any = None,
        epsilon: Any = 1e-5,
        momentum: Any = 0.1,
        peer_stats: Iterable[Any] | None = None,
        compute_data_type: Any = None,
        name: str | None = None,
    ) -> Any:
        """Each channel of a batch is normalised (Ioffe and Szegedy, 2015).

        Args:
            input: (N, C, spatial...).
            scale, bias: (1, C, 1, ...), or (C,).
            in_running_mean, in_running_var: The same; the next ones are (1 − momentum) · this +
                momentum · the batch's, whose variance is that of a sample, n / (n − 1) times the
                biased one.
            momentum: A number, or a tensor that is passed by value.

        Returns:
            (Y, mean, inv_var, next_running_mean, next_running_var), statistics (1, C, 1, ...); None
            in place of running ones that are not given.

        Raises:
            GraphError: ``peer_stats`` are given; statistics of other GPUs are not supported.
        """
        _check_peers("batchnorm", peer_stats)
        _check_epsilon("batchnorm", epsilon)
        if isinstance(momentum, numbers.Real):
            number("batchnorm", "momentum", momentum)
        given = {
            "input": input, "scale": scale, "bias": bias, "in_running_mean": in_running_mean,
            "in_running_var": in_running_var, "epsilon": epsilon, "momentum": momentum,
        }  # fmt: skip
        results = ["Y", "mean", "inv_var"]
        results += ["next_running_mean"] * (in_running_mean is not None)
        results += ["next_running_var"] * (in_running_var is not None)
        return self._add("batchnorm", given, name=name, compute=compute_data_type, results=results)

    def batchnorm_inference(
        self,
        input: Any,
        mean: Any,
        inv_variance: Any,
        scale: Any,
        bias: Any,
        compute_data_type: Any = None,
        name: str | None = None,
    ) -> Any:
        """Y = (x − mean) · inv_variance · scale + bias, all of which are (1, C, 1, ...) or (C,)."""
        given = {
            "input": input, "mean": mean, "inv_variance": inv_variance, "scale": scale,
            "bias": bias,
        }  # fmt: skip
        return self._add("batchnorm_inference", given, name=name, compute=compute_data_type)

    # Gradients ---------------------------------------------------------------------------

    def layernorm_backward(
        self,
        grad: Any,
        input: Any,
        scale: Any,
        mean: Any = None,
        inv_variance: Any = None,
        epsilon: Any = None,
        compute_data_type: Any = None,
        name: str | None = None,
        *,
        zero_centered_gamma: bool = False,
    ) -> Any:
        """Gradients of ``layernorm``.

        Args:
            grad: Of Y, in the dims of the input.
            mean, inv_variance: What the forward pass gave; without them they are computed of the
                input and ``epsilon``, as in all of these.

        Returns:
            (dx, dscale, dbias), the latter two in the dims of scale.

        Raises:
            GraphError: neither ``inv_variance`` nor ``epsilon`` is given.
        """
        return self._norm_backward(
            "layernorm", grad, input, scale, mean, inv_variance, epsilon, compute_data_type, name,
            zero_centered_gamma=bool(zero_centered_gamma),
        )  # fmt: skip

    def rmsnorm_backward(
        self,
        grad: Any,
        input: Any,
        scale: Any,
        inv_variance: Any = None,
        has_dbias: bool = False,
        epsilon: Any = None,
        compute_data_type: Any = None,
        name: str | None = None,
        *,
        zero_centered_gamma: bool = False,
    ) -> Any:
        """Gradients of ``rmsnorm``: (dx, dscale, dbias), None for dbias unless ``has_dbias``."""
        return self._norm_backward(
            "rmsnorm", grad, input, scale, None, inv_variance, epsilon, compute_data_type, name,
            results=("dx", "dscale", "dbias") if has_dbias else ("dx", "dscale"),
            zero_centered_gamma=bool(zero_centered_gamma),
        )  # fmt: skip

    def adalayernorm_backward(
        self,
        grad: Any,
        input: Any,
        scale: Any,
        mean: Any = None,
        inv_variance: Any = None,
        epsilon: Any = None,
        compute_data_type: Any = None,
        name: str | None = None,
    ) -> Any:
        """Gradients of ``adalayernorm``: (dx, dscale, dbias)."""
        return self._norm_backward(
            "adalayernorm", grad, input, scale, mean, inv_variance, epsilon, compute_data_type,
            name,
        )  # fmt: skip

    def instancenorm_backward(
        self,
        grad: Any,
        input: Any,
        scale: Any,
        mean: Any = None,
        inv_variance: Any = None,
        epsilon: Any = None,
        compute_data_type: Any = None,
        name: str | None = None,
    ) -> Any:
        """Gradients of ``instancenorm``: (dx, dscale, dbias)."""
        return self._norm_backward(
            "instancenorm", grad, input, scale, mean, inv_variance, epsilon, compute_data_type,
            name,
        )  # fmt: skip

    def batchnorm_backward(
        self,
        grad: Any,
        input: Any,
        scale: Any,
        mean: Any = None,
        inv_variance: Any = None,
        epsilon: Any = None,
        peer_stats: Iterable[Any] | None = None,
        compute_data_type: Any = None,
        name: str | None = None,
    ) -> Any:
        """Gradients of ``batchnorm``: (dx, dscale, dbias)."""
        _check_peers("batchnorm_backward", peer_stats)
        return self._norm_backward(
            "batchnorm", grad, input, scale, mean, inv_variance, epsilon, compute_data_type, name
        )

    def _norm(
        self,
        op: str,
        input: Any,
        scale: Any,
        bias: Any,
        epsilon: Any,
        phase: Any,
        compute: Any,
        name: str | None,
        **attributes: Any,
    ) -> Any:
        if isinstance(input, _Phase):
            raise GraphError(
                f"{op} has {input} as its input; pass it by name, norm_forward_phase={input}"
            )
        _check_epsilon(op, epsilon)
        statistics = phase is None or member_of(_Phase, phase) is _Phase.TRAINING
        given = {"input": input, "scale": scale, "bias": bias, "epsilon": epsilon}
        return self._add(
            op, given, name=name, compute=compute, results=None if statistics else ("Y",),
            **attributes,
        )  # fmt: skip

    def _norm_backward(
        self,
        op: str,
        grad: Any,
        input: Any,
        scale: Any,
        mean: Any,
        inv_variance: Any,
        epsilon: Any,
        compute: Any,
        name: str | None,
        results: tuple[str, ...] | None = None,
        **attributes: Any,
    ) -> Any:
        check_deviation(f"{op}_backward", inv_variance, epsilon)
        _check_epsilon(f"{op}_backward", epsilon)
        given = {
            "grad": grad, "input": input, "scale": scale, "mean": mean,
            "inv_variance": inv_variance, "epsilon": epsilon,
        }  # fmt: skip
        return self._add(
            f"{op}_backward", given, name=name, compute=compute, results=results, **attributes
        )


def _check_epsilon(op: str, epsilon: Any) -> None:
    """Raise GraphError for a number that is no epsilon; those of tensors come at execution."""
    if isinstance(epsilon, numbers.Real) and number(op, "epsilon", epsilon) < 0:
        raise refused(op, "epsilon", epsilon, "a number that is not negative")


def _check_peers(op: str, peers: Iterable[Any] | None) -> None:
    if peers is not None and list(peers):
        raise GraphError(f"{op} has peer_stats; statistics of other GPUs are not supported")

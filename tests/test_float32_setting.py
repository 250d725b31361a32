"""How torch is set to multiply float32: read through whichever of its interfaces it was set, and as
before after every call."""

import contextlib
import sys
import threading
import time

import pytest
import torch

import kernel_api as ka
import kernel_api.graph as cudnn
from kernel_api import _float32, _launches
from kernel_api.verification import judge

MATMULS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
CONVOLUTIONS = (torch.backends.cudnn.conv, torch.backends.mkldnn.conv)
X, W = torch.randn(4, 64), torch.randn(64, 64)


@pytest.fixture(autouse=True)
def unset():
    """Every setting is as in a new process, before and after."""

    def clear():
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = True
        for one in (*MATMULS, CONVOLUTIONS[1], torch.backends):
            one.fp32_precision = "none"

    clear()
    yield
    clear()


def settings():
    """All that can be read, where reading it is no error."""
    recurrent = torch.backends.cudnn.rnn
    found = [one.fp32_precision for one in (*MATMULS, *CONVOLUTIONS, recurrent, torch.backends)]
    with contextlib.suppress(RuntimeError):
        found.append(torch.get_float32_matmul_precision())
    with contextlib.suppress(RuntimeError):
        found.append(torch.backends.cudnn.allow_tf32)
    return found


def of_all(precision):
    torch.backends.fp32_precision = precision


def of_products(precision):
    torch.backends.cuda.matmul.fp32_precision = precision


def of_the_cpu(precision):
    torch.backends.mkldnn.matmul.fp32_precision = precision


def given_up(precision):
    """Set, and then left to what is set for all."""
    torch.set_float32_matmul_precision(precision)
    torch.backends.cuda.matmul.fp32_precision = "none"


#: A way to set torch, to what, and whether CUDA multiplies as tf32 then.
WAYS = [
    (torch.set_float32_matmul_precision, "highest", False),
    (torch.set_float32_matmul_precision, "high", True),
    (torch.set_float32_matmul_precision, "medium", True),
    (of_products, "tf32", True),
    (of_products, "ieee", False),
    (of_all, "tf32", True),
    (of_all, "ieee", False),
    (of_all, "bf16", False),
    (of_the_cpu, "bf16", False),
    (given_up, "high", False),
]


@pytest.mark.parametrize(("way", "precision", "allowed"), WAYS)
def test_what_is_set_decides_however_it_is_set(way, precision, allowed):
    way(precision)
    out = torch.empty(4, 64)
    assert ka.GemmArguments(X, W, out).fp32_precision == ("tf32" if allowed else "ieee")
    for asked in ("ieee", "tf32", "tf32x3"):
        args = ka.GemmArguments(X, W, out, fp32_precision=asked)
        assert args.fp32_precision == asked and ka.get_kernels(args)
    # The second call looks like the first.
    for found in (ka.ops.gemm(X, W), ka.ops.gemm(X, W), ka.ops.gemm(X, W, out=out)):
        assert judge(ka.GemmArguments(X, W, found))
    activated = ka.nn.linear_activation(X, W.t(), activation="relu")
    torch.testing.assert_close(activated, out.relu())


@pytest.mark.parametrize("asked", ["ieee", "tf32", "tf32x3", None])
@pytest.mark.parametrize(("way", "precision", "allowed"), WAYS)
def test_every_setting_is_as_before_afterwards(way, precision, allowed, asked):
    way(precision)
    before = settings()
    with _float32.products(asked):
        cuda, cpu = (one.fp32_precision for one in MATMULS)
        if asked == "tf32":
            assert cuda == "tf32" and cpu != "bf16"
        elif asked is not None:
            assert {cuda, cpu} <= {"ieee", "none"}
        assert (_float32.setting() == "tf32") is allowed
    assert settings() == before
    if before[0] == "none":  # what follows the setting for all still does
        of_all("tf32")
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"


def test_a_setting_for_all_is_followed_after_calls_too():
    of_all("tf32")
    with _float32.products("ieee"):
        pass
    of_all("ieee")
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"


@pytest.mark.parametrize("way", [of_all, of_products])
def test_calls_that_look_the_same_are_told_apart_by_the_setting(way, monkeypatch):
    monkeypatch.setattr(_launches, "_launches", {})
    asked = []
    of_float32 = ka.arguments.gemm.precision_of
    monkeypatch.setattr(
        ka.arguments.gemm,
        "precision_of",
        lambda *given: asked.append(of_float32(*given)) or asked[-1],
    )
    for precision in ("ieee", "tf32", "ieee"):
        way(precision)
        ka.ops.gemm(X, W[:, :48])
    assert asked == ["ieee", "tf32"]


def of_convolutions(precision):
    torch.backends.cudnn.conv.fp32_precision = precision


def of_cudnn(precision):
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


@pytest.mark.parametrize("precision", ["tf32", "ieee", "none"])
@pytest.mark.parametrize("way", [of_all, of_convolutions, of_cudnn])
def test_convolutions_are_exact_whatever_is_set(way, precision, monkeypatch):
    seen = []
    convolution = torch.ops.aten.convolution

    def watched(*given):
        seen.append([one.fp32_precision for one in CONVOLUTIONS])
        if way is of_cudnn:  # who uses that interface can still read it
            assert torch.backends.cudnn.allow_tf32 is False
        return convolution(*given)

    monkeypatch.setattr(torch.ops.aten, "convolution", watched)
    way(precision)
    before = settings()
    image, weight = torch.randn(1, 2, 4, 4), torch.randn(3, 2, 3, 3)
    with cudnn.Graph() as graph:
        graph.conv_fprop(image, weight, padding=[0, 0]).set_output(True)
    graph(image, weight)
    assert seen and all({*each} <= {"ieee", "none"} for each in seen)
    assert settings() == before


# Threads -----------------------------------------------------------------------------------


@pytest.fixture
def restless():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(*functions):
    failures = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(one,), daemon=True) for one in functions]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert not any(one.is_alive() for one in threads)
    assert not failures, failures


@pytest.mark.parametrize("way", [torch.set_float32_matmul_precision, of_products])
def test_threads_that_ask_for_different_precisions_leave_the_setting_as_it_was(way, restless):
    way("highest" if way is not of_products else "ieee")
    before, wrong = settings(), []

    def asking(precision):
        def often():
            for _ in range(50):
                with _float32.products(precision):
                    time.sleep(1e-5)  # others have their turn
                    if (MATMULS[0].fp32_precision == "tf32") != (precision == "tf32"):
                        wrong.append(precision)

        return often

    def reading():
        for _ in range(3000):
            if _float32.setting() == "tf32":
                wrong.append("read")

    at_once(asking("tf32"), asking("ieee"), asking("tf32"), asking("ieee"), reading)
    assert not wrong
    assert settings() == before


def test_threads_run_kernels_of_different_precisions(restless):
    def running(precision):
        args = ka.GemmArguments(X, W, torch.empty(4, 64), fp32_precision=precision)
        kernel = ka.get_kernels(args, providers=["torch"])[0]
        return lambda: [kernel.run(args) for _ in range(100)]

    before = settings()
    at_once(*map(running, ("tf32", "ieee", "tf32")))
    assert settings() == before


def test_calls_for_the_same_precision_run_at_the_same_time():
    both = threading.Barrier(2, timeout=20)

    def meeting():
        with _float32.products("tf32"):
            both.wait()

    at_once(meeting, meeting)


def test_a_thread_may_ask_within_what_it_asked_for_while_another_waits():
    inside = threading.Event()

    def outer():
        with _float32.products("ieee"):
            inside.set()
            waiting.wait(0.2)
            with _float32.products("ieee"), _float32.products("tf32"):
                assert MATMULS[0].fp32_precision != "tf32"  # what was asked for first is as precise

    def other():
        inside.wait()
        waiting.set()
        with _float32.products("tf32"):
            assert MATMULS[0].fp32_precision == "tf32"

    waiting = threading.Event()
    at_once(outer, other)


def test_an_error_gives_the_setting_back():
    before = settings()
    with pytest.raises(KeyError), _float32.products("tf32"):
        raise KeyError
    assert settings() == before

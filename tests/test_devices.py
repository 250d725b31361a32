"""What driver is here: kernel_api.devices."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import kernel_api as ka
from kernel_api import devices
from kernel_api.errors import ArgumentError
from kernel_api.providers.cutedsl import compiler
from kernel_api.providers.cutedsl.gemm import machine, model

KERNEL_SAYS = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""


@pytest.fixture
def here(monkeypatch, tmp_path):
    """Says what each way to the driver's version answers."""
    module = tmp_path / "version"
    asked = []

    def answers(kernel="", nvml="", nvidia_smi=""):
        module.write_text(kernel) if kernel else module.unlink(missing_ok=True)
        monkeypatch.setattr(devices, "_KERNEL_MODULE", module)
        monkeypatch.setattr(devices, "_said_by_nvml", lambda: nvml)

        def run(command, **options):
            asked.append(command[0])
            return subprocess.CompletedProcess(command, 0, nvidia_smi)

        monkeypatch.setattr(shutil, "which", lambda name: name if nvidia_smi else None)
        monkeypatch.setattr(subprocess, "run", run)
        devices.driver_version.cache_clear()
        return asked

    yield answers
    devices.driver_version.cache_clear()


def test_the_kernel_module_says_the_driver_s_version(here):
    asked = here(kernel=KERNEL_SAYS, nvml="1000.0", nvidia_smi="1000.0")
    assert devices.driver_version() == "580.65.06"
    assert devices.driver_major() == 580
    assert asked == []


def test_nvml_says_it_where_the_kernel_module_does_not(here):
    asked = here(nvml="575.57.08", nvidia_smi="1000.0")
    assert devices.driver_version() == "575.57.08"
    assert asked == []


def test_nvidia_smi_is_asked_last(here):
    asked = here(kernel="no version", nvidia_smi="570.86.15\n570.86.15\n")
    assert devices.driver_version() == "570.86.15"
    assert asked == ["nvidia-smi"]


def test_without_a_driver_there_is_no_version(here):
    here(nvidia_smi="NVIDIA-SMI has failed")
    assert devices.driver_version() is None
    assert devices.driver_major() is None


def test_asking_a_driver_that_is_not_there_raises_nothing():
    devices.driver_version.cache_clear()
    assert devices.driver_version() is None or devices.driver_major() > 100


@pytest.fixture
def limit(monkeypatch):
    """Sets how many multiprocessors kernels take."""

    def forget():
        devices.most_multiprocessors.cache_clear()
        devices.sm_count.cache_clear()

    def to(text):
        monkeypatch.setenv("KERNEL_API_MULTIPROCESSORS", text)
        forget()

    yield to
    forget()


@pytest.mark.parametrize(("text", "taken"), [("112", 112), ("", 132), ("1", 1), ("500", 132)])
def test_kernels_take_as_many_multiprocessors_as_they_are_given(monkeypatch, limit, text, taken):
    one = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: one)
    limit(text)
    assert devices.sm_count(0) == taken
    assert devices.multiprocessors_of(torch.device("meta")) == taken


@pytest.mark.parametrize("text", ["0", "-4", "all", "1.5", "²"])
def test_no_other_number_of_multiprocessors_is_taken(limit, text):
    limit(text)
    with pytest.raises(ArgumentError, match=r"KERNEL_API_MULTIPROCESSORS is .*; expected how many"):
        devices.multiprocessors_of(torch.device("meta"))


def test_a_query_says_that_no_such_number_is_taken(limit):
    """Rules that ask for it would be taken to be broken, and their kernels left out."""
    limit("112.0")
    empty = torch.empty((64, 64), dtype=torch.bfloat16, device="meta")
    for cc in (None, "sm_90a"):
        with pytest.raises(ArgumentError, match=r"KERNEL_API_MULTIPROCESSORS is '112\.0'"):
            ka.get_kernels(ka.GemmArguments(empty, empty, empty), cc=cc)


def test_a_launch_is_for_as_many_as_kernels_take(monkeypatch, limit):
    launched = []
    one = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: one)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        compiler, "raw_function", lambda made: lambda *given: launched.append(given)
    )
    empty = torch.empty((4096, 4096), dtype=torch.bfloat16, device="meta")
    args, artifact = ka.GemmArguments(empty, empty, empty), types.SimpleNamespace(compiled_obj=None)
    kernels = ka.get_kernels(args, cc="sm_90a", providers=["cutedsl"])
    kernel = next(k for k in kernels if k.metadata.design.cluster_size == 2 and not k.takes_more)
    for text, clusters in (("", 66), ("40", 20)):
        limit(text)
        kernel._launcher(args, artifact)(*args.tensors)
        kernel._bare_launcher(args, artifact)(args.tensors, ())
        assert [given[-1] for given in launched] == [clusters] * 2
        launched.clear()


def test_the_model_is_of_what_kernels_take(limit):
    def empty(*shape):
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def seconds():
        args = ka.GemmArguments(empty(8192, 4096), empty(4096, 8192), empty(8192, 8192))
        return min(
            kernel.predict(args) for kernel in ka.get_kernels(args, cc=90, providers=["cutedsl"])
        )

    of_all = seconds()
    limit("66")
    constants = machine.constants_on(torch.device("meta"), "sm90.gemm")
    assert constants.multiprocessors == 66
    shipped = dataclasses.asdict(machine.constants("sm90.gemm"))
    assert shipped == {**dataclasses.asdict(constants), "multiprocessors": 132}
    model._last = (None, None, {})
    assert 1.7 * of_all < seconds() < 2.2 * of_all


def test_a_process_reads_once_how_many_it_takes():
    script = Path(__file__).parent / "support" / "limited.py"
    done = subprocess.run(
        [sys.executable, str(script), "cpu", "reference"],
        env={**os.environ, "KERNEL_API_MULTIPROCESSORS": "7"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["taken"], said["wrong"]) == ([7, 7], {})
    assert len(said["right"]) == 7
    assert all(said["right"])

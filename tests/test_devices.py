"""What driver is here: kernel_api.devices."""

import shutil
import subprocess

import pytest

from kernel_api import devices

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

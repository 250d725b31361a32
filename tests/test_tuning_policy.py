"""How and where something is measured: kernel_api.tuning.Policy, Environment."""

import subprocess
import sys

import pytest
import torch

from kernel_api import devices
from kernel_api.errors import ArgumentError, DeviceError
from kernel_api.targets import Target
from kernel_api.tuning import Environment, Policy

# Policy ----------------------------------------------------------------------------------


def test_a_policy_comes_back_from_its_json_form():
    policy = Policy("eager", "warm", rounds=5, operand_sets=3, seed=7)
    assert Policy.from_dict(policy.to_dict()) == policy
    assert Policy(launches_per_graph=4) != Policy()


def test_equal_policies_have_one_text_and_one_hash():
    assert Policy().to_json() == Policy("graph", "cold", 20).to_json()
    assert Policy().digest == Policy("graph", "cold", 20).digest


def test_the_hash_is_the_same_in_every_process():
    code = "from kernel_api.tuning import Policy; print(Policy().digest)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == Policy().digest


def test_a_gpu_rests_unless_the_environment_says_otherwise_and_a_cpu_never_does(monkeypatch):
    assert Policy.usual("cuda") == Policy() and Policy().rest == 4
    monkeypatch.setenv("KERNEL_API_REST", "0")
    assert Policy.usual("cuda") == Policy(rest=0)
    monkeypatch.setenv("KERNEL_API_REST", "soon")
    assert Policy.usual("cpu") == Policy("eager", "warm", rest=0)
    with pytest.raises(ArgumentError, match="KERNEL_API_REST is 'soon'; expected a whole number"):
        Policy.usual("cuda")


@pytest.mark.parametrize(
    "change",
    [
        {"launches": "eager"},
        {"l2": "warm"},
        {"rounds": 21},
        {"operand_sets": 1},
        {"launches_per_graph": 1},
        {"rest": 0},
        {"seed": 1},
    ],
)
def test_the_hash_changes_with_every_field(change):
    assert Policy(**change).digest != Policy().digest


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"launches": "lazy"}, "launches is 'lazy'; expected 'eager' or 'graph': pass one"),
        ({"launches": ["graph"]}, r"launches is \['graph'\]; expected 'eager' or 'graph'"),
        ({"l2": None}, "l2 is None; expected 'cold' or 'warm'"),
        ({"rounds": 0}, "rounds is 0; expected a whole number of 1 or more"),
        ({"rounds": True}, "rounds is True; expected a whole number"),
        ({"rounds": None}, "rounds is None; expected a whole number"),
        ({"operand_sets": 2.0}, "operand_sets is 2.0; expected .* leave it out"),
        ({"launches_per_graph": 0}, "launches_per_graph is 0; expected .* 1 or more"),
        ({"rest": 0.5}, "rest is 0.5; expected a whole number of 0 or more"),
        ({"seed": -1}, "seed is -1; expected a whole number of 0 or more"),
        (
            {"launches": "eager", "launches_per_graph": 4},
            "launches_per_graph is 4 but launches is 'eager', .* leave it out",
        ),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(wrong, text):
    with pytest.raises(ArgumentError, match=text):
        Policy(**wrong)


def test_what_lacks_a_field_is_no_policy():
    with pytest.raises(ArgumentError, match="there is no seed"):
        Policy.from_dict({n: v for n, v in Policy().to_dict().items() if n != "seed"})


# Environment -----------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """Two GPUs that are not there."""
    monkeypatch.setattr(devices, "cuda_available", lambda: True)
    monkeypatch.setattr(devices, "device_target", lambda index: Target(9, 0))
    monkeypatch.setattr(devices, "sm_count", lambda index: (132, 114)[index])
    monkeypatch.setattr(devices, "gpu_name", ("NVIDIA H200", "NVIDIA H100 PCIe").__getitem__)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices, "driver_version", lambda: "580.65.06")


def test_the_cpu_is_an_environment_without_a_gpu():
    found = Environment.of(torch.device("cpu"), Policy())
    assert found == Environment.of("cpu", Policy())
    assert found.gpu == "cpu"
    assert (found.compute_capability, found.multiprocessors, found.driver) == (None, None, None)


def test_the_versions_of_what_compiles_runs_and_competes_are_in_it():
    packages = Environment.of("cpu", Policy()).packages
    for name in ("kernel-api", "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base",
                 "apache-tvm-ffi", "torch", "code generator"):  # fmt: skip
        assert packages[name]
    assert packages["torch"].split("+")[0] == torch.__version__.split("+")[0]


def test_a_gpu_is_described_by_what_the_device_says(gpu):
    found = Environment.of("cuda:1", Policy())
    assert found.gpu == "NVIDIA H100 PCIe"
    assert found.compute_capability == "9.0"
    assert found.multiprocessors == 114
    assert found.driver == 580
    assert Environment.of(torch.device("cuda"), Policy()).gpu == "NVIDIA H200"


def test_an_environment_comes_back_from_its_json_form(gpu):
    for device in ("cpu", "cuda:0"):
        found = Environment.of(device, Policy(l2="warm"))
        again = Environment.from_dict(found.to_dict())
        assert again == found
        assert hash(again) == hash(found)
        assert again.digest == found.digest


@pytest.mark.parametrize(
    "change",
    [
        {"gpu": "NVIDIA H100"},
        {"compute_capability": "10.0"},
        {"multiprocessors": 114},
        {"driver": 570},
        {"packages": {"torch": "2.9.0"}},
        {"policy": Policy(l2="warm").to_dict()},
    ],
)
def test_the_environments_hash_changes_with_every_field(gpu, change):
    found = Environment.of("cuda", Policy())
    assert Environment.from_dict({**found.to_dict(), **change}).digest != found.digest


@pytest.mark.parametrize(
    "wrong", [{"gpu": 3}, {"driver": "580"}, {"packages": {"torch": 2}}, {"policy": []}]
)
def test_a_field_of_another_type_is_no_environment(wrong):
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        Environment.from_dict({**Environment.of("cpu", Policy()).to_dict(), **wrong})


def test_a_device_that_is_not_there_is_an_error_that_says_so(gpu, monkeypatch):
    with pytest.raises(ArgumentError, match="device is 'meta'; nothing can be measured there"):
        Environment.of("meta", Policy())
    with pytest.raises(DeviceError, match="device is 'cuda:2' but there are 2 GPUs"):
        Environment.of("cuda:2", Policy())
    monkeypatch.setattr(devices, "cuda_available", lambda: False)
    with pytest.raises(DeviceError, match="torch sees no GPU; pass 'cpu'"):
        Environment.of("cuda", Policy())


def test_the_cpu_s_environment_loads_neither_torch_nor_the_dsl():
    code = (
        "import sys\nfrom kernel_api.tuning import Environment, Policy, Store\n"
        "Environment.of('cpu', Policy()).digest\n"
        "print([m for m in ('torch', 'cutlass', 'cuda') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""Forms of kernels that a GPU has launched, compiled for other GPUs."""

import pytest
import torch

from benchmarks.kernel_forms import collected, models, train
from benchmarks.other_gpus import SHARED, compiled

pytest.importorskip("triton")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.fixture(scope="module")
def forms():
    with collected() as found:
        model, batch = models()["llama"]
        train("msamp_o2", model, batch, torch.device("cuda"))
    return found


def test_forms_are_those_of_this_packages_kernels(forms):
    assert len(forms) > 5 and all(form["module"].startswith("nemo_lowprec.") for form in forms)
    assert "/" not in str(forms)  # no path of this machine


@pytest.mark.parametrize("capability", ["9.0", "10.0", "12.0"])
def test_all_compile_and_fit_where_the_package_uses_them(forms, capability):
    for form in forms:
        found = compiled(form, capability)
        assert not found.error and found.shared <= 1024 * SHARED[capability] and not found.by_fp16, (form, found)


def test_on_ada_triton_rounds_twice_for_which_reason_kernels_are_not_used_there(forms):
    assert any(compiled(form, "8.9").by_fp16 for form in forms)

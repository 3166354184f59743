"""The choice between the forms."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from nonlocal_det.layers import FORMS, NonLocalBlock, gaussian, settle_kernels
from nonlocal_det.layers.forms import (
    GaussianCase,
    choose_form,
    evaluate_with,
    fastest_gaussian_form,
    settle,
    settled_form,
)


@pytest.mark.parametrize(
    ("function", "form"),
    [("gaussian", "chunked"), ("dot_product", "rearranged"), ("concatenation", "sorted")],
)
def test_res3_is_not_a_matrix(function, form):
    inputs = [torch.empty(1, 256, n) for n in (16800, 4200, 4200)]
    assert choose_form(function, *inputs) == form


@pytest.mark.parametrize("function", FORMS)
def test_one_region_of_interest_is_a_matrix(function):
    inputs = [torch.empty(1, 256, n) for n in (196, 49, 49)]
    assert choose_form(function, *inputs) == "matrix"


def test_the_budget_counts_the_whole_batch():
    few, many = ([torch.empty(b, 2, n) for n in (196, 49, 49)] for b in (8, 512))
    assert choose_form("gaussian", *few) == "matrix"
    assert choose_form("gaussian", *many) == "chunked"


def test_forced_form_is_taken_by_the_functions_that_have_it():
    inputs = [torch.empty(1, 2, 4) for _ in range(3)]
    with evaluate_with("sorted"):
        assert choose_form("concatenation", *inputs) == "sorted"
        assert choose_form("gaussian", *inputs) == "matrix"
        with evaluate_with(chunk_bytes=1):
            assert choose_form("concatenation", *inputs) == "sorted"
    assert choose_form("concatenation", *inputs) == "matrix"


def test_a_form_is_forced_on_its_own_thread_alone():
    inputs = [torch.empty(1, 2, 4) for _ in range(3)]
    found = []
    with evaluate_with("sorted"):
        thread = threading.Thread(target=lambda: found.append(choose_form("concatenation", *inputs)))
        thread.start()
        thread.join()
    assert found == ["matrix"]


def case(values: int) -> GaussianCase:
    return GaussianCase("cpu", torch.float32, 8, values)


def test_measurement_names_a_form_and_is_made_once():
    calls = []

    def counted(*inputs):
        calls.append(inputs)
        return gaussian(*inputs)

    assert settled_form(case(8)) == "chunked"  # nothing to measure with: the form that fits every case
    first = settled_form(case(8), counted)
    assert first in ("chunked", "fused")
    made = len(calls)
    assert made > 0
    settle([case(8)], counted)
    assert settled_form(case(8), counted) == settled_form(case(8)) == first
    assert len(calls) == made


def test_measurement_falls_back_where_no_fused_kernel_fits():
    assert fastest_gaussian_form(case(4), gaussian) == "chunked"


def test_measurement_does_not_disturb_random_numbers_or_gradients():
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    with torch.no_grad():
        fastest_gaussian_form(GaussianCase("cpu", torch.float32, 4, 4), gaussian)
    assert torch.equal(torch.randn(3), expected)


def test_nothing_is_measured_for_a_cpu():
    settle_kernels(torch.nn.Sequential(NonLocalBlock(6), NonLocalBlock(4, pairwise="concatenation")))


# Each process would choose another form. In a forward pass nothing is measured and nobody is waited for.
SEVERAL = """
import sys
import torch
from nonlocal_det.layers import forms, gaussian

rank = int(sys.argv[2])
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
forms.fastest_gaussian_form = lambda case, _: f"rank {rank}, {case.values} values"
case, other, never = (forms.GaussianCase("cpu", torch.float32, 8, values) for values in (8, 16, 32))
forms.settle([case, other], gaussian)
print(forms.settled_form(case, gaussian), forms.settled_form(other), sep="; ", end="; ")
if rank == 1:
    print(forms.settled_form(never, gaussian), end="")
torch.distributed.destroy_process_group()
"""


def test_the_first_process_decides_for_all(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SEVERAL, str(tmp_path / "store"), str(rank)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert said == ["rank 0, 8 values; rank 0, 16 values; ", "rank 0, 8 values; rank 0, 16 values; chunked"]


def test_the_layers_need_torch_alone(tmp_path):
    """Without Detectron2 and what else the package needs they are imported, and work, without a word."""
    code = (
        "import sys\n"
        "for name in ('detectron2', 'fvcore', 'cv2', 'PIL', 'matplotlib', 'yaml', 'pycocotools'):\n"
        "    sys.modules[name] = None\n"
        "import torch\n"
        "from nonlocal_det.layers import NonLocalBlock\n"
        "x = torch.ones(1, 4, 3, 3)\n"
        "assert torch.equal(NonLocalBlock(4)(x), x)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

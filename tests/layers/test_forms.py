"""The choice between the forms."""

import pytest
import torch

from nonlocal_det.layers import FORMS
from nonlocal_det.layers.forms import choose_form, evaluate_with, fastest_gaussian_form


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
    assert choose_form("concatenation", *inputs) == "matrix"


def test_measurement_names_a_form_and_is_made_once():
    fastest_gaussian_form.cache_clear()
    device = torch.device("cpu")
    first = fastest_gaussian_form(device, torch.float32, 8, 8)
    assert first in ("chunked", "fused")
    assert fastest_gaussian_form(device, torch.float32, 8, 8) == first
    assert fastest_gaussian_form.cache_info().misses == 1


def test_measurement_falls_back_where_no_fused_kernel_fits():
    assert fastest_gaussian_form(torch.device("cpu"), torch.float32, 8, 4) == "chunked"


def test_measurement_does_not_disturb_random_numbers_or_gradients():
    fastest_gaussian_form.cache_clear()
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    with torch.no_grad():
        fastest_gaussian_form(torch.device("cpu"), torch.float32, 4, 4)
    assert torch.equal(torch.randn(3), expected)

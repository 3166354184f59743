from __future__ import annotations

import math

import numpy as np
import pytest

from nonlocal_det.media.canvas import (
    SUBPIXELS,
    Layer,
    chance,
    ellipse_points,
    make_rng,
    randint,
    rotate,
    smooth_noise,
    textured_background,
)

RED, BLUE = (200, 0, 0), (0, 0, 200)


def test_rotation_is_the_nearest_integer_and_no_case_is_close_to_a_tie():
    # A sine that differs in its last bit on another platform must not change the table.
    for degrees in range(-360, 720, 7):
        angle = math.radians(degrees)
        x, y = rotate((16384, 0), degrees)
        assert abs(x - 16384 * math.cos(angle)) <= 0.5
        assert abs(y - 16384 * math.sin(angle)) <= 0.5
    distances = [abs(16384 * math.sin(math.radians(d)) % 1 - 0.5) for d in range(360)]
    assert min(distances) > 1e-6


def test_rotation_is_clockwise_on_the_screen():
    assert rotate((100, 0), 90) == (0, 100)


def test_ellipse_has_the_radii_it_was_given():
    points = np.array(ellipse_points((1000, 2000), (300, 500)))
    assert points.min(axis=0).tolist() == [700, 1500]
    assert points.max(axis=0).tolist() == [1300, 2500]


def test_streams_depend_on_every_part_of_the_key_and_not_on_others():
    first = make_rng(1, 2, 0).integers(0, 1000, 20)
    assert np.array_equal(first, make_rng(1, 2, 0).integers(0, 1000, 20))
    for key in ((1, 2, 1), (1, 3, 0), (2, 2, 0)):
        assert not np.array_equal(first, make_rng(*key).integers(0, 1000, 20))


def test_random_numbers_keep_to_their_ranges():
    rng = make_rng(0)
    assert {randint(rng, 3, 5) for _ in range(200)} == {3, 4, 5}
    assert not any(chance(rng, 0) for _ in range(50))
    assert all(chance(rng, 100) for _ in range(50))


def test_disc_and_capsule_cover_the_area_of_their_formulas():
    radius, length = 20 * SUBPIXELS, 60 * SUBPIXELS
    for end, extra in (
        ((400, 400), 0),
        ((400 + length, 400), 1),
        ((400 + length * 4 // 5, 400 + length * 3 // 5), 1),
    ):
        layer = Layer((0, 0, 200, 200), (200, 200))
        layer.capsule((400, 400), end, radius, RED, 1)
        expected = math.pi * 20**2 + extra * 60 * 40
        assert layer.mask().sum() == pytest.approx(expected, rel=0.05)


def test_the_last_shape_is_on_top():
    layer = Layer((0, 0, 40, 40), (40, 40))
    layer.disc((80, 80), 40, RED, 1)
    layer.disc((100, 80), 20, BLUE, 2)
    assert [layer.part_at(point) for point in ((60, 80), (100, 80), (0, 0), (-5, 900))] == [1, 2, 0, 0]
    assert layer.mask(2).sum() < layer.mask().sum()
    image = np.full((40, 40, 3), 90, np.uint8)
    layer.blend_onto(image)
    assert image[20, 15].tolist() == list(RED)
    assert image[20, 25].tolist() == list(BLUE)
    assert image[0, 0].tolist() == [90, 90, 90]


def test_edges_are_mixed_in_proportion():
    layer = Layer((0, 0, 10, 10), (10, 10))
    # Columns 0 to 17, the last one included, of 4 to a pixel: 4 whole pixels and a half.
    layer.polygon([(0, 0), (17, 0), (17, 39), (0, 39)], (200, 200, 200), 1)
    image = np.zeros((10, 10, 3), np.uint8)
    layer.blend_onto(image)
    assert image[5, :, 0].tolist() == [200, 200, 200, 200, 100, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("box", [(-50, -50, -10, -10), (300, 10, 320, 30), (10, -40, 20, 0)])
def test_a_layer_outside_the_picture_draws_nothing(box):
    layer = Layer(box, (100, 100))
    layer.capsule((0, 0), (400, 400), 50, RED, 1)
    image = np.full((100, 100, 3), 7, np.uint8)
    layer.blend_onto(image)
    assert layer.empty
    assert (image == 7).all()
    assert layer.mask().size == 0


def test_a_layer_that_is_cut_by_the_border_draws_what_is_inside():
    whole, cut = Layer((-30, -30, 60, 60), (50, 50)), Layer((0, 0, 50, 50), (50, 50))
    for layer in (whole, cut):
        layer.disc((10, 10), 100, RED, 1)
    assert np.array_equal(whole.mask(), cut.mask())


def test_noise_is_smooth_and_bounded():
    noise = smooth_noise(make_rng(3), (64, 48), 4, 30)
    assert noise.shape == (48, 64)
    assert np.abs(noise).max() <= 30
    assert np.ptp(noise) > 20
    assert np.abs(np.diff(noise, axis=0)).max() <= 8


def test_backgrounds_have_texture_and_differ():
    backgrounds = [textured_background(make_rng(seed), (64, 48)) for seed in range(6)]
    assert all(b.shape == (48, 64, 3) and b.dtype == np.uint8 and b.std() > 3 for b in backgrounds)
    assert len({b.tobytes() for b in backgrounds}) == 6

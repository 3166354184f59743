"""What becomes of the time axis, against sums over the frames of a clip."""

import pytest
import torch
from torch.nn.functional import conv2d, conv3d

from nonlocal_det.convert.conversion_report import ConversionReport
from nonlocal_det.convert.draft import Draft, Entry, Source
from nonlocal_det.convert.fitting import fit
from nonlocal_det.convert.time_axis import fit_time


@pytest.mark.parametrize("frames", [1, 3, 5])
def test_a_clip_net_is_summed_for_a_picture_net(generator, frames):
    weight = torch.randn(4, 3, frames, 3, 3, generator=generator, dtype=torch.float64)
    fitted, how = fit_time(weight, (4, 3, 3, 3))
    naive = torch.zeros(4, 3, 3, 3, dtype=torch.float64)
    for t in range(frames):
        naive += weight[:, :, t]
    torch.testing.assert_close(fitted, naive)
    assert how == ("time axis of 1 dropped" if frames == 1 else f"summed over its {frames} frames")
    picture = torch.randn(2, 3, 6, 5, generator=generator, dtype=torch.float64)
    still = picture[:, :, None].expand(-1, -1, frames, -1, -1)
    torch.testing.assert_close(conv2d(picture, fitted), conv3d(still, weight)[:, :, 0])


@pytest.mark.parametrize("shape", [(4, 3, 5, 3, 3), (4, 3, 1, 1, 1)])
def test_a_clip_net_is_kept_for_a_clip_net(generator, shape):
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    assert fit_time(weight, shape) == (weight, "")
    other = (*shape[:2], shape[2] + 2, *shape[3:])
    assert fit_time(weight, other)[0].shape == shape  # which is refused where shapes are compared


@pytest.mark.parametrize("frames", [1, 3, 5])
def test_a_picture_net_is_inflated_for_a_clip_net(generator, frames):
    weight = torch.randn(4, 3, 3, 3, generator=generator, dtype=torch.float64)
    fitted, how = fit_time(weight, (4, 3, frames, 3, 3))
    assert fitted.shape == (4, 3, frames, 3, 3)
    for t in range(frames):
        assert torch.equal(fitted[:, :, t], weight / frames)
    assert how == (
        "time axis of 1 added" if frames == 1 else f"repeated over {frames} frames, each 1/{frames}"
    )
    picture = torch.randn(2, 3, 6, 5, generator=generator, dtype=torch.float64)
    still = picture[:, :, None].expand(-1, -1, frames, -1, -1)
    torch.testing.assert_close(conv3d(still, fitted)[:, :, 0], conv2d(picture, weight))


@pytest.mark.parametrize(
    ("theirs", "ours"), [((4,), (4,)), ((), ()), ((4, 3), (4, 3, 1, 1)), ((4, 3, 3, 3),) * 2]
)
def test_other_tensors_are_left_alone(theirs, ours):
    tensor = torch.ones(theirs)
    assert fit_time(tensor, ours) == (tensor, "")


@pytest.mark.parametrize("theirs", [2, 3])
@pytest.mark.parametrize("ours", [2, 3])
def test_a_model_decides_by_its_shapes(generator, theirs, ours):
    """A net of one conv, for pictures and for clips, by names and report."""
    kernel = (3, 3, 3)
    conv = {2: torch.nn.Conv2d, 3: torch.nn.Conv3d}[ours](3, 4, kernel[:ours])
    model = torch.nn.ModuleDict({"stem": torch.nn.ModuleDict({"conv1": conv})})
    weight = torch.randn(4, 3, *kernel[:theirs], generator=generator, dtype=torch.float64)
    bias = torch.randn(4, generator=generator, dtype=torch.float64)
    entries = {"stem.conv1.weight": Entry(weight, "w", "half"), "stem.conv1.bias": Entry(bias, "b")}
    draft = Draft(Source("torchvision"), entries=entries)
    report = ConversionReport("in.pth", "a test")
    fitted = fit(draft, model, report, None)
    assert list(fitted) == ["stem.conv1.weight", "stem.conv1.bias"]
    expected, how = fit_time(weight, conv.weight.shape)
    assert torch.equal(fitted["stem.conv1.weight"], expected)
    assert torch.equal(fitted["stem.conv1.bias"], bias)
    assert [move.how for move in report.moves] == [f"{how}, half" if how else "half", ""]
    assert any("1 convs over time were summed" in note for note in report.notes) == (theirs > ours)

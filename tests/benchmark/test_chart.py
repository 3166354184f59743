import pytest
from PIL import Image

pytest.importorskip("detectron2")

from nonlocal_det.benchmark.block import BlockCost, block_cases
from nonlocal_det.benchmark.chart import draw_chart
from nonlocal_det.benchmark.detector import DetectorCost
from nonlocal_det.benchmark.ratio import StepCost, ratio_of
from nonlocal_det.modeling.flops import Flops

BLOCKS = [
    BlockCost(0.1, 0.2, ratio_of([0.1], [0.2]), 100, None if case.pairwise == "gaussian" else 400, case)
    for case in block_cases(800, 1344)
]
STEP = StepCost(1.05, 1.0, ratio_of([1.04] * 10, [1.0] * 10), 110, 100)
DETECTOR = DetectorCost(Flops({"all": 104}, set()), Flops({"all": 100}, set()), 105, 100, STEP, STEP, 100)


@pytest.mark.parametrize(
    ("blocks", "detector", "panels"), [(BLOCKS, DETECTOR, 3), (BLOCKS, None, 2), ([], DETECTOR, 1)]
)
def test_chart_is_small(blocks, detector, panels, tmp_path):
    path = tmp_path / "chart.png"
    draw_chart(path, blocks, detector, "a CPU")
    assert path.stat().st_size < 300_000
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.width == int(110 * (1 + 4 * panels))
        assert len(image.convert("RGB").getcolors(1 << 20)) > 10

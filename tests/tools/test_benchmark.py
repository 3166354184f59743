import json

import pytest
import torch

pytest.importorskip("detectron2")

from nonlocal_det.benchmark.block import block_cases, growth_cases
from nonlocal_det.tools.benchmark import main

MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x{}.yaml"


def test_cases_are_the_documented_ones():
    """Maps of a ResNet for 800x1344: res4 has 1/16 of the size and 1024 channels, res3 1/8 and 512."""
    cases = block_cases(800, 1344)
    functions = ["embedded_gaussian", "gaussian", "dot_product", "concatenation"]
    expected = [("1x1024x50x84", "input", f) for f in functions]
    expected += [("1x512x100x168", "input", f) for f in functions]
    expected += [("1x512x100x168", "none", f) for f in functions[:2]]
    for backward in (False, True):
        assert [(c.input, c.pool, c.pairwise) for c in cases if c.backward is backward] == expected


def test_tables_json_and_chart(small_options, tmp_path, capsys, monkeypatch):
    # All cases take too long for a test.
    cases, growth = block_cases(64, 96)[:2], growth_cases(64, 96)[-1:]
    monkeypatch.setattr("nonlocal_det.benchmark.block.block_cases", lambda *size: cases)
    monkeypatch.setattr("nonlocal_det.benchmark.block.growth_cases", lambda *size: growth)
    files = tmp_path / "new" / "figures.json", tmp_path / "new" / "chart.png"
    flags = ["--device", "cpu", "--size", "64x96", "--rounds", "2", "--pairs", "1"]
    outputs = ["--json", str(files[0]), "--chart", str(files[1])]
    assert main([*flags, *outputs, "--opts", *map(str, small_options())]) == 0

    text = capsys.readouterr().out
    assert "| res4 1x1024x4x6 | input  | embedded_gaussian | forward + backward |" in text
    assert "| res3 1x512x8x12 | input  | concatenation |" in text
    assert "multiply-adds, counted for 1,000 proposals and 100 detections" in text
    assert files[1].stat().st_size < 300_000

    content = json.loads(files[0].read_text())
    assert set(content) == {"environment", "blocks", "growth", "detector"}
    assert set(content["environment"]) == {"device", "torch", "threads"}
    assert [(b["pairwise"], b["backward"]) for b in content["blocks"]] == [
        ("embedded_gaussian", False),
        ("embedded_gaussian", True),
    ]
    (growth,) = content["growth"]
    for block in (*content["blocks"], growth):
        assert block["seconds"] > 0
        assert block["time_ratio"]["rounds"] == 2
        assert block["time_ratio"]["quartiles"][0] <= block["time_ratio"]["median"]
        if block["memory_bytes"]:
            assert block["memory_ratio"] == block["memory_bytes"] / block["reference_memory_bytes"]
    result = content["detector"]
    assert result["flops"]["total"] == sum(v for k, v in result["flops"].items() if k != "total")
    assert result["flops_ratio"] == result["flops"]["total"] / result["baseline_flops"]["total"] > 1
    assert result["uncounted"] == []
    assert result["parameters_ratio"] > 1
    assert result["detections"] == 5
    for step in ("training", "inference"):
        assert result[step]["seconds"] > 0
        assert result[step]["time_ratio"]["interval"] is None  # one pair


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "tpu"], "--device tpu: write cpu or cuda"),
        (["--device", "cuda:99"], "--device cuda:99: "),
        (["--size", "800"], "'800' is not HEIGHTxWIDTH in multiples of 32"),
        (["--size", "800x1333"], "multiples of 32"),
        (["--pairs", "0"], "'0' is not a whole number of at least 1"),
        (["--rounds", "x"], "'x' is not a whole number"),
        (["--only", "nothing"], "invalid choice"),
        (["--chart", "chart.jpg"], "write a name ending in .png"),
        (["--json", "."], ". is a folder"),
        (["--config-file", "missing.yaml"], "missing.yaml"),
        (["--config-file", MASK.format("")], "nothing to compare"),
        (["--baseline", "missing.yaml"], "missing.yaml"),
        (["--opts", "MODEL.NONLOCAL.PAIRWISE", "euclid"], "MODEL.NONLOCAL.PAIRWISE"),
        (["--opts", "MODEL.ROI_HEADS.IN_FEATURES", "['p9']"], "MODEL.ROI_HEADS.IN_FEATURES is ['p9']"),
    ],
)
def test_wrong_input(flags, message, capsys):
    assert main(flags) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda_device(capsys):
    assert main(["--device", "cuda"]) == 2
    assert "PyTorch sees no CUDA device here; write --device cpu" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(tmp_path, capsys):
    figures = tmp_path / "figures.json"
    flags = ["--device", "cuda", "--size", "416x672", "--rounds", "3", "--pairs", "3"]
    assert main([*flags, "--json", str(figures)]) == 0
    content = json.loads(figures.read_text())
    assert content["environment"]["device"] == torch.cuda.get_device_name()
    matrix = 4 * (52 * 84) ** 2
    for block in content["blocks"]:
        assert block["memory_bytes"] > 0
        if block["pool"] == "none":
            assert block["reference_memory_bytes"] > matrix
    for step in ("training", "inference"):
        assert content["detector"][step]["memory_bytes"] > 4 * content["detector"]["parameters"]

"""A small detector whose backbone and blocks are compared with the nets that their weights come from."""

from types import SimpleNamespace

import pytest
import torch
from detectron2.modeling import build_model
from small_model import R50_NL, SMALL

from nonlocal_det import get_config
from nonlocal_det.checkpoint.reading import read_checkpoint
from nonlocal_det.convert.conversion import convert_checkpoint


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture
def convert(tmp_path):
    """A function (tensors or file, *opts, **options) -> what conversion made of it.

    The result has the report, the config that was written, the checkpoint's tensors, and functions that make
    the model with them: ``model()``, ``backbone()`` (a ResNet) and ``block(place)``.
    """

    def run(weights, *opts, config=R50_NL, out="out.pth", **options):
        if isinstance(weights, dict):
            torch.save(weights, path := tmp_path / "in.pth")
        else:
            path = weights
        out = tmp_path / out
        report = convert_checkpoint(path, out, config, [*SMALL, *opts], overwrite=True, **options)
        content = read_checkpoint(out)
        tensors = content.get("model", content)
        yaml = out.with_suffix(".yaml")
        cfg = get_config(yaml) if yaml.is_file() else None

        def model():
            made = build_model(cfg)
            missing, unexpected = made.load_state_dict(tensors, strict=False)
            assert not unexpected
            made.missing = missing
            return made.eval()

        def block(place):
            stage, child = place.split(".")
            return getattr(getattr(model().backbone.bottom_up, stage), child)

        return SimpleNamespace(
            report=report,
            cfg=cfg,
            tensors=tensors,
            model=model,
            backbone=lambda: model().backbone.bottom_up,
            block=block,
            path=out,
        )

    return run


@pytest.fixture
def assert_same():
    """Compare an output with the source's to 1e-5 of its size; print the difference (pytest -rP shows it)."""

    def check(ours, theirs):
        size = max(1.0, theirs.abs().max().item())
        difference = (ours - theirs).abs().max().item() / size
        print(f"difference {difference:.1e} at size {size:.1f}")
        assert ours.shape == theirs.shape
        assert theirs.std() > 1e-3  # something is compared
        assert difference < 1e-5

    return check

"""Whole detectors that are run on noise, and the whole matrix of Eq. 1 worked out from what a block gets."""

from __future__ import annotations

import torch
from detectron2.modeling import build_model

from nonlocal_det import get_config

MASK_RCNN = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"
KEYPOINT_RCNN = "COCO-Keypoints/keypoint_rcnn_R_101_FPN_3x_nl_head_backbone.yaml"
FORMS = ("embedded_gaussian", "gaussian", "dot_product", "concatenation")

# A picture of 60 x 100 pixels is resized twofold; padded to 128 x 224 it is a map of 8 x 14 at stride 16.
PICTURE, NETWORK, GRID = (60, 100), (120, 200), (8, 14)


def noise(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (3, *NETWORK), generator=torch.Generator().manual_seed(seed)).float()


def detector(small_options, config: str = MASK_RCNN, **changes):
    """A detector with random weights, whose batch norms know noise: features are then of ordinary size."""
    torch.manual_seed(0)
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    model = build_model(get_config(config, small_options(changes)))
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        model.backbone.train()(model.preprocess_image([{"image": noise()}]).tensor)
    return model.eval()


def run(model, recorder):
    """Run the model on noise; return what every block and every keypoint head got, and its output."""
    inputs, heads, handles = {}, {}, []
    for name, module in model.named_modules():
        if hasattr(module, "attention") and hasattr(module, "w_z"):
            hook = lambda _, args, name=name: inputs.__setitem__(name, args[0].clone())  # noqa: E731
            handles.append(module.register_forward_pre_hook(hook))
        if name.endswith("keypoint_head"):

            def keep(_, args):
                heads["boxes"] = args[1][0].pred_boxes.tensor.clone()
                heads["scores"] = args[1][0].scores.clone()

            handles.append(module.register_forward_pre_hook(keep))
    with torch.no_grad(), recorder:
        output = model([{"image": noise(), "height": PICTURE[0], "width": PICTURE[1]}])[0]["instances"]
    for handle in handles:
        handle.remove()
    return inputs, heads, output


def pooled(x: torch.Tensor) -> torch.Tensor:
    """The greatest of every 2 x 2 cells of x (C, H, W)."""
    c, h, w = x.shape
    return x[:, : h // 2 * 2, : w // 2 * 2].reshape(c, h // 2, 2, w // 2, 2).amax(dim=(2, 4))


def matrix(block, x: torch.Tensor, pairwise: str, pool: str) -> torch.Tensor:
    """f(x_i, x_j) / C(x) for all i and j, x (C, H, W): [H, W, key rows, key columns]."""

    def project(layer, values):
        return torch.einsum("dc,chw->dhw", layer.weight[:, :, 0, 0], values) + layer.bias[:, None, None]

    source = pooled(x) if pool == "input" else x
    if pairwise == "gaussian":
        theta, phi = x, source
    else:
        theta, phi = project(block.theta, x), project(block.phi, source)
    if pool == "embedding":
        phi = pooled(phi)
    if pairwise == "concatenation":
        half = len(theta)
        a = torch.einsum("d,dhw->hw", block.w_f.weight[0, :half], theta)
        b = torch.einsum("d,dhw->hw", block.w_f.weight[0, half:], phi)
        return (a[:, :, None, None] + b).clamp_min(0) / phi[0].numel()
    products = torch.einsum("dhw,dij->hwij", theta, phi)
    if pairwise == "dot_product":
        return products / phi[0].numel()
    products = products / len(theta) ** 0.5
    return products.flatten(2).softmax(dim=2).view_as(products)

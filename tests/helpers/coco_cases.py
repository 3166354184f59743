"""Ground truth and results made at random, with everything that COCO's rules treat specially."""

import numpy as np
import pycocotools.mask as mask_util

HEIGHT, WIDTH = 120, 160


class Maker:
    """Makes one case; see :func:`make_case`."""

    def __init__(self, seed, keypoints):
        self.rng = np.random.default_rng(seed)
        self.keypoints = keypoints

    def box(self):
        rng = self.rng
        low, high = [(3, 32), (32, 96), (96, 115)][rng.integers(3)]
        width, height = rng.uniform(low, high, 2)
        if rng.random() < 0.3:  # exactly on the limits of small, medium and large
            width = height = [32.0, 96.0][rng.integers(2)]
        x, y = rng.uniform(0, WIDTH - width), rng.uniform(0, HEIGHT - height)
        box = [x, y, width, height]
        return [float(round(v)) for v in box] if rng.random() < 0.5 else [float(v) for v in box]

    def polygon(self, box):
        x, y, width, height = box
        if self.rng.random() < 0.5:
            return [[x, y, x + width, y, x + width, y + height, x, y + height]]
        angles = np.linspace(0, 2 * np.pi, 9)[:-1]
        radii = self.rng.uniform(0.6, 1, 8)
        points = [x + width / 2 * (1 + radii * np.cos(angles)), y + height / 2 * (1 + radii * np.sin(angles))]
        return [np.stack(points, axis=1).ravel().tolist()]

    def points(self, box):
        points = np.zeros((self.keypoints, 3))
        points[:, 0] = box[0] + self.rng.uniform(0, box[2], self.keypoints)
        points[:, 1] = box[1] + self.rng.uniform(0, box[3], self.keypoints)
        points[:, 2] = self.rng.integers(0, 3, self.keypoints)
        points[points[:, 2] == 0] = 0
        return points

    def truth(self, number, image_id, category_id):
        rng, box = self.rng, self.box()
        polygon = self.polygon(box)
        annotation = {
            "id": number,
            "image_id": image_id,
            "category_id": category_id,
            "bbox": box,
            "iscrowd": int(rng.random() < 0.15),
            "segmentation": polygon,
            "area": float(mask_util.area(rle(polygon))),
        }
        if annotation["iscrowd"]:
            annotation["segmentation"] = uncompressed(polygon)
        if rng.random() < 0.4:
            annotation["area"] = float(rng.choice([0, 32**2, 96**2, 32**2 - 1e-9, 96**2 + 1e-9]))
        if self.keypoints:
            points = self.points(box)
            annotation["keypoints"] = points.ravel().tolist()
            annotation["num_keypoints"] = int((points[:, 2] > 0).sum())
        return annotation

    def result(self, image_id, categories, truths):
        rng = self.rng
        near = truths[rng.integers(len(truths))] if truths and rng.random() < 0.7 else None
        if near is None:
            box, category_id = self.box(), int(rng.choice(categories))
        else:
            noise = rng.normal(0, 3, 4) if rng.random() < 0.7 else np.zeros(4)
            box = np.maximum(np.array(near["bbox"]) + noise, 1).tolist()
            category_id = near["category_id"]
        tied = rng.random() < 0.6
        result = {
            "image_id": image_id,
            "category_id": category_id,
            "bbox": box,
            "score": float(rng.choice([0.2, 0.5, 0.8])) if tied else float(rng.random()),
            "segmentation": rle(self.polygon(box)),
        }
        if self.keypoints:
            points = self.points(box) if near is None else np.reshape(near["keypoints"], (-1, 3))
            points = points + rng.normal(0, 2, points.shape)
            points[:, 2] = 1
            result["keypoints"] = points.ravel().tolist()
        return result


def rle(polygon):
    encoded = mask_util.merge(mask_util.frPyObjects(polygon, HEIGHT, WIDTH))
    return {"size": encoded["size"], "counts": encoded["counts"].decode()}


def uncompressed(polygon):
    flat = mask_util.decode(rle(polygon)).ravel(order="F")
    changes = np.flatnonzero(np.diff(flat)) + 1
    counts = np.diff([0, *changes, flat.size]).tolist()
    return {"size": [HEIGHT, WIDTH], "counts": [0, *counts] if flat[0] else counts}


def make_case(seed, *, images=5, categories=3, truths=6, results=9, keypoints=0):
    """Return ground truth and results; every third image has no truth, every fourth no result."""
    maker = Maker(seed, keypoints)
    ids = (np.arange(categories) * 3 + 2).tolist()
    document = {
        "images": [
            {"id": 10 * i, "width": WIDTH, "height": HEIGHT, "file_name": f"{i}.png"} for i in range(images)
        ],
        "categories": [{"id": i, "name": f"class {i}"} for i in ids],
        "annotations": [],
    }
    found = []
    for i, image in enumerate(document["images"]):
        here = []
        for _ in range(truths if i % 3 != 2 else 0):
            number = len(document["annotations"]) + 1
            # The last class has results, but nothing to find.
            here.append(maker.truth(number, image["id"], int(maker.rng.choice(ids[:-1] or ids))))
            document["annotations"].append(here[-1])
        for _ in range(results if i % 4 != 3 else 0):
            found.append(maker.result(image["id"], ids, here))
    return document, found

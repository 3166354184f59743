"""An annotation file without a fault, for tests that put one in."""

from __future__ import annotations

import copy

POLYGON = [[4, 4, 14, 4, 14, 12, 4, 12]]
COUNTS = {"size": [30, 40], "counts": [124, 8, 22, 8, 1038]}
POINTS = [5, 5, 2, 9, 9, 1]


def sound():
    """A file without a fault: two images, two classes, four annotations."""
    return {
        "images": [{"id": i, "file_name": f"{i}.png", "width": 40, "height": 30} for i in (1, 2)],
        "categories": [{"id": 1, "name": "hazel", "keypoints": ["tip", "end"]}, {"id": 2, "name": "walnut"}],
        "annotations": [
            {
                "id": i,
                "image_id": 1 + i % 2,
                "category_id": 1 + i // 3,
                "bbox": [4, 4, 10, 8],
                "area": 80,
                "iscrowd": 0,
                "segmentation": copy.deepcopy(POLYGON),
                "keypoints": list(POINTS),
                "num_keypoints": 2,
            }
            for i in (1, 2, 3, 4)
        ],
    }

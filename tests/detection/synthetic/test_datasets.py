from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.config import get_cfg
from detectron2.data import (
    DatasetCatalog,
    DatasetMapper,
    MetadataCatalog,
    build_detection_test_loader,
    build_detection_train_loader,
)
from detectron2.data import detection_utils as utils
from detectron2.data import transforms as T
from detectron2.structures import Boxes, Instances

from nonlocal_det import get_config
from nonlocal_det.data.cache import ensure_made, is_made_on_first_use
from nonlocal_det.detection.evaluation import COCOEvaluator
from nonlocal_det.detection.synthetic.datasets import register_builtin_datasets
from nonlocal_det.engine.task import check_run, find_task

TRAIN, VAL = "nonlocal_people_train", "nonlocal_people_val"


def keypoint_config():
    cfg = get_cfg()
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = (TRAIN,), (VAL,)
    cfg.MODEL.KEYPOINT_ON = cfg.MODEL.MASK_ON = True
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TRAIN = (192,), 192
    cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST = 192, 192
    cfg.DATALOADER.NUM_WORKERS = 0
    cfg.SOLVER.IMS_PER_BATCH = 2
    return cfg


def test_registration_draws_nothing_and_may_be_repeated(small_cache):
    before = MetadataCatalog.get(TRAIN)
    register_builtin_datasets()
    register_builtin_datasets()
    assert {TRAIN, VAL} <= set(DatasetCatalog.list())
    metadata = MetadataCatalog.get(TRAIN)
    assert metadata is before
    assert metadata.thing_classes == ["person"]
    assert metadata.evaluator_type == "coco"
    assert Path(metadata.json_file).is_relative_to(small_cache)
    assert Path(metadata.image_root).parent == Path(metadata.json_file).parent
    assert not small_cache.exists()


def test_a_run_on_it_is_checked_before_it_is_drawn(small_cache, small_options, tmp_path):
    names = {"DATASETS.TRAIN": (TRAIN,), "DATASETS.TEST": (VAL,), "OUTPUT_DIR": str(tmp_path / "out")}
    options = {**names, "MODEL.ROI_HEADS.NUM_CLASSES": 1}
    cfg = get_config("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml", small_options(options))
    check_run(cfg)
    find_task(cfg).check_data(cfg, training=True)
    assert not small_cache.exists()


def test_it_can_be_made_by_name(small_cache):
    assert is_made_on_first_use(VAL)
    assert not is_made_on_first_use("coco_2017_val")
    ensure_made("coco_2017_val")
    assert not small_cache.exists()
    ensure_made(VAL)
    metadata = MetadataCatalog.get(VAL)
    assert Path(metadata.json_file).is_file()
    assert len(list(Path(metadata.image_root).iterdir())) == 3


def test_loading_makes_the_set(small_cache):
    records = DatasetCatalog.get(TRAIN)
    assert len(records) == 4
    assert len(DatasetCatalog.get(VAL)) == 3
    metadata = MetadataCatalog.get(TRAIN)
    assert Path(metadata.json_file).is_file()
    assert Path(metadata.json_file).is_relative_to(small_cache)
    for record in records:
        assert Path(record["file_name"]).parent == Path(metadata.image_root)
        assert utils.read_image(record["file_name"], "BGR").shape == (192, 192, 3)
        assert {a["category_id"] for a in record["annotations"]} == {0}


def test_train_and_val_have_no_picture_in_common(small_cache):
    pictures = [Path(r["file_name"]).read_bytes() for name in (TRAIN, VAL) for r in DatasetCatalog.get(name)]
    assert len(set(pictures)) == 7


def test_a_damaged_picture_is_made_again(small_cache):
    record = DatasetCatalog.get(VAL)[0]
    path = Path(record["file_name"])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert Path(DatasetCatalog.get(VAL)[0]["file_name"]).read_bytes() == whole


def test_processes_at_the_same_time_read_the_same_set(small_cache):
    def work(results) -> None:
        results.put([Path(r["file_name"]).read_bytes() for r in DatasetCatalog.get(VAL)])

    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    processes = [fork.Process(target=work, args=(results,)) for _ in range(2)]
    for process in processes:
        process.start()
    first, second = results.get(timeout=60), results.get(timeout=60)
    for process in processes:
        process.join()
    assert first == second
    assert len(first) == 3
    assert len([path for path in small_cache.iterdir() if path.is_dir()]) == 1


def test_flip_pairs_swap_left_and_right_and_undo_themselves():
    metadata = MetadataCatalog.get(TRAIN)
    names = list(metadata.keypoint_names)
    order = utils.create_keypoint_hflip_indices([TRAIN])
    assert len(names) == 17
    assert np.array_equal(np.array(order)[order], np.arange(17))
    for name, other in zip(names, (names[i] for i in order), strict=True):
        swapped = name.replace("left", "?").replace("right", "left").replace("?", "right")
        assert other == swapped


@pytest.mark.parametrize("flipped", [False, True])
def test_mapper_keeps_the_sides_right_when_it_flips(small_cache, flipped):
    cfg = keypoint_config()
    flips = [T.RandomFlip(prob=1.0)] if flipped else []
    mapper = DatasetMapper(cfg, is_train=True, augmentations=flips)
    names = list(MetadataCatalog.get(TRAIN).keypoint_names)
    left, right = names.index("left_ear"), names.index("right_ear")
    nose = names.index("nose")
    for record in DatasetCatalog.get(TRAIN):
        faces_us = [a["keypoints"][3 * nose + 2] == 2 for a in record["annotations"]]
        instances = mapper(record)["instances"]
        keypoints = instances.gt_keypoints.tensor
        assert keypoints.shape == (len(faces_us), 17, 3)
        for points, faces in zip(keypoints, faces_us, strict=True):
            # Mirrored or not, the left ear of someone who looks at us is on the right.
            assert (points[left, 0] > points[right, 0]) == faces
        # Visible keypoints stay inside the polygons, which were flipped by other code.
        masks = instances.gt_masks
        for index, points in enumerate(keypoints):
            bitmap = np.zeros((192, 192), bool)
            for polygon in masks.polygons[index]:
                bitmap |= utils.polygons_to_bitmask([polygon], 192, 192)
            x, y = points[points[:, 2] == 2, :2].long().T
            assert bitmap[y, x].all()


def test_polygons_are_cropped(small_cache):
    """As INPUT.CROP does it: by a library that fvcore needs without naming it."""
    whole, cropped = (
        DatasetMapper(keypoint_config(), is_train=True, augmentations=augmentations)
        for augmentations in ([], [T.CropTransform(40, 30, 100, 120)])
    )
    compared = 0
    for record in DatasetCatalog.get(TRAIN):
        inside = []
        for polygons in whole(record)["instances"].gt_masks.polygons:
            bitmap = np.zeros((192, 192), bool)
            for polygon in polygons:
                bitmap |= utils.polygons_to_bitmask([polygon], 192, 192)
            part = bitmap[30:150, 40:140]
            if part.sum() > 200:
                inside.append(part)
        masks = cropped(record)["instances"].gt_masks
        found = [utils.polygons_to_bitmask(polygons, 120, 100) for polygons in masks.polygons]
        for part in inside:
            compared += 1
            assert max((part & other).sum() / (part | other).sum() for other in found) > 0.9
    assert compared


def test_train_loader_gives_masks_and_keypoints(small_cache):
    batch = next(iter(build_detection_train_loader(keypoint_config())))
    assert len(batch) == 2
    for sample in batch:
        fields = sample["instances"].get_fields()
        assert {"gt_boxes", "gt_classes", "gt_masks", "gt_keypoints"} <= set(fields)


def test_evaluator_built_before_anything_is_loaded_gives_the_truth_full_marks(small_cache, tmp_path):
    tasks = ("bbox", "segm", "keypoints")
    evaluator = COCOEvaluator(VAL, tasks, distributed=False, output_dir=str(tmp_path), use_fast_impl=False)
    evaluator.reset()
    cfg = keypoint_config()
    truth = {record["image_id"]: record["annotations"] for record in DatasetCatalog.get(VAL)}
    for inputs in build_detection_test_loader(cfg, VAL):
        found = truth[inputs[0]["image_id"]]
        boxes = torch.tensor([a["bbox"] for a in found], dtype=torch.float32)
        boxes[:, 2:] += boxes[:, :2]
        instances = Instances((192, 192))
        instances.pred_boxes = Boxes(boxes)
        instances.scores = torch.ones(len(found))
        instances.pred_classes = torch.zeros(len(found), dtype=torch.long)
        masks = [utils.polygons_to_bitmask(a["segmentation"], 192, 192) for a in found]
        instances.pred_masks = torch.from_numpy(np.stack(masks))
        instances.pred_keypoints = torch.tensor([a["keypoints"] for a in found]).float().reshape(-1, 17, 3)
        evaluator.process(inputs, [{"instances": instances}])
    results = evaluator.evaluate()
    for task in tasks:
        assert results[task]["AP"] == pytest.approx(100.0)

"""Figures against pycocotools on made results, and published ones; the evaluator inside Detectron2."""

import contextlib
import copy
import io
import json
import logging
import math
import re
from pathlib import Path

import numpy as np
import pycocotools.mask as mask_util
import pytest
import torch
from coco_cases import HEIGHT, WIDTH, make_case
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances
from detectron2.evaluation import COCOEvaluator as Detectron2Evaluator
from detectron2.evaluation.coco_evaluation import COCOevalMaxDets
from detectron2.structures import Boxes, Instances
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from nonlocal_det.detection.evaluation import COCOEvaluator, evaluate_coco

DATA = Path(__file__).parents[2] / "../shared/data/eval"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data/eval")


def by_pycocotools(document, results, task, *, sigmas=(), max_detections=100, image_ids=None):
    """Evaluate with the reference; no results at all, which it cannot load, are an empty file."""
    results = copy.deepcopy(results)
    if task == "segm":
        for result in results:
            result.pop("bbox", None)
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = copy.deepcopy(document)
        truth.createIndex()
        if results:
            found = truth.loadRes(results)
        else:
            found = COCO()
            found.dataset = {**truth.dataset, "annotations": []}
            found.createIndex()
        evaluation = (COCOeval if max_detections == 100 else COCOevalMaxDets)(truth, found, task)
        if task != "keypoints":
            evaluation.params.maxDets = [1, 10, max_detections]
        if len(sigmas):
            evaluation.params.kpt_oks_sigmas = np.array(sigmas)
        if image_ids is not None:
            evaluation.params.imgIds = image_ids
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation


def assert_equal(scores, reference):
    np.testing.assert_allclose(scores.stats, reference.stats, rtol=0, atol=1e-9)
    for key in ("precision", "recall", "scores"):
        np.testing.assert_allclose(scores.eval[key], reference.eval[key], rtol=0, atol=1e-9)


@pytest.mark.parametrize("task", ["bbox", "segm"])
@pytest.mark.parametrize(
    "options",
    [
        *({"seed": seed} for seed in range(6)),
        {"seed": 7, "categories": 1},
        {"seed": 8, "categories": 1, "results": 130, "truths": 40, "images": 2},
        {"seed": 9, "categories": 2, "results": 230, "truths": 30, "images": 2},
        {"seed": 10, "results": 0},
        {"seed": 11, "images": 1},
        {"seed": 12, "categories": 12, "truths": 3},
    ],
    ids=str,
)
def test_same_as_pycocotools(task, options):
    document, results = make_case(**options)
    assert_equal(evaluate_coco(document, results, task), by_pycocotools(document, results, task))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("count", [1, 3, 17, 23])
def test_any_number_of_keypoints(count, seed):
    document, results = make_case(seed, keypoints=count, categories=1, results=25)
    sigmas = np.random.default_rng(seed).uniform(0.02, 0.12, count).tolist()
    scores = evaluate_coco(document, results, "keypoints", oks_sigmas=sigmas)
    assert_equal(scores, by_pycocotools(document, results, "keypoints", sigmas=sigmas))
    assert scores.stats.shape == (10,)


def test_limit_of_detections_and_choice_of_images():
    document, results = make_case(3, categories=1, results=150, truths=30, images=2)
    for limit in (20, 300):
        scores = evaluate_coco(document, results, "bbox", max_detections=limit)
        assert_equal(scores, by_pycocotools(document, results, "bbox", max_detections=limit))
    scores = evaluate_coco(document, results, "bbox", image_ids=[10])
    assert_equal(scores, by_pycocotools(document, results, "bbox", image_ids=[10]))


def test_nothing_to_find_and_nothing_found():
    document, results = make_case(0)
    nothing = evaluate_coco({**document, "annotations": []}, results, "bbox")
    assert nothing.stats.tolist() == [-1] * 12
    assert evaluate_coco(document, [], "bbox").stats[0] == 0


def test_keys_that_users_add_are_ignored():
    document, results = make_case(0)
    expected = evaluate_coco(document, results, "segm").stats
    document["images"][0]["taken"] = float("nan")
    document["annotations"][0].update(attributes={"by": [None, {}]}, keypoints=None)
    document["info"] = None
    np.testing.assert_array_equal(evaluate_coco(document, results, "segm").stats, expected)


def load(name):
    return json.loads((DATA / name).read_text())


@needs_data
@pytest.mark.parametrize(("task", "place"), [("segm", 0), ("bbox", 1)])
def test_published_figures(task, place, capsys):
    text = (DATA / "expected_bbox_segm.txt").read_text()
    published = [float(v) for v in re.findall(r"= (-?\d\.\d{3})", text)][12 * place : 12 * place + 12]
    truth, results = load("instances_val2014_100.json"), load(f"instances_val2014_fake{task}100_results.json")
    scores = evaluate_coco(truth, results, task)
    assert [round(float(v), 3) for v in scores.stats] == published
    # The printed summary is COCO's.
    assert [float(v) for v in re.findall(r"= (-?\d\.\d{3})", capsys.readouterr().out)] == published


@needs_data
def test_published_keypoint_figures():
    scores = evaluate_coco(load("keypoints/gt_dataset.json"), load("keypoints/dt_dataset.json"), "keypoints")
    np.testing.assert_allclose(scores.stats[:5], [0.50488, 0.72277, 0.63366, 0.46634, 0.75050], atol=5e-6)


@pytest.mark.parametrize("wrong", ["truth", "results"])
def test_wrong_number_of_keypoints_is_one_line(wrong):
    document, results = make_case(0, keypoints=4)
    for entry in document["annotations"] if wrong == "truth" else results:
        entry["keypoints"] = entry["keypoints"][:9]
    with pytest.raises(ValueError, match=r"^TEST\.KEYPOINT_OKS_SIGMAS has 4 values, .* have 3 keypoints"):
        evaluate_coco(document, results, "keypoints", oks_sigmas=[0.1] * 4)


class Run:
    """Feeds a case to an evaluator as a model would."""

    def __init__(self, name, folder, document, results):
        self.document, self.results = document, results
        self.name = name
        path = folder / f"{name}.json"
        path.write_text(json.dumps(document))
        register_coco_instances(self.name, {}, str(path), str(folder))
        categories = sorted(category["id"] for category in document["categories"])
        self.to_class = {category: i for i, category in enumerate(categories)}
        names = {category["id"]: category["name"] for category in document["categories"]}
        MetadataCatalog.get(self.name).set(
            thing_classes=[names[category] for category in categories],
            thing_dataset_id_to_contiguous_id=dict(self.to_class),
        )

    def evaluate(self, evaluator):
        evaluator.reset()
        for image in self.document["images"]:
            here = [result for result in self.results if result["image_id"] == image["id"]]
            boxes = np.reshape([result["bbox"] for result in here], (-1, 4)).astype(np.float32)
            instances = Instances((HEIGHT, WIDTH))
            instances.pred_boxes = Boxes(
                torch.tensor(np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1))
            )
            instances.scores = torch.tensor([result["score"] for result in here])
            instances.pred_classes = torch.tensor(
                [self.to_class[r["category_id"]] for r in here], dtype=torch.int64
            )
            masks = [mask_util.decode(result["segmentation"]) for result in here]
            instances.pred_masks = torch.tensor(np.reshape(masks, (-1, HEIGHT, WIDTH))).bool()
            if here and "keypoints" in here[0]:
                points = torch.tensor([result["keypoints"] for result in here]).reshape(len(here), -1, 3)
                instances.pred_keypoints = points
            evaluator.process([image | {"image_id": image["id"]}], [{"instances": instances}])
        with contextlib.redirect_stdout(io.StringIO()):
            return evaluator.evaluate()


@pytest.fixture
def run(tmp_path):
    runs = []

    def make(document, results):
        runs.append(Run(f"made_{len(runs)}", tmp_path, document, results))
        return runs[-1]

    yield make
    for made in runs:
        DatasetCatalog.remove(made.name)
        MetadataCatalog.remove(made.name)


def same(found, expected):
    assert found.keys() == expected.keys()
    for task in expected:
        assert found[task] == pytest.approx(expected[task], abs=1e-7, nan_ok=True)


def test_evaluator_gives_what_detectron2s_gives(run, tmp_path):
    made = run(*make_case(4, keypoints=5, categories=2))
    sigmas = [0.03, 0.05, 0.06, 0.08, 0.1]
    tasks = ("bbox", "segm", "keypoints")
    ours = COCOEvaluator(made.name, tasks, output_dir=str(tmp_path / "ours"), kpt_oks_sigmas=sigmas)
    slow = COCOEvaluator(made.name, tasks, use_fast_impl=False, kpt_oks_sigmas=sigmas)
    theirs = Detectron2Evaluator(
        made.name, tasks, output_dir=str(tmp_path / "theirs"), use_fast_impl=False, kpt_oks_sigmas=sigmas
    )
    expected = made.evaluate(theirs)
    same(made.evaluate(ours), expected)
    same(made.evaluate(slow), expected)
    assert "AP-class 2" in expected["segm"]
    written = [
        json.loads((tmp_path / who / "coco_instances_results.json").read_text()) for who in ("ours", "theirs")
    ]
    assert written[0] == written[1]
    assert {result["category_id"] for result in written[0]} == {2, 5}


def test_tasks_found_in_the_predictions(run):
    made = run(*make_case(1))
    assert made.evaluate(COCOEvaluator(made.name)).keys() == {"bbox", "segm"}


@pytest.mark.parametrize("limit", [20, 300])
def test_evaluator_with_another_limit(run, limit):
    made = run(*make_case(5, categories=1, results=120, images=2))
    theirs = Detectron2Evaluator(made.name, ("bbox",), use_fast_impl=False, max_dets_per_image=limit)
    same(made.evaluate(COCOEvaluator(made.name, ("bbox",), max_dets_per_image=limit)), made.evaluate(theirs))


def test_model_that_finds_nothing_scores_0(run):
    document, _ = make_case(2)
    made = run(document, [])
    scores = made.evaluate(COCOEvaluator(made.name, ("bbox", "segm")))
    assert scores["bbox"]["AP"] == scores["segm"]["AP"] == 0
    assert math.isnan(scores["bbox"]["AP-class 8"])  # no object of this class


@pytest.mark.parametrize("annotations", [None, []])
def test_without_ground_truth_results_are_written(run, tmp_path, annotations, caplog):
    document, results = make_case(2)
    document["annotations"] = annotations
    if annotations is None:
        del document["annotations"]
    made = run(document, results)
    with caplog.at_level(logging.INFO, logger="nonlocal_det.detection.evaluation"):
        scores = made.evaluate(COCOEvaluator(made.name, ("bbox", "segm"), output_dir=str(tmp_path / "out")))
    assert scores == {}
    assert "no annotations" in caplog.text
    assert len(json.loads((tmp_path / "out" / "coco_instances_results.json").read_text())) == len(results)


def test_files_that_pycocotools_stops_at(run, caplog):
    document, results = make_case(6, keypoints=3)
    tasks, sigmas = ("bbox", "segm", "keypoints"), [0.1] * 3
    whole = run(document, results)
    expected = whole.evaluate(
        Detectron2Evaluator(whole.name, tasks, use_fast_impl=False, kpt_oks_sigmas=sigmas)
    )
    document = copy.deepcopy(document)
    for annotation in document["annotations"]:
        del annotation["num_keypoints"]
        if annotation["iscrowd"]:
            annotation["iscrowd"] = True
        else:
            del annotation["iscrowd"]
    document["annotations"][0]["id"] = 0
    broken = run(document, results)
    with caplog.at_level(logging.INFO, logger="nonlocal_det.detection.evaluation"):
        same(broken.evaluate(COCOEvaluator(broken.name, tasks, kpt_oks_sigmas=sigmas)), expected)
    assert "annotation_id_0 1" in caplog.text


def test_missing_area_is_that_of_the_mask(run):
    document, results = make_case(6)
    for annotation in document["annotations"]:
        segmentation = annotation["segmentation"]
        encoded = mask_util.frPyObjects(segmentation, HEIGHT, WIDTH)
        annotation["area"] = float(
            mask_util.area(encoded if isinstance(segmentation, dict) else mask_util.merge(encoded))
        )
    expected = evaluate_coco(document, results, "segm").stats
    for annotation in document["annotations"]:
        del annotation["area"]
    made = run(document, results)
    evaluator = COCOEvaluator(made.name, ("segm",))
    scores = made.evaluate(evaluator)["segm"]
    names = ("AP", "AP50", "AP75", "APs", "APm", "APl")
    assert [scores[name] for name in names] == pytest.approx([100 * v for v in expected[:6]], abs=1e-9)


def test_objects_without_a_mask_are_not_looked_for_by_masks(run):
    document, results = make_case(1)
    fewer = copy.deepcopy(document)
    fewer["annotations"] = fewer["annotations"][2:]
    document["annotations"][0]["segmentation"] = []
    del document["annotations"][1]["segmentation"]
    np.testing.assert_array_equal(
        evaluate_coco(document, results, "segm").stats, evaluate_coco(fewer, results, "segm").stats
    )
    assert evaluate_coco(document, results, "bbox").stats[8] != evaluate_coco(fewer, results, "bbox").stats[8]


def test_ground_truth_without_what_is_scored(run):
    document, results = make_case(1, keypoints=3)
    for annotation in document["annotations"]:
        del annotation["segmentation"], annotation["keypoints"], annotation["num_keypoints"]
    made = run(document, results)
    tasks = ("bbox", "segm", "keypoints")
    scores = made.evaluate(COCOEvaluator(made.name, tasks, kpt_oks_sigmas=[0.1] * 3))
    assert scores["bbox"]["AP"] > 0
    assert math.isnan(scores["segm"]["AP"])
    assert math.isnan(scores["keypoints"]["AP"])


def test_class_that_the_data_lacks_is_one_line(run):
    made = run(*make_case(1))
    made.to_class[2] = 40
    with pytest.raises(ValueError, match=r"predicts class 40, but made_0 has the classes 0 to 2"):
        made.evaluate(COCOEvaluator(made.name))

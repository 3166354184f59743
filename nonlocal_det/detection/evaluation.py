"""COCO's metrics by hotcoco, which gives pycocotools' figures in a fraction of its time."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import hotcoco
import numpy as np
from detectron2.config import CfgNode
from detectron2.evaluation import COCOEvaluator as Detectron2Evaluator
from detectron2.utils.file_io import PathManager

from nonlocal_det.data.cache import ensure_made
from nonlocal_det.detection.annotations.coco_file import describe_mask
from nonlocal_det.detection.annotations.documents import lend_document
from nonlocal_det.detection.annotations.fixes import FOR_EVALUATION, mend
from nonlocal_det.upstream import annotation_files_from

logger = logging.getLogger(__name__)

#: What hotcoco is given: it reads every key, and stops at some that users' files have.
_IMAGE_KEYS = ("id", "width", "height")
_CATEGORY_KEYS = ("id", "name")
_TRUTH_KEYS = ("id", "image_id", "category_id", "bbox", "area", "iscrowd", "keypoints", "num_keypoints")


class Scores(NamedTuple):
    """The outcome of an evaluation, as pycocotools' ``COCOeval`` has it; -1 where nothing is to be scored."""

    stats: np.ndarray  # the 12 figures (10 for keypoints) of COCO's summary
    # "precision" [T, R, K, A, M], "recall" [T, K, A, M] and "scores" [T, R, K, A, M] over T IoU thresholds,
    # R recall thresholds, K categories, A ranges of area and M limits of detections.
    eval: dict[str, np.ndarray]


def evaluate_coco(
    ground_truth: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    task: str,
    *,
    oks_sigmas: Sequence[float] = (),
    max_detections: int = 100,
    image_ids: Sequence[int] | None = None,
) -> Scores:
    """Evaluate results against ground truth, and print COCO's summary.

    Args:
        ground_truth: content of an annotation file, with "iscrowd", "area" and, for keypoints,
            "num_keypoints" in every annotation; annotation ids are not 0.
        results: in COCO's result format; may be empty.
        task: "bbox", "segm" (the area of a detection is that of its mask) or "keypoints".
        oks_sigmas: constants of the object keypoint similarity; COCO's 17 by default.
        max_detections: of each image and class count, the best by score; keypoints always 20.
        image_ids: evaluate on these images alone.

    Raises:
        ValueError: the numbers of keypoints and of ``oks_sigmas`` differ.
    """
    with warnings.catch_warnings():
        # It warns of settings that are not COCO's own, which the caller asked for.
        warnings.simplefilter("ignore", UserWarning)
        truth = hotcoco.COCO(_ground_truth(ground_truth, task))
        if task == "segm":
            # With a box, COCO's rules take its area, not the mask's, as that of the detection.
            results = [{key: value for key, value in result.items() if key != "bbox"} for result in results]
        found = truth.load_res(list(results))
        evaluation = hotcoco.COCOeval(truth, found, task)
        if task == "keypoints":
            sigmas = list(oks_sigmas) or evaluation.params.kpt_oks_sigmas
            _check_keypoints(ground_truth, results, sigmas)
            evaluation.params.kpt_oks_sigmas = sigmas
        else:
            evaluation.params.max_dets = [1, 10, max_detections]
        if image_ids is not None:
            evaluation.params.img_ids = list(image_ids)
        evaluation.run()
        evaluated = _pick(evaluation.eval, ("precision", "recall", "scores"))
    return Scores(np.asarray(evaluation.stats), evaluated)


class COCOEvaluator(Detectron2Evaluator):
    """Detectron2's COCO evaluator, fast, and for files that pycocotools would stop at.

    It differs from its base in this:

    - figures come from hotcoco: those of pycocotools, without Detectron2's compiled extension;
    - missing areas, missing or Boolean "iscrowd", missing "num_keypoints" and annotation id 0 (which
      pycocotools counts as a miss) are mended in memory, and the log says so;
    - a model that finds nothing scores 0, not NaN. NaN means that there is nothing to find;
    - of a data set without annotations the results are written, and there is no score;
    - a file that has not changed is read once, and a built-in data set is drawn where it is missing.

    Args:
        dataset_name: a registered data set in COCO's format, or one that Detectron2 can convert to it.
        tasks: of "bbox", "segm" and "keypoints"; by default those in the predictions.
        *args: as for the base.
        use_fast_impl: hotcoco; otherwise pycocotools, as Detectron2 uses it.
        **kwargs: as for the base.
    """

    def __init__(
        self,
        dataset_name: str,
        tasks: Sequence[str] | CfgNode | None = None,
        *args: Any,
        use_fast_impl: bool = True,
        **kwargs: Any,
    ) -> None:
        ensure_made(dataset_name)
        with annotation_files_from(lend_document):
            # Its own fast form needs the compiled extension.
            super().__init__(dataset_name, tasks, *args, use_fast_impl=False, **kwargs)
        self._use_fast_impl = use_fast_impl
        document = self._coco_api.dataset
        self._do_evaluation = bool(document.get("annotations"))
        mended = mend(document, FOR_EVALUATION)
        if mended:
            listed = ", ".join(f"{kind} {number}" for kind, number in mended.items())
            logger.info("%s: mended in memory for the evaluation: %s", dataset_name, listed)
            self._coco_api.createIndex()

    def _eval_predictions(self, predictions: list[dict[str, Any]], img_ids: list[int] | None = None) -> None:
        if not self._use_fast_impl:
            super()._eval_predictions(predictions, img_ids=img_ids)
            return
        results = list(chain.from_iterable(prediction["instances"] for prediction in predictions))
        self._restore_category_ids(results)
        if self._output_dir:
            path = os.path.join(self._output_dir, "coco_instances_results.json")
            logger.info("Writing %d detections to %s", len(results), path)
            with PathManager.open(path, "w") as file:
                file.write(json.dumps(results))
        if not self._do_evaluation:
            logger.info("%s has no annotations, so there is no score", self._metadata.name)
            return
        for task in sorted(self._tasks or self._tasks_from_predictions(results)):
            if task == "keypoints" and self._kpt_oks_sigmas:
                logger.info("Keypoints are scored with the OKS sigmas %s", list(self._kpt_oks_sigmas))
            scores = evaluate_coco(
                self._coco_api.dataset,
                results,
                task,
                oks_sigmas=self._kpt_oks_sigmas,
                max_detections=self._max_dets_per_image[-1],
                image_ids=img_ids,
            )
            self._results[task] = self._derive_coco_results(
                scores, task, class_names=self._metadata.get("thing_classes")
            )

    def _restore_category_ids(self, results: list[dict[str, Any]]) -> None:
        """Turn the model's class numbers into the file's category ids, in place."""
        to_contiguous = self._metadata.get("thing_dataset_id_to_contiguous_id")
        if to_contiguous is None:
            return
        to_dataset = {number: category for category, number in to_contiguous.items()}
        for result in results:
            number = result["category_id"]
            if number not in to_dataset:
                raise ValueError(
                    f"the model predicts class {number}, but {self._metadata.name} has the classes 0 to "
                    f"{len(to_dataset) - 1}; check NUM_CLASSES and MODEL.WEIGHTS"
                )
            result["category_id"] = to_dataset[number]


def _ground_truth(document: Mapping[str, Any], task: str) -> dict[str, Any]:
    keys = (*_TRUTH_KEYS, "segmentation") if task == "segm" else _TRUTH_KEYS
    annotations = document["annotations"]
    if task == "segm":
        # Detectron2 does not train on objects without a mask either.
        annotations = [a for a in annotations if describe_mask(a.get("segmentation")).usable]
    return {
        "images": [_pick(image, _IMAGE_KEYS) for image in document["images"]],
        "categories": [_pick(category, _CATEGORY_KEYS) for category in document["categories"]],
        "annotations": [_pick(annotation, keys) for annotation in annotations],
    }


def _pick(entry: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: entry[key] for key in keys if key in entry}


def _check_keypoints(
    ground_truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]], sigmas: Sequence[float]
) -> None:
    for what, entries in (("ground truth", ground_truth["annotations"]), ("detections", results)):
        lengths = {len(entry["keypoints"]) // 3 for entry in entries if entry.get("keypoints")}
        if lengths - {len(sigmas)}:
            raise ValueError(
                f"TEST.KEYPOINT_OKS_SIGMAS has {len(sigmas)} values, but the {what} have "
                f"{', '.join(map(str, sorted(lengths)))} keypoints; write a value for each keypoint"
            )

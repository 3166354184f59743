"""Evaluation by COCO's metrics."""

from nonlocal_det.evaluation.coco import COCOEvaluator, Scores, evaluate_coco

__all__ = ["COCOEvaluator", "Scores", "evaluate_coco"]

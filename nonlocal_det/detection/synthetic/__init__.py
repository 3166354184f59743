"""Drawn data sets with boxes, masks and keypoints, for tests, the demo and experiments."""

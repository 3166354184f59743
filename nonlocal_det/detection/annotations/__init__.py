"""Annotation files in COCO's format: reading, checking, fixing, writing."""

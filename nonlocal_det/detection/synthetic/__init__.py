"""Scenes drawn from a seed, whose annotations are exact, and the built-in data sets made of them."""

#: Names of the classes of the squares, by COCO category id - 1: the colour of the disc.
CONTEXT_CLASSES = ("red", "blue")

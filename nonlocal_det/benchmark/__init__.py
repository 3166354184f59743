"""What blocks cost: time, memory and operations, of a block alone and of whole detectors."""

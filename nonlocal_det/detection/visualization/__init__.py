"""Drawing of detections."""

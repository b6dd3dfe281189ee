"""`make demo`: the main job, start to end, with two crashes on the way."""

"""`make demo`: the main job, from start to end, with two crashes on the way."""

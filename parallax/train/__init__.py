"""The main job: a small language model trained on real text, under any composition."""

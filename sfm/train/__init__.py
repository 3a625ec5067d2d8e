"""`python -m sfm.train`: the Ray Train driver, the worker's loop, checkpoints, metrics, pictures."""

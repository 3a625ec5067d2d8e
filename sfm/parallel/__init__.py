"""Parallelism applied from outside the model: mesh, attention across devices, engines. No Ray."""

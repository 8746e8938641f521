"""Planner: predicts memory and step time of a model on a mesh, without the GPUs, and ranks the meshes."""

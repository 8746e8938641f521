"""Library of `megalin verify`: compares a model on a mesh with one process, tensor by tensor."""

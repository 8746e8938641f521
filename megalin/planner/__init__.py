"""Planning: what a model needs on a mesh that need not be there, and which mesh suits it."""

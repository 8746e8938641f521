"""Generation: batched decoding with a state of constant size, on GPUs one CUDA graph a token."""

from megalin.generation.generate import Completion, generate, generate_batches
from megalin.generation.generate_on_mesh import generate_on_mesh
from megalin.generation.load import DtypeName, GenerationRun, cast_weights, load_for_generation, open_for_generation
from megalin.generation.sampling import Sampling

__all__ = [
    "Completion",
    "DtypeName",
    "GenerationRun",
    "Sampling",
    "cast_weights",
    "generate",
    "generate_batches",
    "generate_on_mesh",
    "load_for_generation",
    "open_for_generation",
]

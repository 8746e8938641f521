"""Subclasses and hooks that change a mixer's maths: decoding by a state still equals the forward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalin.layers.mixers.base import Mixer
from megalin.model.language_model import LanguageModel
from tests.cases import CASES, FFN, GLU, MAMBA2, NUM_HEADS, VOCAB_SIZE, Case, build, make_inputs, model
from tests.numerics import relative_error

WINDOWED = {"type": "softmax", "num_heads": NUM_HEADS, "window": 5, "num_sinks": 1}
NAMES = ("transnormer", "transnormer-rotation", "tnl", "hgrn2", "cosformer2", "rodimus_plus", "softmax-grouped")
KINDS = [
    *[case for case in CASES if case.name in (*NAMES, "mamba2", "mamba1", "gla", "ffn", "norms")],
    Case("softmax of a window", model({"sublayers": [WINDOWED, GLU]})),
    Case("mamba2 of groups", model({"sublayers": [MAMBA2 | {"num_groups": 2}, FFN]})),
]
"""Every mixer, with and without the norms and biases that its fused forms need."""
FUSED = ("transnormer", "tnl", "hgrn2", "rodimus_plus", "gla", "norms")
"""Cases with fused forms of calls of their modules."""
LENGTH, PROMPT = 10, 6
BOUND = 1e-10
every_kind = pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)


def altered(value: Any) -> Any:
    """A result's tensors of real numbers, every second channel times 1.5, which no norm takes back.

    Of a named tuple, and of one with other things than tensors, the first field alone: others may be states, which
    several calls would change several times.
    """
    if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
        return value * (1.0 + 0.5 * (torch.arange(value.shape[-1]) % 2))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        first = altered(value[0])
        return value if first is value[0] else type(value)(first, *value[1:])
    if isinstance(value, dict):
        return {name: altered(each) for name, each in value.items()}
    if isinstance(value, tuple) and value:
        tensors = all(isinstance(each, Tensor) for each in value)
        return tuple(altered(each) for each in value) if tensors else (altered(value[0]), *value[1:])
    return value


def small(case: Case) -> LanguageModel:
    """The case's model with one block, but for HGRN2, whose first block has no bounds; GLUs in three cases alone."""
    layers = []
    for layer in case.model.layers:
        kept = [s for s in layer.sublayers if s.type != "glu" or case.name in ("transnormer", "norms", "rodimus_plus")]
        repeat = 2 if any(s.type == "hgrn2" for s in kept) else 1
        layers.append(layer.model_copy(update={"repeat": repeat, "sublayers": kept}))
    model = build(case.model.model_copy(update={"layers": layers}))
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.constant_(parameter, 0.1)  # zero times a factor would show nothing
    return model


TOKENS = make_inputs(LENGTH).tokens[:2]


def forward(model: LanguageModel) -> Tensor:
    """Logits of all tokens after the prompt."""
    with torch.no_grad():
        return model(TOKENS).logits[:, PROMPT:, :VOCAB_SIZE]


def decoded(model: LanguageModel) -> Tensor:
    """The same from the prompt's state, token by token, as `megalin generate` decodes."""
    with torch.no_grad():
        start = model.initial_state(len(TOKENS), dtype=torch.float64)
        state = model.reserve(model(TOKENS[:, :PROMPT], state=start).state, LENGTH)
        contexts, logits = model.step_contexts(in_place=True), []
        for t in range(PROMPT, LENGTH):
            output = model.step(TOKENS[:, t], state, contexts)
            logits.append(output.logits)
            state = output.state
        return torch.cat(logits, dim=1)[..., :VOCAB_SIZE]


def called_methods(model: LanguageModel) -> list[tuple[type[Mixer], str]]:
    """The mixers' methods that a forward and decoding call, by class."""
    found: dict[tuple[type[Mixer], str], None] = {}

    def record(frame: FrameType, event: str, _: Any) -> None:
        mixer, name = frame.f_locals.get("self"), frame.f_code.co_name
        if event == "call" and isinstance(mixer, Mixer):
            function = None if name in vars(nn.Module) else getattr(type(mixer), name, None)
            if name == "forward" or getattr(function, "__code__", None) is frame.f_code:
                found[type(mixer), name] = None

    sys.setprofile(record)
    try:
        forward(model)
        decoded(model)
    finally:
        sys.setprofile(None)
    return list(found)


@contextmanager
def overridden(modules: list[nn.Module], name: str) -> Iterator[list[bool]]:
    """Gives the modules, all of one class, a subclass whose method alters the result; yields whether calls did."""
    cls, effects = type(modules[0]), []

    def method(self: nn.Module, *args: Any, **options: Any) -> Any:
        result = getattr(cls, name)(self, *args, **options)
        changed = altered(result)
        effects.append(changed is not result)
        return changed

    for module in modules:
        module.__class__ = type(f"Own{cls.__name__}", (cls,), {name: method})
    try:
        yield effects
    finally:
        for module in modules:
            module.__class__ = cls


@contextmanager
def hooked(modules: list[nn.Module], _: str) -> Iterator[list[bool]]:
    """Gives the modules a forward hook that alters the result."""
    effects: list[bool] = []

    def hook(_: nn.Module, __: Any, result: Any) -> Any:
        effects.append(True)
        return altered(result)

    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield effects
    finally:
        for handle in handles:
            handle.remove()


def assert_decodes_what_the_forward_computes(model: LanguageModel, plain: Tensor, effects: list[bool]) -> bool:
    """Whether the change had an effect on the forward, which decoding then has too."""
    expected = forward(model)
    if not any(effects):
        return False
    assert relative_error(expected, plain) > 1e-6
    assert relative_error(decoded(model), expected) <= BOUND
    return True


DECODING = ("step", "add_step", "decode")
"""Methods that no forward calls; who overrides one answers for its result, which `megalin verify` compares."""


@every_kind
def test_an_overridden_method_changes_decoding_as_it_changes_the_forward(case: Case):
    model = small(case)
    plain, compared = forward(model), []
    assert relative_error(decoded(model), plain) <= BOUND
    for cls, name in called_methods(model):
        if name in DECODING or hasattr(getattr(cls, name), "bypassed"):
            continue
        own = [mixer for mixer in [*model.input_mixers(), *model.mixers()] if type(mixer) is cls]
        with overridden(own, name) as effects:
            if assert_decodes_what_the_forward_computes(model, plain, effects):
                compared.append(name)
    assert "forward" in compared


@pytest.mark.parametrize(
    ("case", "change"),
    [pytest.param(case, hooked, id=f"hooked-{case.name}") for case in KINDS]
    + [pytest.param(case, overridden, id=f"subclass-{case.name}") for case in KINDS if case.name in FUSED],
)
def test_a_changed_module_changes_decoding_as_it_changes_the_forward(case: Case, change: Callable[..., Any]):
    model = small(case)
    plain, ignored = forward(model), []
    for name, module in model.named_modules():
        if name.startswith(("blocks.", "input_layers.")) and type(module).forward is not nn.Module.forward:
            with change([module], "forward") as effects:
                if not assert_decodes_what_the_forward_computes(model, plain, effects):
                    ignored.append(name)
    assert ignored == []


def test_an_overridden_step_is_taken():
    for case in KINDS:
        model = small(case)
        plain = decoded(model)
        for cls in {type(mixer) for mixer in model.mixers()}:
            with overridden([mixer for mixer in model.mixers() if type(mixer) is cls], "step"):
                assert relative_error(decoded(model), plain) > 1e-6, (case.name, cls)


def paths(model: LanguageModel) -> list[str]:
    """The decoding paths of the mixers."""
    return [context.decoding for block in model.step_contexts().blocks for context in block]


@every_kind
def test_the_fastest_method_that_ignores_nothing_decodes(case: Case):
    model = small(case)
    mixers = model.mixers()
    fastest = ["step" if type(mixer).add_step is Mixer.add_step else "add_step" for mixer in mixers]
    assert paths(model) == fastest
    for mixer in mixers:
        mixer.__class__ = type("SameMaths", (type(mixer),), {"flops": lambda self, length: 0})
    assert paths(model) == fastest
    for mixer in mixers:
        mixer.forward = mixer.forward
    assert set(paths(model)) == {"forward"}
    for block in model.blocks:
        block.register_forward_hook(lambda *_: None)
    assert set(paths(model)) == {"block"}

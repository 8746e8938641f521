"""`Mixer.gate_values`: the decay of the forward itself, of every mixer that has one."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from megalin.layers.config import mixer_types
from megalin.layers.gates import MixerGates
from megalin.layers.mixers.base import Mixer, MixerContext
from tests import cases, encoder_cases
from tests.ablations import MODELS
from tests.layers.test_recurrence import MODELS as TABLE_4
from tests.numerics import relative_error

FAMILIES = {
    "bidirectional_softmax": None,
    "cosformer2": "fixed",
    "dense_attention": None,
    "ffn": None,
    "glu": None,
    "hgrn2": "selected",
    "mamba1": "selected",
    "mamba2": "selected",
    "recurrence": "selected",
    "rodimus": "selected",
    "shared_key_attention": None,
    "softmax": None,
    "tnl": "fixed",
    "transnormer": "fixed",
    "two_way_hgrn2": "selected",
}
"""By mixer: its decay, the same for all tokens or selected by each; None without one."""


class Reading(NamedTuple):
    """A mixer, the arguments of its forward, and its gates."""

    mixer: Mixer
    x: Tensor
    context: MixerContext
    gates: MixerGates | None


def readings(name: str) -> list[Reading]:
    """Every mixer of a case or an ablation, in a forward of two sequences."""
    found: list[Reading] = []

    def read(mixer: nn.Module, inputs: tuple, output: object) -> None:
        x, context, _ = inputs
        found.append(Reading(mixer, x, context, mixer.gate_values(x, context)))

    rows = {f"recurrence {row}": config for row, config in TABLE_4.items()}
    decoders = MODELS | rows | {case.name: case.model for case in cases.CASES}
    encoders = {case.name: case.model for case in encoder_cases.CASES}
    built = cases.build(decoders[name]) if name in decoders else encoder_cases.build(encoders[name])
    hooks = [module.register_forward_hook(read) for module in built.modules() if isinstance(module, Mixer)]
    with torch.no_grad():
        built(torch.arange(6).view(2, 3))
    for hook in hooks:
        hook.remove()
    return found


DECODERS = ("transnormer-cosine", "tnl", "hgrn2", "cosformer2", "rodimus_plus", "mamba2", "mamba1", "gla", "softmax")
ENCODERS = ("heads", "bert", "two-way")


def test_every_mixer_reports_its_gates_or_has_none():
    found = {}
    for name in (*DECODERS, *ENCODERS):
        for mixer, x, _, gates in readings(name):
            kind = type(mixer).__module__.rpartition(".")[2]
            found.setdefault(kind, gates and ("fixed" if gates.log_decay.dim() == 2 else "selected"))
            if gates is not None:
                assert gates.log_decay.le(0).all()
                assert all(gate.shape[:2] == x.shape[:2] and gate.dim() == 4 for gate in gates.gates.values())
    assert found == FAMILIES
    assert set(FAMILIES) == set(mixer_types()), "enter a new mixer in FAMILIES"


@pytest.mark.parametrize(
    "name",
    [
        *("transnormer-cosine", "tnl", "hgrn2", "cosformer2", "rodimus", "mamba2", "no-lower-bounds"),
        *("mamba1", "gla", "recurrence gretnet", "recurrence steep", "recurrence linear-attention"),
        *("recurrence hawk", "recurrence decay-of-values", "recurrence decay-of-both"),
        *("rodimus-no-gates", "rodimus-selection", "rodimus-selection-input", "no-decay-lrpe"),
    ],
)
def test_the_state_decays_as_reported(name):
    """A state entering the scan reaches its end times the decays of the tokens between, at every length."""
    generator = torch.Generator().manual_seed(0)
    checked = 0
    for mixer, x, context, gates in readings(name):
        if gates is None:
            continue
        for length in range(1, x.shape[1] + 1):
            here = context._replace(positions=context.positions[..., :length])
            zero = mixer.initial_state(len(x), dtype=x.dtype, device=x.device)
            entering = torch.randn(zero[-1].shape, dtype=x.dtype, generator=generator)
            with torch.no_grad():
                ends = [mixer(x[:, :length], here, (*zero[:-1], state)).state[-1] for state in (zero[-1], entering)]
            decay = gates.log_decay.expand(*x.shape[:2], *gates.log_decay.shape[-2:])[:, :length].sum(1).exp()
            along_values = name == "recurrence decay-of-values"
            decay = decay[..., None] if entering.dim() == 4 else decay  # [B, H, K, 1]
            decay = decay.mT if along_values else decay
            if "value_decay" in gates.gates:
                decay = decay * gates.gates["value_decay"][:, :length].prod(1)[..., None, :]
            assert relative_error(ends[1] - ends[0], decay * entering) <= 1e-12
            checked += 1
    assert checked


def test_lower_bounds_are_those_of_the_decay():
    first, second = (each.gates for each in readings("hgrn2") if each.gates is not None)
    assert first.lower_bounds.eq(0).all()
    assert torch.allclose(second.lower_bounds, torch.full_like(second.lower_bounds, 0.5))  # of two layers
    assert (second.log_decay.exp() > second.lower_bounds).all()
    assert next(each.gates for each in readings("no-lower-bounds") if each.gates is not None).lower_bounds is None


def test_further_gates_are_those_of_the_forward():
    """The output gate by TNL's own projection; Rodimus' tempered selection by the product that the decay has."""
    for mixer, x, _, gates in readings("tnl"):
        if gates is not None:
            assert torch.equal(gates.gates["output"].flatten(2), mixer.project(x)[1])
    for mixer, x, context, gates in readings("rodimus"):
        assert sorted(gates.gates) == ["input", "selection", "temperature", "tempered_selection"]
        product = gates.gates["selection"] * gates.gates["temperature"]
        assert relative_error(-product, gates.log_decay) <= 1e-12
        values = mixer._scan_inputs(x, context, None).v
        assert relative_error(gates.gates["input"] * mixer.fc(x, gather_input=True)[0][:, :, None], values) <= 1e-12
    for mixer, _, context, gates in readings("mamba2"):
        rates = torch.exp(context.full_precision[0])[:, None]
        assert relative_error(-rates * gates.gates["time_step"], gates.log_decay) <= 1e-12, mixer

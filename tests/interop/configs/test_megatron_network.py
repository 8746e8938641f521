"""The network of Megatron-LM's flags: MLPs without a gate, biases and the width of heads."""

import pytest

from megalin.config import parse
from megalin.interop.configs.imported import ImportedConfig
from megalin.interop.configs.megatron import add_script, add_yaml
from megalin.train.config import RunConfig
from tests.interop.configs.test_megatron import SMALL

PLAIN = SMALL.replace("--swiglu", "")
BIASED = PLAIN.replace("--disable-bias-linear", "")


def imported_flags(flags):
    imported = ImportedConfig("flags")
    add_script(flags.replace("\n", " "), {}, imported)
    imported.check()
    return imported


@pytest.mark.parametrize(
    ("flags", "activation", "bias"),
    [
        (PLAIN, "gelu", False),
        (BIASED, "gelu_tanh", True),
        (BIASED + "--no-bias-gelu-fusion", "gelu", True),
        (PLAIN + "--openai-gelu", "gelu_tanh", False),
        (PLAIN + "--squared-relu", "squared_relu", False),
    ],
)
def test_mlp_without_a_gate_is_the_same_run(flags, activation, bias):
    imported = imported_flags(flags)
    assert imported.outcome() == (0, "a complete config"), imported.report()
    attention, mlp = parse(RunConfig, imported.values, "flags").model.layers[0].sublayers
    assert (mlp.type, mlp.intermediate_size, mlp.activation, mlp.bias) == ("ffn", 256, activation, bias)
    assert (attention.qkv_bias, attention.output_bias) == (bias, bias)


def test_attention_has_its_own_width_and_biases():
    imported = imported_flags(SMALL + "--kv-channels 32 --add-qkv-bias")
    attention = parse(RunConfig, imported.values, "flags").model.layers[0].sublayers[0]
    assert (attention.head_dim, attention.qkv_bias, attention.output_bias) == (32, True, False)


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ("--qk-layernorm --normalization RMSNorm", "qk_norm", True),
        ("--window-size 15,0", "window", 16),
        ("--window-size (15, 0)", "window", 16),
    ],
)
def test_variant_of_attention_is_read(flags, field, value):
    imported = imported_flags(SMALL + flags)
    assert imported.outcome()[0] == 0, imported.report()
    assert getattr(parse(RunConfig, imported.values, "flags").model.layers[0].sublayers[0], field) == value


@pytest.mark.parametrize("flag", ["--qk-layernorm", "--window-size 127,127", "--window-attn-skip-freq 2"])
def test_variant_that_softmax_does_not_have_is_lost(flag):
    imported = imported_flags(SMALL + flag)
    assert imported.outcome()[0] == 1
    assert flag in {note.key for note in imported.notes}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"activation_func": "swiglu"}, ("glu", 128, "silu")),
        ({"activation_func": "gelu", "bias_activation_fusion": False}, ("ffn", 256, "gelu")),
        ({"activation_func": "gelu", "bias_activation_fusion": True}, ("ffn", 256, "gelu_tanh")),
    ],
)
def test_activation_of_a_yaml(fields, expected):
    imported = ImportedConfig("run.yaml")
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "add_bias_linear": True}
    add_yaml({"language_model": sizes | fields}, imported)
    mixer = imported.get("model.layers")[0]["sublayers"][1]
    assert (mixer["type"], mixer["intermediate_size"], mixer["activation"]) == expected

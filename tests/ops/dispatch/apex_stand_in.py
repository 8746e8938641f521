"""Stand-in for NVIDIA's apex in plain PyTorch, with its names, signatures and behaviour: apex itself needs a GPU."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megalin.ops.dispatch import backend

_OPTIMIZERS = '''
import torch


class FusedAdam(torch.optim.Optimizer):
    """Adam that counts steps in the group, needs a parameter in each, and makes moments only for an empty state."""

    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True,
                 weight_decay=0.0, amsgrad=False, set_grad_none=True, capturable=False, use_master=False):
        defaults = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None, grads=None, output_params=None, scale=None, grad_norms=None, grad_scaler=None):
        for group in self.param_groups:
            device = group["params"][0].device
            group["step"] = group.get("step", 0) + 1
            (beta1, beta2), count = group["betas"], group["step"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                m, v = state["exp_avg"], state["exp_avg_sq"]
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                root = (v / (1 - beta2**count)).sqrt() + group["eps"]
                p.sub_(group["lr"] * (m / (1 - beta1**count) / root + group["weight_decay"] * p))
'''
_NORMS = """
import torch


def fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6, memory_efficient=False):
    assert input.dtype == weight.dtype
    return torch.nn.functional.rms_norm(input.float(), normalized_shape, weight.float(), eps).to(input.dtype)


def fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):
    assert input.dtype == weight.dtype == bias.dtype
    wide = (x.float() for x in (input, weight, bias))
    x, w, b = wide
    return torch.nn.functional.layer_norm(x, normalized_shape, w, b, eps).to(input.dtype)
"""


@contextmanager
def installing(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Callable[..., None]]:
    """Context manager whose function installs a package in `folder`, written by one of the writers below.

    No kernel but those of apex can run meanwhile.
    """

    def install(write: Callable[..., Path], **options: object) -> None:
        monkeypatch.syspath_prepend(str(write(folder, **options)))

    def clear_choices() -> None:
        backend.decide.cache_clear()
        backend._tested.clear()

    for name in _modules_of_apex():
        monkeypatch.delitem(sys.modules, name)  # the real apex, if imported
    monkeypatch.setattr(backend, "_used", {})
    monkeypatch.setattr(backend, "_missing", lambda name, device: "" if name == "apex" else "not here")
    clear_choices()
    yield install
    clear_choices()
    for name in _modules_of_apex():
        del sys.modules[name]


def _modules_of_apex() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "apex"]


def write_apex(folder: Path, *, replace: tuple[str, str] = ("", "")) -> Path:
    """Writes the stand-in, with one piece of its text replaced, into a new folder to be searched for modules."""
    for name, text in {
        "apex/__init__.py": "",
        "apex/optimizers/__init__.py": _OPTIMIZERS,
        "apex/normalization/__init__.py": "",
        "apex/normalization/fused_layer_norm.py": _NORMS,
        "amp_C.py": "",
        "fused_layer_norm_cuda.py": "",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace(*replace) if replace[0] else text)
    return folder


def write_another_project(folder: Path) -> Path:
    """Writes a package of the same name that is another project."""
    (folder / "apex").mkdir(parents=True)
    (folder / "apex" / "__init__.py").write_text("import pyramid_of_the_other_project\n")
    return folder

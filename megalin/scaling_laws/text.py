"""The result of `megalin fit` as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megalin.scaling_laws.bands import LEVEL, Band
from megalin.scaling_laws.comparison import Comparison
from megalin.scaling_laws.fit import Fit
from megalin.scaling_laws.optimum import is_near_sizes, optimum


def report_lines(fits: Mapping[str, Fit]) -> Iterator[str]:
    """Lines for each mixer, then the comparison of mixers if there are several."""
    for mixer, fit in fits.items():
        yield f"{mixer or 'all points'}: {len(fit.points.flops)} losses, {_range(fit)}"
        yield from ("  " + line for line in _fit_lines(fit))
        yield ""
    if len(fits) > 1:
        yield from Comparison.of(fits).lines()


def _range(fit: Fit) -> str:
    losses = fit.points.losses
    named = (("N", losses.parameters), ("D", losses.tokens), ("C", fit.points.flops))
    return ", ".join(f"{name} {values.min():.3g} to {values.max():.3g}" for name, values in named)


def _fit_lines(fit: Fit) -> Iterator[str]:
    surface, envelope, bands = fit.surface, fit.envelope, fit.bands
    yield "surface L(N, D) = E + A / N^alpha + B / D^beta, nats a token:"
    for name, value in surface._asdict().items():
        yield f"  {name:6}{value:>12.5g}  {band_text(bands[name])}"
    yield f"  N_opt ~ C^a, a = {fit.a:.4f}  {band_text(bands['a'])}"
    yield f"  D_opt ~ C^b, b = {fit.b:.4f}  {band_text(bands['b'])}"
    best = optimum(surface, fit.cost, float(fit.points.flops.max()))
    ratio = f"{best.tokens / best.parameters:.3g} tokens a parameter"
    if not is_near_sizes(best.parameters, fit.points):
        ratio = f"the best size, {best.parameters:.3g}, is far from the measured ones, so these losses do not give one"
    yield f"  at the most FLOPs, {fit.points.flops.max():.3g}: {ratio}"
    yield "envelope, the lowest loss at each C over all sizes:"
    laws = (("L(C)", envelope.loss), ("N_opt", envelope.parameters), ("D_opt", envelope.tokens))
    for (name, law), key in zip(laws, ("exponent", "a", "b"), strict=True):
        yield f"  {name:5} = {law.coefficient:.4g} C^{law.exponent:.4f}  {band_text(bands[f'envelope_{key}'])}"
    if fit.frontier.compared < 0.25:
        yield (
            f"  at {1 - fit.frontier.compared:.0%} of the FLOPs fewer than two sizes have losses: these N_opt and "
            "D_opt follow from the choice of the runs"
        )
    if fit.held_out is None:
        yield f"the largest size cannot be predicted from the others: {fit.held_out_problem}"
    else:
        found = fit.held_out
        yield (
            f"largest size from the others (N {found.parameters:.3g}, D {found.tokens:.3g}): predicted "
            f"{found.predicted:.4f} {band_text(found.band)}, measured {found.measured:.4f}, error {found.error:+.2%}"
        )
    yield f"bands: {LEVEL:.0%}, {fit.resamples.method}"


def band_text(band: Band) -> str:
    """[low, high]; an open end says so."""
    low, high = ("open" if end is None else f"{end:.5g}" for end in band)
    return f"[{low}, {high}]" + (": the losses do not bound it" if band.is_open else "")

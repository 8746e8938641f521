"""Fits of known surfaces: their parameters, bands, envelopes, optima, and the refusal of losses that do not suffice."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from megalin.errors import ConfigError, DataError
from megalin.scaling_laws.bands import Band, band, resample, surface_bands
from megalin.scaling_laws.comparison import Comparison
from megalin.scaling_laws.envelope import Frontier, fit_envelope, frontier
from megalin.scaling_laws.fit import fit_points
from megalin.scaling_laws.optimum import TokenCost, exponents, optimum, token_cost
from megalin.scaling_laws.points import Point, by_mixer
from megalin.scaling_laws.surface import Surface, fit_surface
from megalin.scaling_laws.text import report_lines
from tests.scaling_laws.designs import CHINCHILLA, MANY_RUNS, SMALL, WIDE, ladder, losses_of

FEW = 20
"""Resamples of the fast tests."""


@pytest.mark.parametrize("design", [WIDE, SMALL], ids=["wide", "small"])
def test_losses_without_noise_give_their_surface(design):
    found = fit_surface(losses_of(design, noise=0.0).losses)
    np.testing.assert_allclose(found, CHINCHILLA, rtol=1e-5)


def test_one_wrong_loss_moves_little():
    points = losses_of(WIDE, noise=0.0)
    points.losses.loss[17] *= 1.1
    np.testing.assert_allclose(fit_surface(points.losses), CHINCHILLA, rtol=1e-2)  # squared errors: A by 20 %


def test_optimum_is_the_lowest_loss_of_a_search():
    cost = TokenCost(40.0, 0.9)
    for flops in (1e17, 1e21):
        sizes = np.geomspace(1e5, 1e12, 200_001)
        losses = CHINCHILLA.loss(sizes, flops / (40.0 * sizes**0.9))
        found = optimum(CHINCHILLA, cost, flops)
        assert found.parameters == pytest.approx(sizes[losses.argmin()], rel=1e-3)
        assert found.loss == pytest.approx(losses.min(), rel=1e-9)
        assert found.tokens * cost.flops(found.parameters) == pytest.approx(flops)
        further = optimum(CHINCHILLA, cost, 10 * flops)
        slopes = [math.log10(further[index] / found[index]) for index in (0, 1)]
        assert slopes == pytest.approx(exponents(CHINCHILLA, cost))


def test_surface_of_tokens_alone_has_no_best_size():
    found = optimum(CHINCHILLA._replace(A=0.0), TokenCost(6.0, 1.0), 1e20)
    assert math.isnan(found.parameters)
    assert found.loss == CHINCHILLA.E


def test_best_size_far_from_the_measured_ones_is_not_given():
    points = [
        *ladder(WIDE, mixer="flat", surface=CHINCHILLA._replace(A=0.01), noise=1e-5),
        *ladder(WIDE, mixer="usual", noise=1e-5),
    ]
    fits = {name: fit_points(own, FEW) for name, own in by_mixer(points).items()}
    far = [line for line in report_lines(fits) if "far from the measured ones" in line]
    assert len(far) == 4
    assert far[0].startswith("    at the most FLOPs")
    assert all(" flat " in line for line in far[1:])


def test_envelope_takes_the_lowest_loss_at_each_number_of_flops():
    """Without noise the envelope is the minimum over the sizes of exact power laws between a size's points."""
    points = losses_of(WIDE, noise=0.0)
    found = frontier(points)
    assert (np.diff(found.loss) < 0).all()
    sizes, (low, high) = np.unique(points.losses.parameters), (points.flops.min(), points.flops.max())
    assert (found.flops[0], found.flops[-1]) == pytest.approx((low, high))
    for flops in np.geomspace(low * 30, high / 30, 5):
        own = np.searchsorted(found.flops, flops)
        tokens = found.flops[own] / 6 / sizes
        within = (tokens >= 5 * sizes * 0.999) & (tokens <= 80 * sizes * 1.001)
        exact = CHINCHILLA.loss(sizes, tokens)[within]
        assert found.loss[own] == pytest.approx(exact.min(), rel=2e-3)
        assert found.parameters[own] in sizes[within]
    envelope = fit_envelope(found)
    assert envelope.parameters.exponent + envelope.tokens.exponent == pytest.approx(1.0, abs=2e-3)  # C = 6 N D
    flops = np.geomspace(1e15, 1e20, 9)
    exact = Frontier(flops, 5 * flops**-0.05, 2 * flops**0.6, 0.1 * flops**0.4, 1.0)
    np.testing.assert_allclose(fit_envelope(exact), [(5, -0.05), (2, 0.6), (0.1, 0.4)])


def test_sizes_without_common_flops_are_not_compared():
    assert frontier(losses_of(SMALL)).compared < 0.1
    assert frontier(losses_of(WIDE)).compared > 0.3


def test_losses_that_rise_have_no_envelope():
    points = by_mixer([Point(1e6 * n, 1e7 * n, 3.0 + n, 6e13 * n * n) for n in range(1, 8)])[""]
    with pytest.raises(DataError, match=r"no loss is below that of the fewest FLOPs.*check the columns"):
        fit_envelope(frontier(points))


@pytest.mark.parametrize(
    ("sizes", "ratios", "expected"),
    [
        ([1e6, 2e6, 3e6], [20], "3 losses of 3 sizes and 3 token counts.*needs at least 6 losses"),
        ([1e6, 2e6], [5, 10, 20, 40], "8 losses of 2 sizes.*3 sizes"),
        (np.geomspace(1e6, 1e9, 9), [20], "the tokens of all 9 losses follow from their sizes.*some size with other"),
    ],
)
def test_too_few_losses_are_refused(sizes, ratios, expected):
    with pytest.raises(ConfigError, match=expected):
        fit_points(losses_of((np.array(sizes), np.array(ratios))), FEW)


def test_fit_of_noisy_losses():
    fit = fit_points(losses_of(SMALL, seed=3), FEW)
    values = fit.as_json()
    assert set(values) == {*Surface._fields, "a", "b", "envelope", "bands", "leave_largest_out"}
    assert set(values["envelope"]) == {"coefficient", "exponent", "a", "b"}
    for name in (*Surface._fields, "a", "b"):
        low, high = values["bands"][name]
        assert low < values[name] < high, name
    assert values["a"] == pytest.approx(values["beta"] / (values["alpha"] + values["beta"]))
    largest = values["leave_largest_out"]
    assert largest["measured"] == fit.points.losses.loss[-1]
    assert abs(largest["error"]) < 0.03
    assert largest["error"] == pytest.approx(largest["predicted"] / largest["measured"] - 1)
    best, ends = fit.best(1e17)
    assert ends.low < best.loss < ends.high


def test_three_sizes_cannot_predict_the_largest():
    fit = fit_points(losses_of((SMALL[0][:3], SMALL[1])), FEW)
    assert fit.as_json()["leave_largest_out"] is None
    assert "6 losses of 2 sizes" in fit.held_out_problem


def test_branches_of_many_runs_share_an_error():
    """Deviations of 1 % between 9 runs and 0.01 % within come back in the resampled losses."""
    points = losses_of(MANY_RUNS, run_noise=0.01, noise=0.0001, seed=1)
    surface = fit_surface(points.losses)
    drawn = resample(points, surface, FEW)
    assert drawn.method == f"parametric bootstrap with normal errors of 9 runs and their losses, {FEW} resamples"
    errors = (drawn.log_losses - np.log(surface.loss(*points.losses[:2]))).reshape(FEW, 9, 3)
    assert 0.005 < errors.mean(axis=2).std() < 0.02
    assert errors.std(axis=2).mean() < 0.002
    alone = points._replace(groups=np.arange(27))
    assert "runs" not in resample(alone, surface, FEW).method


def test_band_without_an_end_is_open():
    values = np.linspace(1.0, 2.0, 100)
    assert band(values) == Band(pytest.approx(1.05, abs=0.01), pytest.approx(1.95, abs=0.01))
    assert band([*values[:80], *[math.inf] * 20]).high is None
    assert band(np.maximum(values - 1.2, 0.0), lowest=0.0).low is None
    stuck = [CHINCHILLA._replace(alpha=4.0, A=1e30)] * 10 + [CHINCHILLA._replace(E=1.7 + n / 100) for n in range(90)]
    bands = surface_bands(stuck)
    assert (bands["alpha"].high, bands["A"].high) == (None, None)
    assert not bands["beta"].is_open


def test_flops_of_a_token_follow_the_points():
    points = losses_of(WIDE, noise=0.0)
    assert token_cost(points) == (pytest.approx(6.0), pytest.approx(1.0))
    scaled = points._replace(flops=points.losses.tokens * 50 * points.losses.parameters**0.8)
    assert token_cost(scaled) == (pytest.approx(50.0), pytest.approx(0.8))


def test_mixers_are_compared_at_equal_flops_and_states():
    better = CHINCHILLA._replace(E=1.7)
    points = [
        *ladder(WIDE, mixer="a", noise=1e-5, state=1.0),
        *ladder(WIDE, mixer="b", surface=better, noise=1e-5, state=4.0),
        *ladder(WIDE, mixer="c"),
    ]
    fits = {name: fit_points(own, FEW) for name, own in by_mixer(points).items()}
    found = Comparison.of(fits)
    assert [row.mixer for row in found.at_flops] == ["a", "b", "c"] * 3
    for first, second in zip(found.at_flops[::3], found.at_flops[1::3], strict=True):
        assert first.loss - second.loss == pytest.approx(CHINCHILLA.E - 1.7, abs=1e-3)
    assert found.without_state == ["c"]
    for first, second in zip(found.at_state[::2], found.at_state[1::2], strict=True):
        assert first.state_bytes == second.state_bytes == pytest.approx(first.parameters)
        assert second.parameters == pytest.approx(first.parameters / 4)
        assert second.loss == pytest.approx(
            float(better.loss(second.parameters, found.state_flops / 6 / second.parameters)), rel=1e-3
        )
    text = "\n".join(found.lines())
    assert "without a state of known, fixed size: c" in text
    without = Comparison.of({name: fits[name] for name in "ac"})
    assert "fewer than two mixers" in "\n".join(without.lines())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("design", "options", "most"),
    [(WIDE, {}, 0.95), (SMALL, {}, 0.95), (MANY_RUNS, {"run_noise": 0.005, "noise": 0.002}, 1.0)],
    ids=["wide", "small", "many-runs"],
)
@pytest.mark.timeout(3000)
def test_bands_cover_the_parameters(design, options, most):
    """Coverage of 90 % bands over 300 surfaces is 85 to 95 % for each unknown, an exponent and a prediction, up to two
    standard errors of the simulation; of branches of 9 runs it may be more. Coverage and the bias of both estimators
    are printed (-s)."""
    number, resamples = 300, 60
    covered: dict[str, list[bool]] = {}
    found = []
    exact = fit_envelope(frontier(losses_of(design, noise=0.0)))
    beyond = float(design[0].max()) * 3
    for seed in range(number):
        points = losses_of(design, seed=seed, **options)
        surface = fit_surface(points.losses)
        drawn = resample(points, surface, resamples)
        cost = token_cost(points)
        truths = {**CHINCHILLA._asdict(), "a": exponents(CHINCHILLA, cost)[0]}
        bands = surface_bands(drawn.surfaces) | {"a": band([exponents(each, cost)[0] for each in drawn.surfaces])}
        truths["prediction"] = float(CHINCHILLA.loss(beyond, 20 * beyond))
        bands["prediction"] = band([float(each.loss(beyond, 20 * beyond)) for each in drawn.surfaces])
        for name, truth in truths.items():
            low, high = bands[name]
            covered.setdefault(name, []).append((low is None or low <= truth) and (high is None or truth <= high))
        envelope = fit_envelope(frontier(points))
        found.append([*surface, exponents(surface, cost)[0], envelope.loss.exponent, envelope.parameters.exponent])
    truth = [*CHINCHILLA, exponents(CHINCHILLA, TokenCost(6.0, 1.0))[0], exact.loss.exponent, exact.parameters.exponent]
    names = (*Surface._fields, "a", "envelope_exponent", "envelope_a")
    coverage = {name: float(np.mean(values)) for name, values in covered.items()}
    print(f"\ncoverage {coverage}")
    for name, mean, spread, true in zip(names, np.mean(found, 0), np.std(found, 0), truth, strict=True):
        print(f"{name:18} bias {mean - true:+.4g}, standard deviation {spread:.3g}, true {true:.4g}")
    print(f"envelope_a without noise differs from the surface's a by {truth[-1] - truth[5]:+.3f}")
    lowest, highest = (end + sign * 2 * math.sqrt(end * (1 - end) / number) for end, sign in ((0.85, -1), (most, 1)))
    assert all(lowest <= value <= highest for value in coverage.values()), coverage


def test_chinchilla_is_reproduced():
    """245 points of Epoch's parameters, within its intervals; the CPU time is printed (-s)."""
    rng = np.random.default_rng(0)
    sizes, tokens = np.exp(rng.uniform(np.log([[44e6], [1e9]]), np.log([[16e9], [1.5e12]]), (2, 245)))
    losses = CHINCHILLA.loss(sizes, tokens) * np.exp(0.005 * rng.standard_normal(245))
    points = by_mixer([Point(*map(float, row), 6 * row[0] * row[1]) for row in zip(sizes, tokens, losses, strict=True)])
    start = time.process_time()
    found = fit_surface(points[""].losses)
    print(f"\n{found} in {time.process_time() - start:.2f} CPU seconds")
    # Half-widths of Epoch's 95 % intervals, from its standard errors 0.03, 124.58, 1293.23, 0.02, 0.02.
    errors = np.array([0.03, 124.58, 1293.23, 0.02, 0.02])
    assert (np.abs(np.array(found) - CHINCHILLA) < 2 * errors).all()

"""The learning rate at the ends of each schedule, and schedules that are refused."""

import itertools
import math

import pytest

from megalin.config import parse
from megalin.errors import ConfigError
from megalin.optim.adamw import OptimizerConfig
from megalin.optim.schedule import ScheduleConfig, learning_rate

OPTIMIZER = OptimizerConfig(lr=2.0)


def _rates(total_steps: int, **fields) -> list[float]:
    schedule = ScheduleConfig(**fields)
    return [learning_rate(OPTIMIZER, schedule, step, total_steps) for step in range(total_steps)]


def test_warmup_starts_above_zero_and_ends_at_the_peak():
    assert _rates(8, type="constant", warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.0]


def test_no_warmup_starts_at_the_peak():
    assert _rates(3, type="constant") == [2.0, 2.0, 2.0]


def test_cosine_ends_exactly_at_the_minimum():
    rates = _rates(12, type="cosine", warmup_steps=2, min_lr_ratio=0.1)
    assert rates[1] == 2.0
    assert rates[6] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert rates[-1] == 0.2
    assert all(earlier > later for earlier, later in itertools.pairwise(rates[1:]))


def test_cosine_follows_its_equation():
    rates = _rates(10, type="cosine", min_lr_ratio=0.25)
    expected = [2.0 * (0.25 + 0.75 * (1 + math.cos(math.pi * done / 10)) / 2) for done in range(1, 11)]
    assert rates == pytest.approx(expected, rel=1e-12)


def test_wsd_is_stable_until_the_linear_decay():
    rates = _rates(10, type="wsd", warmup_steps=2, decay_steps=4, min_lr_ratio=0.2)
    assert rates[1:6] == [2.0] * 5
    assert rates[6:] == pytest.approx([1.6, 1.2, 0.8, 0.4])


def test_a_run_may_be_all_warmup():
    for fields in ({"type": "cosine"}, {"type": "constant"}):
        assert _rates(4, warmup_steps=4, **fields) == [0.5, 1.0, 1.5, 2.0]


def test_rate_does_not_depend_on_the_order_of_asking():
    schedule = ScheduleConfig(warmup_steps=3)
    forwards = [learning_rate(OPTIMIZER, schedule, step, 9) for step in range(9)]
    assert [learning_rate(OPTIMIZER, schedule, step, 9) for step in reversed(range(9))] == forwards[::-1]


def test_warmup_longer_than_the_run_is_refused():
    with pytest.raises(ConfigError, match=r"warmup_steps = 11 is more than the 10 steps of the run; shorten"):
        learning_rate(OPTIMIZER, ScheduleConfig(warmup_steps=11), 0, 10)


def test_warmup_and_decay_longer_than_the_run_are_refused():
    schedule = ScheduleConfig(type="wsd", warmup_steps=6, decay_steps=5)
    assert schedule.problems(11) == []
    with pytest.raises(ConfigError, match=r"warmup_steps = 6 plus decay_steps = 5 are more than the 10 steps"):
        learning_rate(OPTIMIZER, schedule, 0, 10)


@pytest.mark.parametrize("step", [-1, 10])
def test_step_outside_the_run_is_our_bug(step):
    with pytest.raises(AssertionError, match="outside a run of 10 steps"):
        learning_rate(OPTIMIZER, ScheduleConfig(), step, 10)


def test_fields_that_contradict_the_type_are_reported_together():
    with pytest.raises(ConfigError, match=r"(?s)2 problem.*decay_steps = 3 is read by.*min_lr_ratio = 0.5 is not read"):
        parse(ScheduleConfig, {"type": "constant", "decay_steps": 3, "min_lr_ratio": 0.5}, "run.toml")


def test_wsd_needs_its_decay():
    with pytest.raises(ConfigError, match='decay_steps is missing, but type = "wsd"'):
        parse(ScheduleConfig, {"type": "wsd"}, "run.toml")


@pytest.mark.parametrize(
    ("field", "value"), [("warmup_steps", -1), ("decay_steps", 0), ("min_lr_ratio", 1.5), ("type", "linear")]
)
def test_values_out_of_bounds_name_the_field(field, value):
    with pytest.raises(ConfigError, match=f"{field} = "):
        parse(ScheduleConfig, {field: value}, "run.toml")

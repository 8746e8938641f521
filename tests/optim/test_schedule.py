"""The learning rate at the ends of each schedule, and schedules that are refused."""

import itertools
import math
import re

import pytest

from megalin.config import apply_overrides, parse
from megalin.errors import ConfigError
from megalin.optim.config import OptimizerConfig, ScheduleConfig
from megalin.optim.schedule import learning_rate

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


def test_linear_falls_from_the_end_of_the_warmup_to_the_minimum():
    rates = _rates(10, type="linear", warmup_steps=2, min_lr_ratio=0.2)
    assert rates == pytest.approx([1.0, 2.0, 1.8, 1.6, 1.4, 1.2, 1.0, 0.8, 0.6, 0.4], rel=1e-12)
    assert (rates[1], rates[-1]) == (2.0, 2.0 * 0.2)


def _fairseq_rate(updates: int, *, peak: float, start: float, warmup: int) -> float:
    """fairseq's inverse_sqrt after `updates` updates, with --lr, --warmup-init-lr and --warmup-updates."""
    if updates < warmup:
        return start + updates * (peak - start) / warmup
    return peak * warmup**0.5 * updates**-0.5


def test_inverse_sqrt_is_that_of_fairseq():
    """HGRN2's script: lr 5e-4, 4,000 steps of warmup from 1e-7, 50,000 steps."""
    optimizer = OptimizerConfig(lr=5e-4)
    schedule = ScheduleConfig(type="inverse_sqrt", warmup_steps=4000, warmup_start_ratio=1e-7 / 5e-4)
    for done in (1, 2, 1999, 3999, 4000, 4001, 16000, 50000):
        rate = learning_rate(optimizer, schedule, done - 1, 50000)
        assert rate == pytest.approx(_fairseq_rate(done, peak=5e-4, start=1e-7, warmup=4000), rel=1e-12)
    assert learning_rate(optimizer, schedule, 3999, 50000) == 5e-4
    assert learning_rate(optimizer, schedule, 15999, 50000) == 2.5e-4


def test_inverse_sqrt_stays_at_its_minimum():
    rates = _rates(40, type="inverse_sqrt", warmup_steps=2, min_lr_ratio=0.5)
    assert rates[6] == pytest.approx(2.0 * math.sqrt(2 / 7))
    assert rates[7:] == [1.0] * 33


@pytest.mark.parametrize("fields", [{"type": "cosine"}, {"type": "wsd", "decay_steps": 4}, {"type": "constant"}])
def test_warmup_starts_from_a_ratio_of_the_peak(fields):
    rates = _rates(9, warmup_steps=4, warmup_start_ratio=0.2, **fields)
    assert rates[:4] == pytest.approx([0.8, 1.2, 1.6, 2.0], rel=1e-12)
    assert rates[3] == 2.0


def test_wsd_is_stable_until_the_linear_decay():
    rates = _rates(10, type="wsd", warmup_steps=2, decay_steps=4, min_lr_ratio=0.2)
    assert rates[1:6] == [2.0] * 5
    assert rates[6:] == pytest.approx([1.6, 1.2, 0.8, 0.4])


def test_a_run_may_be_all_warmup():
    for fields in ({"type": "cosine"}, {"type": "constant"}, {"type": "linear"}, {"type": "inverse_sqrt"}):
        assert _rates(4, warmup_steps=4, **fields) == [0.5, 1.0, 1.5, 2.0]


def test_rate_does_not_depend_on_the_order_of_asking():
    schedule = ScheduleConfig(warmup_steps=3)
    forwards = [learning_rate(OPTIMIZER, schedule, step, 9) for step in range(9)]
    assert [learning_rate(OPTIMIZER, schedule, step, 9) for step in reversed(range(9))] == forwards[::-1]


def test_warmup_longer_than_the_run_is_refused():
    message = "warmup_steps = 11 is more than the 10 steps of the run; use schedule.warmup_steps=10, or train.steps=11"
    with pytest.raises(ConfigError, match=f"^{message}$"):
        learning_rate(OPTIMIZER, ScheduleConfig(warmup_steps=11), 0, 10)


def test_warmup_and_decay_longer_than_the_run_are_refused():
    schedule = ScheduleConfig(type="wsd", warmup_steps=6, decay_steps=5)
    assert schedule.problems(11) == []
    with pytest.raises(ConfigError, match=r"warmup_steps = 6 plus decay_steps = 5 are more than the 10 steps"):
        learning_rate(OPTIMIZER, schedule, 0, 10)


@pytest.mark.parametrize("fields", [{"type": "wsd", "decay_steps": 900}, {"type": "inverse_sqrt"}, {"type": "linear"}])
@pytest.mark.parametrize(("warmup_steps", "total_steps"), [(1, 2), (20, 3), (2000, 100), (600, 1)])
def test_overrides_of_the_message_make_the_schedule_fit(fields, warmup_steps, total_steps):
    values = {"schedule": {"warmup_steps": warmup_steps, **fields}, "train": {"steps": total_steps}}
    schedule = parse(ScheduleConfig, values["schedule"], "run.toml")
    *shorter, longer = re.findall(r"[\w.]+=\d+", " ".join(schedule.problems(total_steps))) or [""]
    for overrides in (shorter, [longer]) if longer else ():
        fitting = apply_overrides(values, overrides)
        schedule = parse(ScheduleConfig, fitting["schedule"], "run.toml")
        assert schedule.problems(fitting["train"]["steps"]) == []
    assert bool(longer) == (warmup_steps + fields.get("decay_steps", 0) > total_steps)


@pytest.mark.parametrize("step", [-1, 10])
def test_step_outside_the_run_is_our_bug(step):
    with pytest.raises(AssertionError, match="outside a run of 10 steps"):
        learning_rate(OPTIMIZER, ScheduleConfig(), step, 10)


def test_fields_that_contradict_the_type_are_reported_together():
    with pytest.raises(ConfigError, match=r"(?s)2 problem.*decay_steps = 3 is read by.*min_lr_ratio = 0.5 is not read"):
        parse(ScheduleConfig, {"type": "constant", "decay_steps": 3, "min_lr_ratio": 0.5}, "run.toml")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"type": "inverse_sqrt"}, 'warmup_steps = 0, but type = "inverse_sqrt" decays from the end of its warmup'),
        ({"warmup_start_ratio": 0.1}, "warmup_start_ratio = 0.1 is not read without a warmup; set warmup_steps"),
        ({"type": "linear", "decay_steps": 3}, 'decay_steps = 3 is read by type = "wsd" only, not by "linear"'),
        ({"warmup_start_ratio": 1.5, "warmup_steps": 1}, "warmup_start_ratio = 1.5"),
    ],
)
def test_keys_that_a_type_does_not_read_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        parse(ScheduleConfig, values, "run.toml")


def test_wsd_needs_its_decay():
    with pytest.raises(ConfigError, match='decay_steps is missing, but type = "wsd"'):
        parse(ScheduleConfig, {"type": "wsd"}, "run.toml")


@pytest.mark.parametrize(
    ("field", "value"), [("warmup_steps", -1), ("decay_steps", 0), ("min_lr_ratio", 1.5), ("type", "polynomial")]
)
def test_values_out_of_bounds_name_the_field(field, value):
    with pytest.raises(ConfigError, match=f"{field} = "):
        parse(ScheduleConfig, {field: value}, "run.toml")

import pytest

from trainer.config import OptimConfig, Schedule
from trainer.optim import learning_rate


@pytest.mark.parametrize("schedule", list(Schedule))
def test_warm_up_rises_to_the_peak_and_schedules_end_where_they_say(schedule):
    end = 0.0 if schedule is Schedule.constant else 0.2
    config = OptimConfig(lr=1.0, schedule=schedule, warmup_ratio=0.1, min_lr_ratio=end)
    rates = [learning_rate(step, 100, config) for step in range(101)]
    assert rates[:10] == sorted(rates[:10]) and 0 < rates[0] < rates[9] < 1
    assert rates[10] == 1.0
    assert rates[100] == pytest.approx(1.0 if schedule is Schedule.constant else 0.2)


def test_half_way_values():
    """Half-way between peak and end, cosine and linear meet at the mean."""
    for schedule in (Schedule.linear, Schedule.cosine):
        config = OptimConfig(lr=2.0, schedule=schedule, warmup_ratio=0.0, min_lr_ratio=0.0)
        assert learning_rate(50, 100, config) == pytest.approx(1.0)


def test_a_run_of_one_step_trains():
    assert learning_rate(0, 1, OptimConfig(lr=1.0, warmup_ratio=0.5)) > 0

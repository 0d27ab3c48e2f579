"""Fitted times of steps stay usable when measurements contradict each other."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from decoding.controllers.step_times import StepTimeModel

TIMES = st.dictionaries(st.integers(0, 5), st.sampled_from([0.004, 0.008, 0.02, 3.6, 10.0]), min_size=1)


@given(TIMES)
@example({0: 10.0, 1: 3.6, 3: 0.008, 5: 0.02})
def test_every_step_keeps_a_positive_time_if_the_machine_paused(times: dict[int, float]) -> None:
    """A process that was stopped in its first steps once ended with a division by zero: the fit left nothing for a step
    without drafts."""
    costs = StepTimeModel()
    for levels, seconds in times.items():
        for _ in range(2):  # the first of a shape is left out
            costs.add(1, levels, seconds)
    costs.refresh()
    for levels, seconds in times.items():
        assert abs(costs.seconds(1, levels) / seconds - 1.0) < 1e-6, "what was measured is what is expected"
    assert all(costs.seconds(rows, levels) > 0.0 for rows in (1, 4) for levels in range(6))

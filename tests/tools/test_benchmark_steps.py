"""Step timing and communication profile of the training benchmark."""

from typing import NamedTuple

import pytest

pytestmark = pytest.mark.usefixtures("benchmark_tools")


@pytest.mark.parametrize("known", [False, True])
def test_the_clock_leaves_out_the_first_steps_and_takes_the_median(monkeypatch, known):
    from train_benchmarks import clock

    now, order = [0.0], []
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])

    def work(index, by):
        order.append(f"{by} {index}")
        if by == ("start" if known else "wait"):
            now[0] += [50.0, 9.0, 3.0, 1.0, 2.0][index]
        return float(index)

    def start(index):
        work(index, "start")
        return clock.StartedStep(known, lambda: work(index, "wait"))

    timing = clock.time_steps(start, warmup=2, steps=3, started=-7.0)
    assert timing == (2.0, [3.0, 1.0, 2.0], 57.0, [0.0, 1.0, 2.0, 3.0, 4.0])
    late = ["start 0", "wait 0", "start 1", "start 2", "wait 1", "start 3", "wait 2", "start 4", "wait 3", "wait 4"]
    assert order == ([f"{call} {index}" for index in range(5) for call in ("start", "wait")] if known else late)


def test_a_step_on_a_device_is_timed_by_the_device_clock(monkeypatch):
    from train_benchmarks import clock

    class End(NamedTuple):
        milliseconds: float
        waited: list[float]

        def synchronize(self):
            self.waited.append(self.milliseconds)

        def elapsed_time(self, other):
            assert other.milliseconds in other.waited
            return other.milliseconds - self.milliseconds

    ends, waited = [50_000.0, 59_000.0, 62_000.0, 63_000.0, 65_000.0], []
    monkeypatch.setattr(clock.time, "perf_counter", lambda: 99.0)

    timing = clock.time_steps(
        lambda index: clock.StartedStep(False, lambda: float(index), End(ends[index], waited)),
        warmup=2,
        steps=3,
        started=9.0,
    )
    assert timing == (2.0, [3.0, 1.0, 2.0], 90.0, [0.0, 1.0, 2.0, 3.0, 4.0])


def test_communication_is_exposed_while_no_other_kernel_runs():
    from train_benchmarks.communication import from_events

    def event(name, start, end, cat="kernel"):
        return {"name": name, "ts": start, "dur": end - start, "cat": cat}

    events = [
        event("gemm", 0, 1000),
        event("ncclDevKernel_AllReduce_Sum(args)", 500, 2000),
        event("norm", 1500, 1800),
        event("ncclDevKernel_AllGather(args)", 1900, 2300),
        event("Memcpy DtoD", 2200, 2250, "gpu_memcpy"),
        event("Memcpy PtoP (Device -> Device)", 2300, 2400, "gpu_memcpy"),
        event("ncclDevKernel_AllReduce_Sum(args)", 2900, 3000),
        event("aten::mm", 0, 9000, "cpu_op"),
    ]
    found = from_events(reversed(events))
    assert found.span == pytest.approx(3.0)
    assert found.total == pytest.approx(1.9 + 0.1)
    assert found.exposed == pytest.approx(1.9 - 0.5 - 0.3 - 0.05 + 0.1)
    assert found.idle == pytest.approx(0.5)
    assert found.by_kernel["Memcpy PtoP"] == pytest.approx((1, 0.1, 0.1))
    assert found.by_kernel["ncclDevKernel_AllReduce_Sum"] == pytest.approx((2, 1.6, 0.8))
    assert from_events([]).span == 0.0


def test_the_communication_of_a_step_is_what_its_host_launched():
    from train_benchmarks.communication import of_step

    def event(name, cat, start, correlation=None, dur=10):
        return {"name": name, "cat": cat, "ts": start, "dur": dur, "args": {"correlation": correlation}}

    windows = [event(f"benchmark step {index}", "user_annotation", 100 * index, dur=50) for index in range(3)]
    shadows = [{**window, "cat": "gpu_user_annotation", "ts": window["ts"] + 70} for window in windows]
    launches = [event("cudaLaunchKernel", "cuda_runtime", start, start) for start in (20, 120, 149, 160, 220)]
    kernels = [event(f"kernel {start}", "kernel", start + 200, start) for start in (20, 120, 149, 160, 220)]
    events = [{"ph": "M", "name": "process_name"}, *windows, *shadows, *launches, *kernels]
    assert [found["name"] for found in of_step(events, 1)] == ["kernel 120", "kernel 149"]

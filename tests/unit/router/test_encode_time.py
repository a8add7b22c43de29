"""Times of images: what a stall counts, and whom the times of encode workers teach."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.router.estimates import STALL_FACTOR, ImageTimes, image_ms
from headwater.router.load import Loads
from headwater.schemas.events import LoadReported, Role, WorkerChanged, WorkerJoined

TOKENS = 1_225


def taught(*times_ms: float) -> ImageTimes:
    """After images of one size took so long."""
    times = ImageTimes()
    for ms in times_ms:
        times.observe(TOKENS, ms)
    return times


def test_a_stall_counts_as_four_times_the_mean() -> None:
    """Ten seconds after eight images of 10 ms: 13.75 ms are expected, not 1,259."""
    assert image_ms(taught(*[10.0] * 8, 10_000.0), TOKENS) == pytest.approx(10.0 + 30.0 / 8)


def test_a_lasting_change_is_known_by_ten_samples() -> None:
    """Ten times slower, and ten times faster, from one image to the next: after ten, or sixteen, most of it."""
    assert image_ms(taught(*[10.0] * 8, *[100.0] * 10), TOKENS) > 70
    assert image_ms(taught(*[100.0] * 8, *[10.0] * 16), TOKENS) < 25


@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=40))
def test_the_mean_stays_within_the_samples(times_ms: list[float]) -> None:
    """And one more sample never multiplies it by more than `STALL_FACTOR`."""
    before = image_ms(taught(*times_ms[:-1]), TOKENS)
    after = image_ms(taught(*times_ms), TOKENS)
    assert min(times_ms) * 0.999 <= after <= max(times_ms) * 1.001
    assert not before or after <= before * STALL_FACTOR * 1.001


def fleet(*roles: Role) -> Loads:
    """Workers w0, w1, … of one engine."""
    loads = Loads()
    for number, role in enumerate(roles):
        loads.join(WorkerJoined(f"w{number}", 1, "m", "vllm", role, 16, 1_000, 8))
    return loads


def computed(loads: Loads, worker: str, ms_per_token: float) -> None:
    """It reports twenty prompts, or images, of several sizes."""
    sizes = [100 << number % 4 for number in range(20)]
    prefills = tuple((tokens, round(tokens * ms_per_token * 1000)) for tokens in sizes)
    loads.report(worker, 1, LoadReported(0, 0, 0, 1_000, (), (), (), prefills=prefills))


def test_images_do_not_teach_what_prompts_take() -> None:
    """Encode workers that need ten times as long for a token, with the same engine; nor do they slow down a worker that joins."""
    alone, mixed = fleet("both"), fleet("both", "encode", "encode")
    for loads in (alone, mixed):
        computed(loads, "w0", 0.1)
        computed(loads, "w0", 0.1)
    for worker in ("w1", "w2"):
        computed(mixed, worker, 1.0)
        computed(mixed, worker, 1.0)
    assert mixed.steps["vllm"] == alone.steps["vllm"]
    assert mixed.workers["w0"].pace == alone.workers["w0"].pace
    encoders = mixed.steps[mixed.workers["w1"].step_kind]
    assert encoders.predict(400) == pytest.approx(400, rel=0.01)
    mixed.columns.refresh()
    [prompts, images, _] = mixed.columns.table["model"].tolist()
    assert prompts != images
    mixed.change(WorkerChanged("w0", 1, "ready", "encode"))
    mixed.columns.refresh()
    assert mixed.columns.table["model"].tolist() == [images, images, images]
    mixed.change(WorkerChanged("w0", 1, "ready", "both"))
    mixed.columns.refresh()
    assert mixed.columns.table["model"].tolist() == [prompts, images, images]
    computed(mixed, "w0", 0.2)
    mixed.join(WorkerJoined("w3", 1, "m", "vllm", "encode", 16, 1_000, 8))
    assert mixed.workers["w3"].pace == pytest.approx(1.0)

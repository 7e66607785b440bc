"""The trace of a version begins with the optimizer's steps, and what detection does around them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from training import Small, backward  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.errors import UsageError  # noqa: E402
from weightcast.store.memory import MemoryStore  # noqa: E402

PHASES = ["step", "detect", "resolve", "encode", "upload", "commit"]


@pytest.mark.parametrize("detect", ["transient", "device"])
def test_steps_since_the_last_version_are_its_first_phase(detect: wc.Detect) -> None:
    model, events = Small(24, 41), list[wc.Event]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with wc.Publisher(MemoryStore(), model, optimizer=optimizer, detect=detect, on_event=events.append) as publisher:
        for count in (1, 3):
            for i in range(count):
                backward(model, 10 * count + i)
                optimizer.step()
            publisher.publish().result(60)
        publisher.publish().result(60)  # no step, and no version
    assert [(event.version, event.phase) for event in events] == [(v, phase) for v in (1, 2) for phase in PHASES]
    steps = [event for event in events if event.phase == "step"]
    for step, detected in zip(steps, (event for event in events if event.phase == "detect"), strict=True):
        assert 0 < step.seconds <= detected.began - step.began + 1e-3


def test_hooks_around_steps_are_outside_of_the_detectors_and_end_with_the_publisher() -> None:
    model = Small(24, 41)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    hooks = len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)
    with wc.Publisher(MemoryStore(), model, optimizer=optimizer, on_event=lambda event: None):
        assert len(optimizer._optimizer_step_pre_hooks) == hooks[0] + 2
        assert len(optimizer._optimizer_step_post_hooks) == hooks[1] + 2
    assert (len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)) == hooks
    with pytest.raises(UsageError):
        wc.Publisher(MemoryStore(), torch.nn.Linear(2, 2), optimizer=optimizer, on_event=lambda event: None)
    assert (len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)) == hooks

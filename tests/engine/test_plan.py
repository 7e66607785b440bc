"""How an engine is brought to a version, as a table: what it reports, what the mirror holds, what is done."""

from __future__ import annotations

import pytest

from weightcast.channel.keys import Position
from weightcast.engine.messages import Fit
from weightcast.engine.plan import Plan, plan_patch, plan_update
from weightcast.engine.state import EngineState
from weightcast.format.digest import Fingerprint
from weightcast.format.spec import TensorSpec, TensorTable

NAMES = ("embed", "layers.1.a", "layers.1.b", "layers.10.a", "norm")
ALL = frozenset(NAMES)
TABLE = TensorTable.of([TensorSpec(name, "BF16", (4,)) for name in NAMES])
HERE, THERE = Position(3, "a" * 64), Position(4, "b" * 64)
OLD = Fingerprint(TABLE, (1, 2, 3, 4, 5))
FIRST_LAYER = ("layers.1.a", "layers.1.b")


def state(
    position: Position | None = HERE,
    trusted: frozenset[str] = ALL,
    absent: frozenset[str] = frozenset(),
    changing: bool = False,
) -> EngineState:
    fit = Fit(absent=absent, trusted=trusted)
    return EngineState(("w0",), position, changing, 1, "t", True, (0,), fit)


def changes(*names: str) -> Fingerprint:
    return Fingerprint(TABLE, tuple(OLD[name] + (name in names) for name in NAMES))


@pytest.mark.parametrize(
    ("engine", "start", "touched", "plan"),
    [
        pytest.param(state(), HERE, NAMES, Plan((), frozenset()), id="at the start: patched"),
        pytest.param(state(THERE), HERE, NAMES, None, id="at another version"),
        pytest.param(state(Position(3, "c" * 64)), HERE, NAMES, None, id="at the same number with other bits"),
        pytest.param(state(None), HERE, NAMES, None, id="at no known version"),
        pytest.param(state(None), None, NAMES, None, id="at no known version, and the mirror was empty"),
        pytest.param(state(changing=True), HERE, NAMES, None, id="an update broke off"),
        pytest.param(
            state(trusted=ALL - {"layers.1.a"}),
            HERE,
            ("layers.1.a",),
            Plan(FIRST_LAYER, frozenset({"layers.1.a"})),
            id="untrusted tensor changes: its whole layer is reloaded",
        ),
        pytest.param(
            state(trusted=ALL - {"layers.1.a"}),
            HERE,
            ("layers.1.b", "norm"),
            Plan((), frozenset()),
            id="untrusted tensor does not change: not reloaded",
        ),
        pytest.param(
            state(trusted=ALL - {"norm"}, absent=frozenset({"norm"})),
            HERE,
            ("norm",),
            Plan((), frozenset()),
            id="absent tensor changes: nothing to do",
        ),
        pytest.param(
            state(trusted=ALL - {"norm"}),
            HERE,
            ("norm",),
            Plan(("embed", "norm"), frozenset({"norm"})),
            id="tensors outside of layers are one layer",
        ),
    ],
)
def test_plan_of_fetched_patches_fits_the_state_of_the_engine(
    engine: EngineState, start: Position | None, touched: tuple[str, ...], plan: Plan | None
) -> None:
    assert plan_patch(engine, start, OLD, changes(*touched)) == plan


@pytest.mark.parametrize(
    ("engine", "plan"),
    [
        pytest.param(state(THERE), None, id="at the target: nothing"),
        pytest.param(state(THERE, changing=True), Plan((), frozenset(), NAMES), id="at the target, but mixed"),
        pytest.param(state(Position(4, "c" * 64)), Plan((), frozenset(), NAMES), id="same number, other bits"),
        pytest.param(state(HERE), Plan((), frozenset(), NAMES), id="at another version: compared"),
        pytest.param(state(None), Plan((), frozenset(), NAMES), id="at no known version: compared"),
        pytest.param(state(None, frozenset()), Plan(NAMES, ALL), id="no layout is trusted: reloaded"),
        pytest.param(
            state(None, ALL - {"layers.1.b"}),
            Plan(FIRST_LAYER, frozenset({"layers.1.b"}), ("embed", "layers.10.a", "norm")),
            id="one is not trusted: its layer is reloaded, the rest compared",
        ),
        pytest.param(
            state(None, frozenset(FIRST_LAYER), ALL - frozenset(FIRST_LAYER)),
            Plan((), frozenset(), FIRST_LAYER),
            id="absent tensors are neither compared nor reloaded",
        ),
    ],
)
def test_engine_without_patches_to_the_target_is_compared_or_reloaded(engine: EngineState, plan: Plan | None) -> None:
    assert plan_update(engine, TABLE, THERE) == plan

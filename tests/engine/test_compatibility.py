"""Which releases of vLLM the backend works with."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from weightcast.engine.vllm.compatibility import refuse_other_vllm
from weightcast.errors import UsageError


def test_other_releases_of_vllm_are_refused_by_name() -> None:
    for version in ("0.31.0", "0.32.0", "0.32.1"):
        refuse_other_vllm(version)
    for version in ("0.30.2", "0.33.0", "1.0"):
        with pytest.raises(UsageError, match=rf"{version}.*Install vLLM 0\.31\.x, 0\.32\.x"):
            refuse_other_vllm(version)

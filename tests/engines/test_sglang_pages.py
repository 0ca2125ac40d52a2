"""Pages of real SGLang 0.5.23 servers with two ranks, as they were answered; /server_info is cut to what is read."""

import json
from pathlib import Path

import pytest

from pdrouter.core.fleet import Role
from pdrouter.engines.base import Described
from pdrouter.engines.sglang import Sglang
from pdrouter.engines.sglang_ranks import RankFields

PAGES = Path(__file__).parent / "sglang_pages"


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize(("kind", "dp_attention"), [("plain", False), ("dp_attention", True)])
def test_both_kinds_of_dp(kind: str, dp_attention: bool, role: Role) -> None:
    """Both ranks are seen, each with its load; a decode server tells a bootstrap port as well."""
    pages = json.loads((PAGES / f"{kind}_{role.value}.json").read_text())
    engine = Sglang(RankFields.AUTO)
    assert engine.describe("/server_info", json.dumps(pages["server_info"]).encode()) == Described(
        role, "m", 2, bootstrap_port=8998, version="0.5.23", kv_capacity_tokens=16384, dp_attention=dp_attention
    )
    loads = engine.read_load(json.dumps(pages["loads"]).encode())
    assert loads is not None
    assert [(report.rank, report.tokens, report.requests) for report in loads.ranks] == [(0, 0, 0), (1, 0, 0)]

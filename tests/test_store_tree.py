"""Trees from the store equal those of the loaded trajectories, and read only what they must."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select, update

from longstraw_agents.errors import ConfigError, CorruptionError, GroupError
from longstraw_agents.segmenter import PrefixTree, SegmenterConfig, segment
from longstraw_agents.storage import Store
from longstraw_agents.storage.rows import seal_of
from longstraw_agents.storage.schema import SpanTable
from longstraw_agents.store_tree import TreeConfig, stored_tree, trees
from longstraw_agents.types import StopReason, Task, Turn

SPANS = SpanTable.__table__


def write(store: Store, group: str, member: int, tokens: np.ndarray, borders: list[int]) -> str:
    """A trajectory of `tokens`, cut into turns at `borders`; the last third of each turn is the action."""
    trajectory = store.add_trajectory(group, member)
    ends = [*sorted({b for b in borders if 0 < b < len(tokens)}), len(tokens)] if len(tokens) else []
    start = 0
    for index, stop in enumerate(ends):
        border = max(start + 1, stop - (stop - start) // 3)
        turn = Turn(tokens[start:border], tokens[border:stop], np.zeros(stop - border, np.float32), 0)
        store.append_turn(trajectory, index, turn)
        start = stop
    store.finish_trajectory(trajectory, StopReason.ANSWERED, 1.0, {})
    return trajectory


def assert_same_tree(stored: PrefixTree, loaded: PrefixTree) -> None:
    assert stored.paths == loaded.paths and stored.repeated_targets == loaded.repeated_targets
    for a, b in zip(stored.nodes, loaded.nodes, strict=True):
        for name in ("index", "parent", "children", "start", "stop", "trajectories"):
            assert getattr(a, name) == getattr(b, name), name
        assert np.array_equal(np.asarray(a.tokens), b.tokens) and np.array_equal(a.loss_targets, b.loss_targets)
    for name in ("entry_trajectory", "entry_position", "entry_node", "entry_slot"):
        assert np.array_equal(getattr(stored, name), getattr(loaded, name)), name


@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_tree_is_the_segmenters(store: Store, data: st.DataObject) -> None:
    """Shared prefixes that end before, at and after marks and turn borders, with equal and with different borders."""
    group = store.add_group(store.create_run("tree", {}), Task("e", 1), 6)
    interesting = st.sampled_from([0, 1, 2, 3, 1000, 1023, 1024, 1025, 2047, 2048, 2500])
    base = np.arange(2600, dtype=np.int32) % 5
    names = []
    for member in range(data.draw(st.integers(1, 5))):
        keep, more = data.draw(interesting), data.draw(st.sampled_from([0, 1, 2, 700]))
        tail = np.full(more, data.draw(st.integers(0, 5)), np.int32)
        borders = data.draw(st.lists(interesting, max_size=3))
        names.append(write(store, group, member, np.concatenate([base[:keep], tail]), borders))
    config = SegmenterConfig(data.draw(st.sampled_from([1, 5, 1500])), data.draw(st.sampled_from([None, 1, 900])))
    assert_same_tree(stored_tree(store, names, config).tree, segment([store.load_trajectory(n) for n in names], config))


def test_only_the_place_of_divergence_is_read(store: Store) -> None:
    group = store.add_group(store.create_run("tree", {}), Task("e", 1), 4)
    tokens = np.random.default_rng(0).integers(0, 49152, 60_000).astype(np.int32)
    names = []
    for member in range(4):
        branch = tokens.copy()
        branch[50_000 + 2000 * member :] += 1 + member
        names.append(write(store, group, member, branch, list(range(777 + member, 60_000, 900 + member))))
    stored = stored_tree(store, names)
    assert stored.source.tokens_read <= 6 * 2 * 1024, "each pair at most one block on either side"
    assert_same_tree(stored.tree, segment([store.load_trajectory(n) for n in names]))
    before = stored.source.tokens_read
    np.asarray(stored.tree.nodes[0].tokens[10:20])
    assert stored.source.tokens_read == before + 10


def test_strategies_and_limits(store: Store) -> None:
    run = store.create_run("tree", {})
    random = np.random.default_rng(0)
    document, other = (random.integers(0, 49152, 3000).astype(np.int32) for _ in range(2))
    groups = []
    for seed, start in enumerate((document, other, document)):
        group = store.add_group(run, Task("e", seed), 2)
        for member in range(2):
            write(store, group, member, np.concatenate([start, random.integers(0, 49152, 50).astype(np.int32)]), [1500, 3020])
        groups.append(group)
    by_group = trees(store, groups)
    assert [tree.tree.targets for tree in by_group] == [2999 + 100] * 3
    forest = trees(store, groups, TreeConfig("forest"))
    assert [tree.tree.targets for tree in forest] == [2999 + 200, 2999 + 100]
    limited = trees(store, groups, TreeConfig("forest", max_targets=3150))
    assert [len(tree.tree.trajectories) for tree in limited] == [2, 2, 2]
    chains = trees(store, groups, TreeConfig("chain", SegmenterConfig(node_span=1000)))
    assert len(chains) == 6
    assert [(n.start, n.stop) for n in chains[0].tree.nodes] == [(1, 1500), (1500, 3020), (3020, 3050)]
    with pytest.raises(GroupError, match="3099 targets"):
        trees(store, groups, TreeConfig(max_targets=3000))
    with pytest.raises(ConfigError, match="node_span"):
        TreeConfig("chain")
    with pytest.raises(ConfigError, match="strategy"):
        TreeConfig("heap")


def test_a_damaged_chain_digest_is_noticed(store: Store) -> None:
    group = store.add_group(store.create_run("tree", {}), Task("e", 1), 2)
    tokens = np.arange(5000, dtype=np.int32)
    names = [write(store, group, member, tokens, [1000 + member]) for member in range(2)]
    with store.database.engine.begin() as connection:
        marked = select(SPANS).where(SPANS.c.branch_id == 1, SPANS.c.marks.is_not(None))
        for row in connection.execute(marked).mappings().all():
            wrong = {**row, "marks": bytes(len(row["marks"]))}
            this = update(SPANS).where(SPANS.c.branch_id == 1, SPANS.c.start == row["start"])
            connection.execute(this.values(marks=wrong["marks"], seal=seal_of(SPANS, wrong)))
    with pytest.raises(CorruptionError, match="not the same chain digest"):
        stored_tree(store, names)

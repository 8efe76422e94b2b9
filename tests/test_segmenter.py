"""The prefix tree equals the trajectories it was made of, whatever they share."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import make_trajectory as trajectory

from longstraw_agents.errors import ConfigError, TokenError
from longstraw_agents.segmenter import PrefixTree, SegmenterConfig, segment


def spans(tree: PrefixTree) -> list[tuple[int | None, int, int, tuple[int, ...]]]:
    return [(node.parent, node.start, node.stop, node.trajectories) for node in tree.nodes]


@st.composite
def trajectories(draw):
    """Few distinct ids, so that prefixes, duplicates and strict prefixes are frequent."""
    sources = []
    for _ in range(draw(st.integers(1, 7))):
        base = list(sources[draw(st.integers(0, len(sources) - 1))].tokens) if sources and draw(st.booleans()) else []
        kept = base[: draw(st.integers(0, len(base)))]
        tokens = kept + draw(st.lists(st.integers(0, 2), min_size=0 if kept else 1, max_size=8))
        mask = [False, *draw(st.lists(st.booleans(), min_size=len(tokens) - 1, max_size=len(tokens) - 1))]
        ends = sorted(draw(st.sets(st.integers(1, len(tokens)), max_size=4)) | {len(tokens)})
        sources.append(trajectory(tokens, mask, turn_ends=ends))
    return sources


configs = st.builds(SegmenterConfig, min_span=st.integers(1, 6), node_span=st.none() | st.integers(1, 6))


@settings(max_examples=100, deadline=None)
@given(trajectories(), configs)
def test_paths_are_the_trajectories(sources, config):
    tree = segment(sources, config)
    assert [node.index for node in tree.nodes] == list(range(len(tree.nodes)))
    for index, source in enumerate(sources):
        nodes = [tree.nodes[i] for i in tree.paths[index]]
        if len(source.tokens) < 2:
            assert nodes == []
            continue
        assert nodes[0].parent is None and nodes[0].start == 1
        assert nodes[-1].stop == len(source.tokens)
        for above, below in zip(nodes, nodes[1:], strict=False):
            assert below.parent == above.index and below.start == above.stop
        targets = np.concatenate([source.tokens[:1], *[node.tokens[1:] for node in nodes]])
        inputs = np.concatenate([*[node.tokens[:-1] for node in nodes], source.tokens[-1:]])
        assert np.array_equal(targets, source.tokens) and np.array_equal(inputs, source.tokens)
    for node in tree.nodes:
        assert node.start < node.stop and len(node.tokens) == node.stop - node.start + 1
        assert node.trajectories == tuple(i for i, path in enumerate(tree.paths) if node.index in path)
        assert node.children == tuple(other.index for other in tree.nodes if other.parent == node.index)
        assert node.trajectories and (node.parent is None or node.parent < node.index)


@settings(max_examples=100, deadline=None)
@given(trajectories(), configs)
def test_every_loss_position_is_served_once(sources, config):
    tree = segment(sources, config)
    wanted = [(i, p) for i, source in enumerate(sources) for p in np.flatnonzero(source.action_mask)]
    assert list(zip(tree.entry_trajectory, tree.entry_position, strict=True)) == wanted
    served = Counter()
    for index, position, node, slot in zip(
        tree.entry_trajectory, tree.entry_position, tree.entry_node, tree.entry_slot, strict=True
    ):
        where = tree.nodes[node]
        assert node in tree.paths[index]
        assert where.start + where.loss_targets[slot] == position
        assert where.tokens[1:][where.loss_targets[slot]] == sources[index].tokens[position]
        served[node, slot] += 1
    for node in tree.nodes:
        assert node.loss_targets.dtype == np.int32 and np.all(np.diff(node.loss_targets) > 0)
        assert all(served[node.index, slot] for slot in range(len(node.loss_targets)))


@settings(max_examples=100, deadline=None)
@given(trajectories(), configs)
def test_counts_against_sets_of_prefixes(sources, config):
    """The distinct targets are the distinct prefixes of two tokens or more; what runs beyond them is counted."""
    tree = segment(sources, config)
    distinct = {tuple(source.tokens[: p + 1]) for source in sources for p in range(1, len(source.tokens))}
    assert tree.targets == len(distinct) + tree.repeated_targets
    assert tree.unmerged_targets == sum(len(source.tokens) - 1 for source in sources)
    assert tree.targets <= tree.unmerged_targets
    if config.min_span == 1:
        assert tree.repeated_targets == 0


@settings(max_examples=100, deadline=None)
@given(trajectories(), st.integers(1, 6))
def test_no_shared_node_is_shorter_than_min_span(sources, min_span):
    tree = segment(sources, SegmenterConfig(min_span=min_span))
    for node in tree.nodes:
        assert not node.children or node.stop - node.start >= min_span


@settings(max_examples=100, deadline=None)
@given(trajectories(), st.integers(1, 6))
def test_chain_cuts_lie_at_turn_ends_and_only_split_nodes(sources, node_span):
    plain, cut = segment(sources), segment(sources, SegmenterConfig(node_span=node_span))
    assert cut.targets == plain.targets
    borders = {(i, plain.nodes[n].stop) for i, path in enumerate(plain.paths) for n in path}
    for index, path in enumerate(cut.paths):
        for node in (cut.nodes[n] for n in path):
            if (index, node.stop) not in borders:
                assert node.stop - node.start >= node_span
                assert any(node.stop in sources[i].turn_ends for i in node.trajectories)


@settings(max_examples=100, deadline=None)
@given(trajectories(), st.randoms())
def test_order_of_trajectories_only_renumbers(sources, random):
    order = list(range(len(sources)))
    random.shuffle(order)
    tree, other = segment(sources), segment([sources[i] for i in order])
    assert [(n.parent, n.start, n.stop, tuple(n.tokens)) for n in tree.nodes] == [
        (n.parent, n.start, n.stop, tuple(n.tokens)) for n in other.nodes
    ]


def test_siblings_part_at_their_first_difference():
    tree = segment([trajectory([9, 1, 2, 3, 4]), trajectory([9, 1, 2, 5])])
    assert spans(tree) == [(None, 1, 3, (0, 1)), (0, 3, 5, (0,)), (0, 3, 4, (1,))]
    assert tree.nodes[1].tokens.tolist() == [2, 3, 4], "the last shared token is an input of each child"


def test_strict_prefix_ends_inside_another():
    tree = segment([trajectory([9, 1, 2, 3, 4]), trajectory([9, 1, 2])])
    assert spans(tree) == [(None, 1, 3, (0, 1)), (0, 3, 5, (0,))]
    assert tree.paths == ((0, 1), (0,))


def test_shared_sampled_token_serves_each_trajectory_that_sampled_it():
    """The second trajectory was given token 2 by its environment; the first and third sampled it."""
    sources = [
        trajectory([9, 1, 2, 3], [0, 0, 1, 1]),
        trajectory([9, 1, 2, 4], [0, 0, 0, 1]),
        trajectory([9, 1, 2, 5], [0, 0, 1, 1]),
    ]
    tree = segment(sources)
    shared = tree.nodes[0]
    assert shared.loss_targets.tolist() == [1]
    assert tree.entry_trajectory[(tree.entry_node == 0) & (tree.entry_slot == 0)].tolist() == [0, 2]
    assert len(tree.entry_node) == 5


def test_duplicates_share_every_node():
    tree = segment([trajectory([9, 1, 2]), trajectory([9, 1, 2]), trajectory([9, 1])])
    assert spans(tree) == [(None, 1, 2, (0, 1, 2)), (0, 2, 3, (0, 1))]
    assert tree.paths == ((0, 1), (0, 1), (0,))
    assert len(tree.entry_node) == 5 and sum(len(node.loss_targets) for node in tree.nodes) == 2


def test_several_tops():
    tree = segment([trajectory([1, 2, 3]), trajectory([1, 4]), trajectory([5, 2]), trajectory([5])])
    assert spans(tree) == [(None, 1, 3, (0,)), (None, 1, 2, (1,)), (None, 1, 2, (2,))]
    assert tree.tops == (0, 1, 2) and tree.paths[3] == ()


def test_short_span_stays_in_its_children_and_is_counted():
    sources = [trajectory([9, 1, 2, 3, 4, 5]), trajectory([9, 1, 2, 6]), trajectory([9, 1, 2])]
    tree = segment(sources, SegmenterConfig(min_span=3))
    assert spans(tree) == [(None, 1, 3, (2,)), (None, 1, 6, (0,)), (None, 1, 4, (1,))]
    assert tree.repeated_targets == 4
    assert segment(sources, SegmenterConfig(min_span=2)).repeated_targets == 0


def test_chain_is_cut_where_a_node_is_long_enough():
    tree = segment([trajectory(range(20), turn_ends=(3, 6, 12, 15, 20))], SegmenterConfig(node_span=5))
    assert spans(tree) == [(None, 1, 6, (0,)), (0, 6, 12, (0,)), (1, 12, 20, (0,))]


def test_nothing_to_segment():
    tree = segment([])
    assert tree.nodes == () and tree.paths == () and len(tree.entry_node) == 0 and tree.targets == 0


def test_many_nested_prefixes_need_no_recursion():
    tokens = np.arange(1200)
    tree = segment([trajectory(tokens[:length]) for length in range(2, 1200)])
    assert len(tree.nodes) == 1198 and tree.targets == 1198


@pytest.mark.parametrize(
    "name, value", [("min_span", 0), ("min_span", 1.5), ("min_span", None), ("node_span", 0), ("node_span", True)]
)
def test_bad_settings_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        SegmenterConfig(**{name: value})


def test_tokens_that_are_no_vector_of_integers_are_refused():
    broken = trajectory([1, 2, 3], name="broken")
    object.__setattr__(broken, "tokens", np.ones(3))
    with pytest.raises(TokenError, match="broken"):
        segment([broken])

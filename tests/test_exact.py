"""Every architecture's gradient against conventional training, and the decisions that a recomputation must repeat.

The full matrix (architecture x training x chunking x type) is `python benchmarks/exactness.py --record`; here is a part of it
that takes a minute.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model

from benchmarks import exactness
from longstraw_agents.errors import ModelError
from longstraw_agents.segmenter import segment
from longstraw_agents.trainer import architectures, comparison, conventional, indexing, routing, sparse
from longstraw_agents.trainer.lifting import lifted
from longstraw_agents.trainer.loss import LossConfig
from longstraw_agents.trainer.replay import Engine, ReplayConfig, TreeReplay
from tests import models, traces, trees

ONE_CHUNK = 10**6
DELTA_CHUNK = 64  # of the delta rule, in transformers' code


def loss(logp_N: torch.Tensor) -> torch.Tensor:
    weights_N = torch.linspace(-1.0, 2.0, len(logp_N), dtype=logp_N.dtype)
    return (weights_N * logp_N).mean() + logp_N.mean().square()


def replayed(model: torch.nn.Module, config: ReplayConfig, data: list) -> tuple[TreeReplay, torch.Tensor, dict]:
    """Our log-probabilities and gradient."""
    model.zero_grad()
    replay = Engine(model, config).open(segment(data))
    logp_N = replay.score().logp.requires_grad_()
    (c_N,) = torch.autograd.grad(loss(logp_N), logp_N)
    replay.backward(c_N)
    return replay, logp_N.detach(), comparison.gradients(model)


def expected(model: torch.nn.Module, data: list) -> tuple[torch.Tensor, dict]:
    model.zero_grad()
    _, logp_N = conventional.backward(model, data, loss)
    return logp_N, comparison.gradients(model)


def test_the_tree_is_not_vacuous() -> None:
    tree = segment(trees.unequal_tree())
    root, longest = tree.nodes[0], max(node.stop for node in tree.nodes)
    spans = [node.stop - node.start for node in tree.nodes]
    for long in (root.stop - 1, spans[3], longest - root.stop):  # prefix, a branch, and all that follows the prefix
        assert long > models.WINDOW and long > DELTA_CHUNK and long % DELTA_CHUNK
    assert longest >= 4 * models.WINDOW  # the index picks at most a quarter of what the last tokens see
    assert max(len(path) for path in tree.paths) == 4 and len(root.children) == 3
    assert all(len(node.loss_targets) for node in tree.nodes if len(node.children) > 1 and node.stop - node.start > 2)
    leaves = [node.stop - node.start for node in tree.nodes if not node.children]
    assert leaves.count(1) == 2 and len(set(leaves)) == 5  # unequal; one token
    assert 2 in spans and 2 not in leaves  # an inner branch shorter than the convolution: its children's tail reaches past it
    tops = [node for node in tree.nodes if node.parent is None]
    assert len(tops) == 2 and tops[0].tokens[0] == tops[1].tokens[0]  # they share one token, which is no node
    assert tree.nodes[tree.paths[3][-1]].children  # one trajectory ends inside another


def test_the_zoo_is_not_vacuous() -> None:
    seen = set()
    for name in models.NAMES:
        config = models.CONFIGS[name]()[1]
        types = getattr(config, "layer_types", None) or []
        if "sliding_attention" in types or name == "mistral":
            assert config.sliding_window == models.WINDOW
            seen.add("window")
        if name in models.SPARSE:
            assert config.index_topk == models.WINDOW and config.index_n_heads >= 16
            seen.add("index")
        experts = getattr(config, "num_experts", None) or getattr(config, "n_routed_experts", None)
        if experts:
            assert experts >= 8 and config.num_experts_per_tok == 2
            seen.add("experts")
        if name in models.RECURRENT:
            assert config.linear_conv_kernel_dim > 2 and types.count("linear_attention") > 1 < types.count("full_attention")
            seen.add("recurrent")
        if config.tie_word_embeddings:
            seen.add("tied")
    assert seen == {"window", "index", "experts", "recurrent", "tied"}


def test_the_matrix_runs_every_kind_of_chunking() -> None:
    chunks, tree = exactness.CHUNKS, segment(trees.unequal_tree())
    spans = [node.stop - node.start for node in tree.nodes]
    assert chunks["one"] == 1 and chunks["short"] < models.WINDOW and chunks["sixty-four"] == DELTA_CHUNK
    assert chunks["whole"] > sum(spans) and all(max(spans) % chunks[kind] for kind in ("short", "odd", "sixty-four"))
    assert all(max(spans[2:]) > chunks[kind] for kind in ("one", "short", "odd", "sixty-four"))  # a branch longer than a chunk


@pytest.mark.parametrize(("training", "chunk"), [("full", 33), ("lora", ONE_CHUNK)])
@pytest.mark.parametrize("name", models.NAMES)
def test_gradient_equals_conventional_training(name: str, training: str, chunk: int) -> None:
    model, data = models.build(name, training=training, dtype=torch.float64), trees.unequal_tree()
    with lifted():
        logp_N, reference = expected(model, data)
        replay, ours_N, gradient = replayed(model, ReplayConfig(chunk=chunk), data)
    assert float((ours_N - logp_N).abs().max()) < 1e-11
    difference = comparison.compare(gradient, reference)
    assert difference.worst <= 1e-10, difference.worst_name
    assert replay.state.flips() == {"routing": 0, "selection": 0}


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5", "glm_moe_dsa"])
def test_chunks_of_one_token_and_a_prefix_of_one_token(name: str) -> None:
    draw = np.random.default_rng(3)
    tokens = draw.integers(0, models.VOCABULARY, (3, 29))
    tokens[:, 0] = tokens[0, 0]  # all share one token, which is no node; the last two share 27
    tokens[2, :27] = tokens[1, :27]
    lengths = (4, 29, 29)
    data = [trees.trajectory(str(i), row[:n], np.arange(1, n, 2)) for i, (row, n) in enumerate(zip(tokens, lengths, strict=True))]
    model = models.build(name, dtype=torch.float64)
    with lifted():
        logp_N, reference = expected(model, data)
        _, ours_N, gradient = replayed(model, ReplayConfig(chunk=1, pack=1), data)
    assert float((ours_N - logp_N).abs().max()) < 1e-11
    assert comparison.compare(gradient, reference).worst <= 1e-10


@pytest.mark.parametrize("name", ["qwen3_5_moe", "deepseek_v3", "glm_moe_dsa"])
def test_detached_differs_from_exact_and_not_by_chunks(name: str) -> None:
    model, data = models.build(name, training="lora", dtype=torch.float64), trees.unequal_tree()
    with lifted():
        _, reference = expected(model, data)
        results = [replayed(model, ReplayConfig("detached", chunk=chunk), data)[2] for chunk in (29, ONE_CHUNK)]
    assert comparison.compare(results[0], results[1]).worst < 1e-10
    assert comparison.compare(results[0], reference).global_relative > 0.05


# -- decisions -----------------------------------------------------------------------------------------------------------


def test_recorded_routing_is_used_and_flips_are_counted() -> None:
    model, data = models.build("qwen3_moe"), trees.unequal_tree()
    _, _, untouched = replayed(model, ReplayConfig(chunk=40), data)
    replay = Engine(model, ReplayConfig(chunk=40)).open(segment(data))
    logp_N = replay.score().logp.requires_grad_()
    (c_N,) = torch.autograd.grad(loss(logp_N), logp_N)
    record = replay.state.layers[3].routing  # the last layer: no other router sees the difference
    target = next(int(offset) - 40 for offset in replay.tree.nodes[0].loss_targets if offset >= 40)
    record.picks[40][target] = (record.picks[40][target] + 1) % 8  # on the root, which is captured once
    model.zero_grad()
    replay.backward(c_N)
    assert replay.state.flips() == {"routing": 1, "selection": 0}
    assert comparison.compare(comparison.gradients(model), untouched).global_relative > 1e-4


def test_recorded_routing_is_used_below_the_frontier_too() -> None:
    """Layers that train nothing run again under the ones that do: they must feed them what they fed them at capture."""
    model, data = models.build("qwen3_moe"), trees.unequal_tree()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.3" in name)
    _, _, untouched = replayed(model, ReplayConfig(chunk=40), data)
    replay = Engine(model, ReplayConfig(chunk=40)).open(segment(data))
    c_N = torch.ones_like(replay.score().logp)
    record = replay.state.layers[1].routing
    record.picks[40][10] = (record.picks[40][10] + 1) % 8
    model.zero_grad()
    replay.backward(c_N)
    assert replay.state.flips()["routing"] >= 1
    assert comparison.compare(comparison.gradients(model), untouched).global_relative > 1e-4


def test_what_decisions_cost() -> None:
    """One byte for each pick of an expert, eight for each selection: what docs/design/architectures.md says."""
    replay = Engine(models.build("glm_moe_dsa"), ReplayConfig(chunk=40)).open(segment(trees.unequal_tree()))
    replay.score()
    kept = sum(node.stop - node.start for node in replay.tree.nodes if node.index in replay._resident)
    layers = replay.state.layers
    assert [layer.routing.nbytes() if layer.routing else 0 for layer in layers] == [0, 2 * kept, 2 * kept, 2 * kept]
    digests = [sum(digest.nbytes for digest in layer._digests.values()) for layer in layers]
    assert digests == [8 * kept, 0, 8 * kept, 0]
    held = sum(layer.nbytes()["state"] for layer in layers) + 3 * 2 * kept
    assert replay.state.nbytes()["state"] == held


def test_changed_selections_are_counted() -> None:
    model, data = models.build("glm_moe_dsa"), trees.unequal_tree()
    replay = Engine(model, ReplayConfig(chunk=40)).open(segment(data))
    c_N = torch.ones_like(replay.score().logp)
    layers = replay.state.layers
    assert [bool(layer._digests) for layer in layers] == [True, False, True, False]  # layers 1 and 3 share
    layers[2]._digests[40][3:5] += 1
    replay.backward(c_N)
    assert replay.state.flips() == {"routing": 0, "selection": 2}


@settings(max_examples=150, deadline=None)
@given(data=st.data(), total=st.integers(1, 40), count=st.integers(1, 12))
def test_picks_do_not_depend_on_blocks_and_ties_go_to_the_lower_position(data: st.DataObject, total: int, count: int) -> None:
    scores = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=total, max_size=total)), dtype=torch.float32)
    borders = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=4))})
    best = None
    for start, stop in zip(borders, borders[1:], strict=False):
        best = sparse.best_picks(best, scores[None, None, start:stop], start, count)
    wanted = sorted(sorted(range(total), key=lambda i: (-float(scores[i]), i))[:count])
    assert best is not None and best[1].flatten().tolist() == wanted
    assert best[0].flatten().tolist() == scores[wanted].tolist()


def test_tied_scores_select_alike_in_every_chunking() -> None:
    model, data = models.build("deepseek_v32", dtype=torch.float64), trees.unequal_tree()
    for indexer in sparse.indexers(model):
        torch.nn.init.zeros_(indexer.weights_proj.weight)  # every score is zero
    with lifted():
        results = [replayed(model, ReplayConfig(chunk=chunk, pack=1), data) for chunk in (31, ONE_CHUNK)]
    assert float((results[0][1] - results[1][1]).abs().max()) < 1e-11
    assert comparison.compare(results[0][2], results[1][2]).worst < 1e-10


@pytest.mark.parametrize(("name", "right"), [("deepseek_v32", True), ("glm_moe_dsa", True), ("glm_moe_dsa", False)])
def test_an_indexer_taken_apart_selects_alike_or_is_not(name: str, right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data, config = models.build(name, dtype=torch.float32), trees.unequal_tree(), ReplayConfig(chunk=31, pack=1)
    own, calls, scores = replayed(model, config, data), [], indexing.Factors.scores
    wrong = lambda self, *given: calls.append(given) or scores(self, *given) * (1 if right else -1)
    monkeypatch.setattr(indexing.Factors, "scores", wrong)
    monkeypatch.setattr(indexing, "_AGREES", {})
    monkeypatch.setattr(sparse, "DEVICES", {"cpu"})
    apart = replayed(model, config, data)
    assert len(calls) > 10 if right else len(calls) == 1  # asked once, and then the indexer itself
    assert comparison.compare(apart[2], own[2]).worst < 1e-4


def test_a_model_is_left_as_it_was() -> None:
    model, data = models.build("glm_moe_dsa"), trees.unequal_tree()
    before, _ = expected(model, data)
    replayed(model, ReplayConfig(chunk=50), data)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert torch.equal(expected(model, data)[0], before)


def test_one_token_runs_by_the_rule_that_has_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast kernel for a single token (flash-linear-attention's) is for decoding alone."""
    model = models.build("qwen3_5", dtype=torch.float64)
    code = sys.modules[type(model).__module__]

    def decoding_only(*args: object, **kwargs: object) -> None:
        raise NotImplementedError("no backward pass")

    monkeypatch.setattr(code, "torch_recurrent_gated_delta_rule", decoding_only)
    data = trees.short_tree()  # one branch is a single token
    with lifted():
        _, reference = expected(model, data)
        _, _, gradient = replayed(model, ReplayConfig(chunk=24, pack=1), data)
    assert comparison.compare(gradient, reference).worst <= 1e-10
    assert code.torch_recurrent_gated_delta_rule is decoding_only


# -- refusals ------------------------------------------------------------------------------------------------------------


def test_refusals_name_the_cause() -> None:
    model = models.build("qwen3_moe")
    model.config.output_router_logits = True
    with pytest.raises(ModelError, match="load-balancing"):
        Engine(model)
    model.config.output_router_logits = False
    model.config.attention_dropout = 0.1
    with pytest.raises(ModelError, match="attention_dropout is 0.1"):
        Engine(model)

    plain = models.build("llama")
    dropping = get_peft_model(plain, LoraConfig(r=2, lora_dropout=0.3, target_modules=["v_proj"]))
    with pytest.raises(ModelError, match=r"v_proj.*drops with p = 0.3"):
        Engine(dropping)

    adapted = get_peft_model(models.build("deepseek_v32"), LoraConfig(r=2, target_modules=["wk"]))
    with pytest.raises(ModelError, match=r"indexer.wk has an adapter"):
        Engine(adapted)

    unknown = models.build("qwen3_5")
    unknown.config.layer_types[0] = "chunked_attention"
    with pytest.raises(ModelError, match="chunked_attention"):
        Engine(unknown)


@pytest.mark.skipif(not hasattr(transformers, "DeepseekV4Config"), reason="a transformers without such a model")
def test_a_model_that_rewrites_its_cache_is_refused_even_where_new_types_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.DeepseekV4Config(
        vocab_size=61, hidden_size=32, num_hidden_layers=4, moe_intermediate_size=16, num_attention_heads=4, head_dim=16,
        q_lora_rank=16, num_experts_per_tok=2, n_routed_experts=8, o_groups=2, o_lora_rank=8, index_n_heads=4, index_head_dim=16,
    )  # fmt: skip
    model = transformers.DeepseekV4ForCausalLM(config)
    with pytest.raises(ModelError, match="'deepseek_v4' is not known"):
        Engine(model)
    monkeypatch.setattr(architectures, "MODEL_TYPES", dict(architectures.MODEL_TYPES))
    architectures.accept(model)
    with pytest.raises(ModelError, match="compressed_sparse_attention, heavily_compressed_attention, whose state is not known"):
        Engine(model)


def test_a_router_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build("qwen3_moe")
    router = dict(routing.routers(model))[0]
    monkeypatch.setattr(type(router), "forward", lambda self, hidden: (None, None, None))
    with pytest.raises(ModelError, match="without a top-k over its experts"):
        replayed(model, ReplayConfig(), trees.unequal_tree())
    monkeypatch.setattr(architectures, "routers", lambda model: iter(()))
    with pytest.raises(ModelError, match="no router"):
        Engine(model)


# -- training ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mistral", "qwen3_5"])
def test_training_steps_equal_conventional_trainings(name: str) -> None:
    """Six steps here; twenty in `python benchmarks/trace.py`."""
    data = traces.groups(6)
    with lifted():
        ours, theirs = traces.ours(name, data, LossConfig()), traces.theirs(name, data, LossConfig())
    assert ours == pytest.approx(theirs, abs=1e-10)
    assert max(theirs) - min(theirs) > 1e-3

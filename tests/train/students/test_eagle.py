"""The unrolled head against drafting token by token."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load as load_tensors
from torch import Tensor
from torch.nn import functional

from paceline.kernels.reference import rope
from paceline.models.rope import turns
from paceline.train.data.batches import TextBatch
from paceline.train.data.teacher import TargetStates, Teacher
from paceline.train.students import eagle
from paceline.train.students.eagle import EagleStudent
from paceline.train.students.packing import unpacked
from paceline.train.students.student import label_rows
from tests.train.toy_training import head_for, teacher_for, texts_of

STEPS = 4


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return teacher_for(layers=(0, 1, 1))


@pytest.fixture(scope="module")
def texts() -> TextBatch:
    return texts_of(lengths=(23, 32, 17), starts=(5, 9, 4))


@pytest.fixture(scope="module")
def head(teacher: Teacher) -> EagleStudent:
    head = head_for(teacher, draft_vocab=60, steps=STEPS)
    with torch.no_grad():  # far from its initial weights, so that every part of it matters
        for param in head.params.values():
            param += torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel())) * 0.1
    return head


def draft(head: EagleStudent, teacher: Teacher, states: TargetStates, ids: Tensor, row: int, steps: int) -> list[int]:
    """One chain that starts at a row, as a drafter does it: true features up to the row, then its own outputs, fed with
    the text's tokens. Written for one text and one token at a time."""
    w, shape = {name: p.detach() for name, p in head.params.items()}, head.shape
    g = list((states.features[: row + 1] / head.constants["feature_scale"]) @ w["fc.weight"].T)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    found: list[int] = []
    for p in range(row + steps):
        x = torch.cat(
            [
                norm(teacher.embed(ids[p + 1]), w["midlayer.input_layernorm.weight"], shape.eps),
                norm(g[p], w["midlayer.hidden_norm.weight"], shape.eps),
            ]
        )
        q, k, v = ((w[f"midlayer.self_attn.{n}_proj.weight"] @ x).view(1, -1, shape.head_dim) for n in "qkv")
        angles = turns(torch.tensor([p]), head._layer.frequencies)
        keys.append(rope(k, *angles)[0])
        values.append(v[0])
        out = []
        for index, query in enumerate(rope(q, *angles)[0]):
            kv = index // (shape.heads // shape.kv_heads)
            scores = torch.stack([key[kv] @ query for key in keys]) * shape.head_dim**-0.5
            out.append(sum(s * value[kv] for s, value in zip(scores.softmax(0), values, strict=True)))
        x = g[p] + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(out)
        inner = norm(x, w["midlayer.post_attention_layernorm.weight"], shape.eps)
        gate, up, down = (w[f"midlayer.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        y = x + down @ (functional.silu(gate @ inner) * (up @ inner))
        if p >= row:
            logits = w["lm_head.weight"] @ norm(y, w["norm.weight"], shape.eps)
            found.append(int(head.constants["draft_ids"][logits.argmax()]))
            g.append(y)
    return found


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean() + eps) * weight


def test_guesses_are_what_drafting_token_by_token_gives(head: EagleStudent, teacher: Teacher, texts: TextBatch) -> None:
    states = teacher(texts.ids)
    guesses = head.guesses(teacher, states, texts, STEPS)
    for b, rows in enumerate([(4, 9, 18), (8, 20), (3, 11)]):
        one = TargetStates(features=states.features[b], hidden=states.hidden[b])
        for row in rows:
            assert guesses[b, row].tolist() == draft(head, teacher, one, texts.ids[b], row, STEPS)


def test_padding_and_neighbours_change_nothing(head: EagleStudent, teacher: Teacher, texts: TextBatch) -> None:
    alone = TextBatch(ids=texts.ids[:1, :32], starts=texts.starts[:1], ends=texts.ends[:1])
    together = head.guesses(teacher, teacher(texts.ids), texts, STEPS)
    assert torch.equal(head.guesses(teacher, teacher(alone.ids), alone, STEPS)[0, :18], together[0, :18])


def test_the_loss_is_the_distance_from_the_target(head: EagleStudent, teacher: Teacher, texts: TextBatch) -> None:
    states = teacher(texts.ids)
    found = head.losses(teacher, states, texts, "likelihood")
    rows = label_rows(texts, head._known)
    wanted = (states.hidden.flatten(0, 1)[rows + 1] @ teacher.head[head.constants["draft_ids"]].T).log_softmax(-1)
    weights = head._cast()
    for step, y in enumerate(head._unroll(teacher, states, texts, weights, STEPS)):
        length = texts.ids.shape[1]
        deep = rows % length - step >= (texts.starts - 1)[rows // length]
        logits = head._logits(y.flatten(0, 1)[rows], weights).log_softmax(-1)
        distance = (wanted.exp() * (wanted - logits)).sum(-1)[deep].mean()
        agrees = (wanted.argmax(-1) == logits.argmax(-1))[deep].float().mean()
        assert found.by_step[step] == pytest.approx(distance.item(), abs=1e-4)
        assert found.agreement[step] == pytest.approx(agrees.item(), abs=1e-6)


def test_only_answers_are_learnt_from(teacher: Teacher) -> None:
    """Row p is about token p + 2; the first token of an answer is never drafted."""
    texts = texts_of(lengths=(12,), starts=(5,))
    rows = label_rows(texts, torch.ones(300, dtype=torch.bool))
    assert rows.tolist() == [4, 5, 6, 7, 8, 9]
    known = torch.ones(300, dtype=torch.bool)
    known[texts.ids[0, 8]] = False
    assert 6 not in label_rows(texts, known).tolist()


def test_gradients_reach_every_parameter(head: EagleStudent, teacher: Teacher, texts: TextBatch) -> None:
    head.losses(teacher, teacher(texts.ids), texts, "likelihood").total.backward()
    for name, param in head.params.items():
        assert param.grad is not None, name
        assert param.grad.abs().sum() > 0, name
        param.grad = None


def test_it_finds_out_where_its_rows_lie(
    head: EagleStudent, teacher: Teacher, texts: TextBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the outputs of all steps, at rows that count, before the last norm's weights."""
    assert "lm_head.sketch" not in load_tensors(head.files()["model.safetensors"])
    asked: list[tuple[Tensor, Tensor, Tensor]] = []

    def directions(*layer: Tensor) -> Tensor:
        asked.append(layer)  # type: ignore[arg-type]  # three of them
        return torch.ones((32, head.shape.hidden), dtype=torch.int8)

    monkeypatch.setattr(eagle, "directions", directions)
    head.finish(teacher, [texts])
    [(weight, scale, moment)] = asked
    assert torch.equal(weight, head.params["lm_head.weight"])
    assert torch.equal(scale, head.params["norm.weight"])
    rows, weights = label_rows(texts, head._known), head._cast()
    found = torch.cat(
        [y.flatten(0, 1)[rows] for y in head._unroll(teacher, teacher(texts.ids), texts, weights, head.shape.steps)]
    )
    found = found / found.square().mean(dim=1, keepdim=True).sqrt()
    assert torch.allclose(moment, found.T @ found / len(found), atol=1e-3)
    assert moment.diagonal().mean() == pytest.approx(1.0, abs=1e-3)
    assert tuple(load_tensors(head.files()["model.safetensors"])["lm_head.sketch"].shape) == (32, head.shape.hidden)
    head.sketch = None


def test_the_file_is_the_published_format(head: EagleStudent) -> None:
    files = head.files()
    tensors = unpacked(load_tensors(files["model.safetensors"]))
    config = json.loads(files["config.json"])
    assert {name: tuple(tensors[name].shape) for name in head.shape.sizes()} == head.shape.sizes()
    assert torch.equal(tensors["d2t"] + torch.arange(60), head.constants["draft_ids"])
    assert tensors["t2d"].nonzero()[:, 0].tolist() == head.constants["draft_ids"].tolist()
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 1]
    assert "eagle_config" not in config
    folded = head.params["fc.weight"] / head.constants["feature_scale"]
    assert torch.allclose(tensors["fc.weight"], folded, rtol=0.01, atol=1e-4)

"""The modules of the playground that need no page: requests, answers, words, history, charts. Skipped without Node."""

from __future__ import annotations

import json
from pathlib import Path

from tests.server.node import run


def test_events_are_found_wherever_the_text_is_cut(tmp_path: Path) -> None:
    stream = 'data: {"a":"é"}\n\n: a comment\n\ndata: one\ndata: two\r\n\r\ndata:[DONE]\n\n'
    code = f"""
        const stream = {json.dumps(stream)}, found = [];
        for (let size = 1; size <= stream.length; size++) {{
            const parser = new EventParser(), events = [];
            for (let i = 0; i < stream.length; i += size) events.push(...parser.push(stream.slice(i, i + size)));
            found.push(JSON.stringify(events));
        }}
        return [...new Set(found)].map(JSON.parse);
    """
    assert run(code, tmp_path) == [['{"a":"é"}', "one\ntwo", "[DONE]"]]


def test_controls_become_a_request_that_the_server_knows(tmp_path: Path) -> None:
    controls = {
        "system": " Be brief. ",
        "drafter": "ngram",
        "max_draft": "4",
        "rule": "coupled",
        "temperature": "0",
        "top_p": "0.9",
        "seed": "",
        "max_tokens": "20",
        "stop-texts": "END\n\n###",
    }
    messages = [{"role": "user", "content": "hi"}]
    code = f"""
        const controls = {json.dumps(controls)}, messages = {json.dumps(messages)};
        const full = requestOf(messages, {{...controls, logprobs: true}}, {{model: "tiny"}});
        return [
            full,
            requestOf(messages, controls, {{model: "tiny", plain: true}}),
            requestOf(messages, {{...controls, drafter: "off"}}, {{model: "tiny"}}),
            requestOf(messages, {{rule: "coupled", drafter: "", max_draft: "", seed: "7"}}, {{model: "tiny"}}),
            continuationOf(full, [1, 2, 3]),
        ];
    """
    full, plain, off, default, more = run(code, tmp_path)
    assert full == {
        "model": "tiny",
        "messages": [{"role": "system", "content": "Be brief."}, *messages],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "top_p": 0.9,
        "max_tokens": 20,
        "stop": ["END", "###"],
        "logprobs": True,
        "speculation": {"enabled": True, "rule": "coupled", "drafter": "ngram", "max_draft": 4},
        "paceline": {"events": True},
    }
    assert plain == off == {**{k: v for k, v in full.items() if k != "logprobs"}, "speculation": {"enabled": False}}
    assert default["speculation"] == {"enabled": True, "rule": "coupled"}
    assert (default["seed"], default["messages"]) == (7, messages)
    assert not {"temperature", "top_p", "max_tokens", "stop"} & default.keys()
    assert more == {**{k: v for k, v in full.items() if k != "messages"}, "prompt": [1, 2, 3], "logprobs": 0}


CHUNKS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": None},
    {
        "choices": [{"index": 0, "delta": {"content": "Once"}, "logprobs": {"content": [{"logprob": 0.0}]}}],
        "paceline": {"round": 1, "origins": ["plain"], "token_texts": ["Once"], "drafter": None},
    },
    {
        "choices": [{"index": 0, "delta": {"content": " upon a"}, "finish_reason": "length"}],
        "paceline": {"round": 2, "origins": ["accepted", "bonus"], "token_texts": [" upon", " a"], "drafter": "ngram"},
        "speculation": {
            "num_draft_tokens": 3,
            "num_accepted_tokens": 1,
            "drafter": "ngram",
            "tokens_per_step": 1.5,
            "speedup": {"ratio": 1.5, "low": 1.4, "high": 1.6},
        },
    },
    {"choices": [], "usage": {"completion_tokens": 3}},
]


def test_an_answer_is_put_together_from_chunks(tmp_path: Path) -> None:
    code = f"""
        const answer = new Answer(0);
        {json.dumps(CHUNKS)}.forEach((chunk, i) => answer.add(chunk, 100 * i));
        const kept = unpackTokens(packTokens(answer.tokens), answer.text, "ngram");
        const {{text, count, speed, stats, finish, steps, tokens}} = answer;
        return {{text, count, speed, stats, finish, steps, tokens, kept, rounds: roundsOf(answer.tokens),
                end: endInWords({{finish: "length", asked: {{max_tokens: 3}}, count: 3}}),
                full: endInWords({{finish: "length", asked: {{max_tokens: 9}}, count: 3}}),
                pieces: summaryOf({{stats: answer.stats, tokens: 3, seconds: 0.2, speed: 20}}),
                tip: describe(answer.tokens[0]), drafted: describe(answer.tokens[1])}};
    """
    told = run(code, tmp_path)
    assert (told["text"], told["count"], told["speed"], told["steps"]) == ("Once upon a", 3, 20, 2)
    assert (told["stats"]["drafter"], told["finish"]) == ("ngram", "length")
    assert [token["origin"] for token in told["tokens"]] == ["plain", "accepted", "bonus"]
    for kept, token in zip(told["kept"], told["tokens"], strict=True):
        assert all(kept[name] == token[name] for name in ("text", "origin", "round", "since")), kept
    assert told["tokens"][0]["probability"] == told["kept"][0]["probability"] == 1
    assert told["rounds"] == [
        {"round": 1, "from": 0, "to": 100, "origins": ["plain"]},
        {"round": 2, "from": 100, "to": 200, "origins": ["accepted", "bonus"]},
    ]
    assert told["tip"].split("\n") == ['"Once" plain', "probability 100.0 %", "step 1", "100 ms after the request"]
    assert told["drafted"].split("\n")[0] == '" upon" accepted from ngram'
    assert (told["end"], told["full"]) == ("Cut at max tokens (3).", "Cut: the context is full.")
    measured = "1.50 × (1.40 to 1.60) as fast as plain"
    assert told["pieces"][3:] == ["1.50 tokens per step", "33 % of 3 drafted tokens accepted", measured]


def test_a_server_that_tells_no_origins_is_shown_without(tmp_path: Path) -> None:
    assert run('return tokensOf({choices: [{delta: {content: "hi"}}]}, 5)', tmp_path) == [
        {"text": "hi", "origin": None, "at": 5}
    ]


def test_the_verdict_of_a_race(tmp_path: Path) -> None:
    code = """
        const run = (text, seconds, finish = "stop") => ({answer: {text, finish}, seconds});
        return [verdictOf(run("same", 2), run("same", 1), ""), verdictOf(run("same", 2), run("some", 1), ""),
            verdictOf(run("", 2, "stopped"), run("", 1), ""), excuseOf({rule: "typical"}), excuseOf({rule: "coupled"}),
            [["", ""], ["long", "longer"], ["", "x"]].map((pair) => firstDifference(...pair))];
    """
    same, different, stopped, excuse, none, places = run(code, tmp_path)
    assert (same["className"], same["times"]) == ("same", 2)
    assert "Identical texts, 4 characters: speculation was 2.00 × as fast" in same["text"]
    assert (different["className"], different.get("times")) == ("different", None)
    assert "from character 2 on: “ame” and “ome”" in different["text"]
    assert stopped.get("times") is None
    assert (excuse, none) == ("the rule typical is lossy", "")
    assert places == [-1, 4, 0]


def test_facts_are_said_in_words(tmp_path: Path) -> None:
    model = {
        "id": "smollm2",
        "max_model_len": 8192,
        "meta": {
            "n_params": 134_515_008,
            "size": 98_346_240,
            "bits_per_weight": 5.85,
            "device": "cpu",
            "device_name": "CPU",
            "kernels": "compiled",
            "drafters": {"eagle": "a head", "ngram": "looks up tokens"},
        },
    }
    state = {"default_drafter": "eagle", "drafters": {"eagle": None, "ngram": "it hung"}, "bitwise": True}
    code = f"""
        const model = {json.dumps(model)}, state = {json.dumps(state)};
        return [Object.fromEntries(cardOf(model, state)), cardLine(model), cardOf({{id: "x"}}, null).length,
            stateInWords(200, {{}}), stateInWords(503, {{status: "starting", percent: 42}}), stateInWords(0, null),
            stateInWords(503, {{status: "draining"}}), stateInWords(503, {{status: "dead"}}), stateInWords(502, null),
            speedupInWords({{speedup: {{ratio: 1.5, low: 1.25, high: 1.75}}, drawn_share: 0.012}}),
            speedupInWords({{default_drafter: "ngram", speedup_note: "measuring: 3 of 8 runs"}}),
            groupInWords({{drafter: "head", batch: "3-4", kind: "sampled", runs: 9,
                speedup: {{ratio: 0.9, low: 0.8, high: 0.95}}, tokens_per_step: 1.25, acceptance: 0.1, off: "paused"}}),
            groupInWords({{drafter: "head", batch: "1", kind: "greedy", speedup: null, runs: 2}}),
            reasonOf("something new"), problemInWords({{message: "no key was given", status: 401}})];
    """
    card, line, short, ready, starting, gone, draining, dead, other, *rest = run(code, tmp_path)
    speedup, few, group, measuring, reason, problem = rest
    assert card == {
        "Name": "smollm2",
        "Parameters": "134.5 million",
        "Weights": "5.8 bits each on average, 98 MB in memory",
        "Context": "8,192 tokens",
        "Runs on": "CPU: compiled",
        "Drafter": "eagle: a head",
        "Also drafts": "ngram: out of use: it hung",
        "Exact": "to the bit, whatever else is in the batch",
    }
    assert line == "smollm2 · 134.5 million parameters · 5.8 bits · 8,192 tokens of context · on CPU"
    assert (short, ready) == (1, None)
    assert "loading: 42 %." in starting
    assert all(
        word in text
        for word, text in zip(("not answer", "shutting", "restart", "502"), (gone, draining, dead, other), strict=True)
    )
    assert (speedup["number"], few["number"]) == ("1.50 ×", "")
    assert "1.25 to 1.75" in speedup["note"]
    assert "1.2 % of the steps run plain" in speedup["note"]
    assert few["note"] == "Live speed-up over plain decoding: measuring: 3 of 8 runs."
    assert group == "head, 3-4 at once, sampled: 0.90 × (0.80 to 0.95) · 1.25 tokens per step · 10 % accepted · paused"
    assert measuring == "head, 1 at once, greedy: measuring (2 runs so far)"
    assert (reason, problem) == ("Something new.", "No key was given. Enter an API key.")


def test_a_conversation_is_a_tree_that_survives_broken_data(tmp_path: Path) -> None:
    code = """
        const made = newConversation(5);
        const first = addMessage(made, null, {role: "user", content: "A question\\nwith more"});
        const answer = addMessage(made, first.id, {role: "assistant", content: "one", finish: "length", model: "tiny"});
        addMessage(made, first.id, {role: "assistant", content: "two"});
        const edited = addMessage(made, null, {role: "user", content: "Another"});
        const texts = () => pathOf(made).map((node) => node.content);
        const seen = [texts()];
        chooseBranch(made, first.id); seen.push(texts());
        chooseBranch(made, answer.id); seen.push(texts());
        const markdown = toMarkdown(made);
        removeMessage(made, answer.id); seen.push(texts());
        const read = readConversation(JSON.stringify(made));
        const broken = ["", "null", "{}", "[]",
            JSON.stringify({...made, version: 0}), JSON.stringify({...made, nodes: 5}),
            JSON.stringify({...made, nodes: [{id: 1, parent: 1, role: "user", content: ""}]}),
            ...[{content: 5}, {role: "system"}, {speed: "fast"}, {tokens: {}}, {tokens: [5]}, {stats: 5},
                {stats: {tokens_per_step: "many"}}, {stats: {speedup: {ratio: 1}}}, {finish: {}}].map((wrong) =>
                JSON.stringify({...made, nodes: [{id: 1, parent: null, role: "user", content: "", ...wrong}]}))];
        return [seen, branchesOf(made, edited).length, made.title, JSON.stringify(read) === JSON.stringify(made),
            broken.map(readConversation), readConversation(JSON.stringify({...made, leaf: 99})).leaf, markdown,
            fileName("Why? Über-all!")];
    """
    seen, branches, title, same, broken, leaf, markdown, name = run(code, tmp_path)
    question = "A question\nwith more"
    assert seen == [["Another"], [question, "two"], [question, "one"], [question, "two"]]
    assert (branches, title, same) == (2, "Another", True)
    assert broken == [None] * len(broken)
    assert leaf == 4
    assert markdown.endswith(f"## You\n\n{question}\n\n## tiny\n\none\n\n*(cut at max tokens)*\n")
    assert name == "why-über-all"


def test_the_history_is_bounded_and_never_fails(tmp_path: Path) -> None:
    code = """
        class Memory {
            constructor(most) { this.most = most; this.map = new Map(); }
            get length() { return this.map.size; }
            key(i) { return [...this.map.keys()][i]; }
            getItem(key) { return this.map.get(key) ?? null; }
            removeItem(key) { this.map.delete(key); }
            setItem(key, text) {
                const others = [...this.map].filter(([each]) => each !== key).map(([, each]) => each.length);
                if (others.reduce((sum, each) => sum + each, text.length) > this.most) throw new Error("quota");
                this.map.set(key, text);
            }
        }
        const talk = (i, size) => {
            const made = {...newConversation(i), id: `c${i}`};
            addMessage(made, null, {role: "user", content: "x".repeat(size)});
            return made;
        };
        const ids = (store) => store.list().map((conversation) => conversation.id);
        const many = new Store(new Memory(1e9));
        for (let i = 0; i < 60; i++) many.save(talk(i, 10));
        const tight = new Store(new Memory(3000)), kept = [0, 1, 2, 3].map((i) => tight.save(talk(i, 1000)));
        const tooLong = tight.save(talk(9, 9000));
        const storage = new Memory(1e9);
        storage.setItem(PREFIX + "bad", "{"); storage.setItem("other", "{");
        const broken = new Store(storage); broken.save(talk(1, 5));
        const none = new Store(null), unkept = [none.save(talk(1, 5)), none.save(talk(2, 5))];
        return [ids(many), kept, ids(tight), tooLong, ids(broken), storage.getItem("other"), unkept, ids(none)];
    """
    many, kept, tight, too_long, broken, other, unkept, none = run(code, tmp_path)
    assert many == [f"c{i}" for i in range(59, 9, -1)]
    assert (kept, too_long) == ([True] * 4, False)
    assert tight[0] == "c9"  # in memory alone
    assert (broken, other) == (["c1"], "{")
    assert (unkept, none) == ([False, False], ["c2", "c1"])


def test_ticks_are_round_and_reach_the_value(tmp_path: Path) -> None:
    assert run("return [0.7, 1, 3.2, 17, 99, 1234].map(ticksOf)", tmp_path) == [
        [0, 0.2, 0.4, 0.6, 0.8],
        [0, 0.25, 0.5, 0.75, 1],
        [0, 1, 2, 3, 4],
        [0, 5, 10, 15, 20],
        [0, 25, 50, 75, 100],
        [0, 500, 1000, 1500],
    ]


def test_steps_that_arrive_together_share_their_time(tmp_path: Path) -> None:
    rounds = [{"from": 0, "to": 100}, {"from": 100, "to": 200}, {"from": 200, "to": 201}, {"from": 201, "to": 300}]
    spread = run(f"return spread({json.dumps(rounds)})", tmp_path)
    assert spread == [
        {"from": 0, "to": 100},
        {"from": 100, "to": 150.5},
        {"from": 150.5, "to": 201},
        {"from": 201, "to": 300},
    ]

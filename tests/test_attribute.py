"""attribute.py from end to end on the lab, the three-line hello world, hostile text, and users' mistakes."""
import json
import re
import sys
from html.parser import HTMLParser

import pytest
import torch
from tokenizers import Tokenizer, decoders, models as token_models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import attribute as command
from oar import attribution, heatmap, lab, models
from oar.attribution import Attribution, attribute
from oar.errors import UserError
from oar.reshape import row_weights

PROBLEM = "x 3 y 5 ; x + 4 ; y * x ; x - y ; y + 1 ?"
EVIL = ["<script>alert(1)</script>", "\x1b[31m\x1b]0;title\x07", "\u202eabc", "a\u2028b", "</span><img src=x onerror=alert(1)>", '" onmouseover="x', "&lt;", "\n",
        "$\\frac{1}{$", "", "\ud800", "\x00"]


@pytest.fixture(scope="module")
def lab_policy():
    return models.load("lab", torch.device("cpu"))


@pytest.fixture(scope="module")
def trace():
    import random
    return lab.write_trace(lab.parse_problem(PROBLEM), random.Random(1), sloppiness=0.0)


def run(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["attribute.py", *map(str, flags)])
    command.main()


def test_hello_world(lab_policy, trace):
    result = attribute(lab_policy, PROBLEM, trace, methods=["oar_p", "oar_tg"])
    assert "".join(result.tokens) == trace.replace(" <eos>", "<eos>") and result.answer == "2 6"
    n = result.parts.count("reasoning")
    assert result.parts[n:] == ["conclusion", "answer", "answer", "tail"] and result.roles[0] == "filler"
    for method in ("oar_p", "oar_tg"):
        weights = torch.tensor(result.weights[method])
        assert torch.allclose(weights[:n], row_weights(torch.tensor(result.importance[method])[:n]), atol=1e-3)
        assert (weights[n:] == 1).all() and abs(weights[:n].sum() - n) < 1e-2
    assert result.causal is None


def test_given_text_scores_like_a_sampled_one(lab_policy, trace):
    """Entropies of a given completion are the policy's own."""
    batch = attribution.batch_of_texts(lab_policy, PROBLEM, [trace])
    assert batch.finished.tolist() == [True] and batch.entropy.shape == batch.completion_ids.shape
    ids = torch.cat([batch.prompt_ids, batch.completion_ids], 1)
    p = lab_policy.model(ids).logits[0, batch.prompt_ids.shape[1] - 1:-1].softmax(-1)
    assert torch.allclose(batch.entropy[0], -(p * p.log()).sum(-1), atol=1e-4)
    assert torch.allclose(batch.logprobs[0].exp(), p.gather(1, batch.completion_ids[0][:, None])[:, 0], atol=1e-5)


def test_the_command_prints_and_writes(monkeypatch, capsys, tmp_path):
    run(monkeypatch, "--out", tmp_path, "--methods", "oar_tg", "ktae", "entropy", "roles", "--oracle", "answer", "--n", 2, "--color", "never", "--group-size", 4)
    out = capsys.readouterr().out
    assert out.count("\nentropy") == 2 and "\x1b" not in out and str(tmp_path) in out
    records = json.loads((tmp_path / "attribution.json").read_text())
    assert len(records) == 2 and records[0]["problem"] != records[1]["problem"]
    for number, record in enumerate(records, 1):
        size = {len(record[name]) for name in ("tokens", "parts", "roles", "causal")} | {len(w) for w in record["weights"].values()}
        assert len(size) == 1 and any(record["causal"])
        assert all(part == "reasoning" for part, causal in zip(record["parts"], record["causal"]) if causal)
        assert lab.execute(lab.parse_problem(record["problem"]))[1] == record["answer"]
        assert (tmp_path / f"completion-{number}.png").read_bytes()[:4] == b"\x89PNG"
    page = (tmp_path / "index.html").read_text()
    assert page.count('class="row"') == 8 and not re.search(r"https?://|\bsrc=|\bhref=|@import|url\(", page)


def test_a_completion_file(monkeypatch, capsys, tmp_path, trace):
    (tmp_path / "solution.txt").write_text(trace, encoding="utf-8")
    run(monkeypatch, "--problem", PROBLEM, "--completion-file", tmp_path / "solution.txt", "--methods", "oar_f", "--out", tmp_path / "out", "--color", "always")
    assert "\x1b[30;48;2;" in capsys.readouterr().out
    record, = json.loads((tmp_path / "out/attribution.json").read_text())
    assert "".join(record["tokens"]) == trace.replace(" <eos>", "<eos>") and any(record["causal"])


@pytest.mark.parametrize("flags, message", [
    (["--methods", "oar_x"], "there is no method 'oar_x'"), (["--n", 0], "must be positive"), (["--completion-file", "x.txt"], "needs the --problem"),
    (["--problem", "what is 2 + 2"], "the lab reads programs"), (["--problem", PROBLEM, "--data", "x.jsonl"], "exclude each other"),
    (["--problem", PROBLEM, "--completion-file", "no.txt"], "no.txt: No such file"), (["--data", "no.jsonl"], "no.jsonl"),
    (["--problem", PROBLEM, "--completion-file", "no.txt", "--methods", "ktae"], "compares the completions of a group"),
    (["--max-new-tokens", 3, "--problem", PROBLEM], "no correct completion"), (["--model", "./nowhere"], "no such folder"),
])
def test_mistakes_are_one_sentence(monkeypatch, flags, message, tmp_path):
    with pytest.raises(UserError, match=re.escape(message)):
        run(monkeypatch, "--quiet", "--out", tmp_path, *flags)


def test_words_the_lab_does_not_know(lab_policy):
    with pytest.raises(UserError, match="'hello' is not a word"):
        attribute(lab_policy, PROBLEM, "hello #### 1 2", methods=["entropy"])


# --------------------------------------------------------------------------------------------------------------------
# hostile text

@pytest.fixture
def evil():
    n = len(EVIL)
    return Attribution("".join(EVIL), "\x1b[2J<b>", EVIL, ["reasoning"] * n, ["<i>"] * n, {"oar_p": [0.5] * n}, {"oar_p": [1.5] * n}, [True] * n)


def test_no_control_character_survives(evil):
    for text in (*EVIL, evil.problem):
        assert not re.search(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\ud800-\udfff]", heatmap.visible(text))
    shown = re.sub(r"\x1b\[(?:30;48;2;\d+;\d+;\d+|1;4|0)m", "", heatmap.terminal(evil, True, 80))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]", shown)        # only our own colours and line ends
    assert "\x1b" not in heatmap.terminal(evil, False, 80)


def test_the_page_escapes_everything(evil):
    page = heatmap.page([evil], "<title>\x1b", "all")

    class Reader(HTMLParser):
        tags, handlers = [], []

        def handle_starttag(self, tag, attributes):
            self.tags.append(tag)
            self.handlers += [name for name, _ in attributes if name.startswith("on") or name in ("src", "href")]

    reader = Reader()
    reader.feed(page)
    assert reader.tags.count("script") == 1 and "img" not in reader.tags and "i" not in reader.tags and reader.tags.count("b") == 1
    assert not reader.handlers and reader.tags.count("span") == 6 + len(EVIL)        # 5 swatches, 1 legend mark
    assert "default-src 'none'" in page
    page.encode("utf-8")                                                             # no lone surrogate


def test_the_picture_survives_too(evil, tmp_path):
    heatmap.picture(evil, "$\\x_{\x1b", tmp_path / "evil.png")
    long = Attribution("p", "1", ["tok"] * 200, ["reasoning"] * 200, [""] * 200, {"m": [0.0] * 200}, {"m": [1.0] * 200}, None)
    heatmap.picture(long, "long", tmp_path / "long.png")
    assert (tmp_path / "evil.png").stat().st_size > 1000 and (tmp_path / "long.png").stat().st_size > 1000


def test_colours_follow_the_weight():
    assert heatmap.colour(1.0) == (255, 255, 255)
    assert heatmap.colour(2.0) == heatmap.colour(9.0) and heatmap.colour(2.0)[0] > heatmap.colour(2.0)[2]
    assert heatmap.colour(0.1)[2] > heatmap.colour(0.1)[0]


def test_token_texts_join_across_split_characters():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(token_models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)
    ids = tokenizer.encode("aé 数b")
    texts = attribution.token_texts(tokenizer, ids)
    assert texts == ["a", "", "é", " ", "", "", "数", "b"]

"""Reading problems: every bad file is one sentence with file, line and field; prompts for every kind of tokenizer."""
import json

import pytest
from conftest import EOS_ID, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oar import data
from oar.errors import UserError
from oar.models import Policy


def write(tmp_path, content):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


GOOD = '{"problem": "1+1?", "answer": "2"}\n'


@pytest.mark.parametrize("content, message", [
    (GOOD * 2 + '{"q": \n[1,2]\n', "p.jsonl, line 3: not valid JSON"),
    (GOOD + "[1, 2]\n", "line 2: expected an object"),
    (GOOD + '{"problem": "a", "solution": "2"}\n', "line 2: no field 'answer' (there are: 'problem', 'solution')"),
    ('{"problem": "a", "answer": null}\n', "line 1: field 'answer' must be text"),
    ('{"problem": "a", "answer": ""}\n', "line 1: field 'answer' is empty"),
    ('{"problem": "   ", "answer": "2"}\n', "line 1: field 'problem' is empty"),
    ('{"problem": "a", "answer": true}\n', "line 1: field 'answer' must be text"),
    ('{"problem": "a", "answer": NaN}\n', "line 1: field 'answer' is not a finite number"),
    ('{"problem": "a", "answer": 1e400}\n', "line 1: field 'answer' is not a finite number"),
    ('{"problem": "a", "answer": "1", "answers": []}\n', "line 1: field 'answers' must be a non-empty list"),
    ('{"problem": "a", "answer": "1", "answers": ["1", null]}\n', "line 1: field 'answers' must be text"),
    (GOOD.encode() + b'{"problem": "caf\xe9", "answer": "2"}\n', "line 2: byte 17 is not UTF-8"),
    ('{"problem": "a", "answer": "1", "id": "k"}\n' * 2, "line 2: field 'id' repeats 'k' of line 1"),
    ("", "holds no problems"),
    ("\n\n", "holds no problems"),
    ("[" * 100000 + "\n", "line 1: not valid JSON"),
])
def test_faults_name_file_line_and_field(tmp_path, content, message):
    with pytest.raises(UserError) as error:
        data.read_jsonl(write(tmp_path, content))
    assert message in str(error.value) and "p.jsonl" in str(error.value) and "\n" not in str(error.value)


def test_missing_file():
    with pytest.raises(UserError, match="nowhere.jsonl: No such file"):
        data.read_jsonl("nowhere.jsonl")


def test_accepted_forms(tmp_path):
    rows = ['\ufeff{"problem": "a", "answer": 42}', "", '{"problem": "b\u2028c", "answer": "004", "id": 7}',
            '{"problem": "d", "answer": "so 6*7 = 42\\n#### 42"}', '{"problem": "e", "answer": "thus \\\\boxed{\\\\frac{1}{2}}."}',
            '{"problem": "f", "answer": "x", "answers": ["1", "one"]}']
    examples = data.read_jsonl(write(tmp_path, "\n".join(rows)))
    assert [e.answer for e in examples] == ["42", "004", "42", "\\frac{1}{2}", ["1", "one"]]
    assert [e.id for e in examples][:2] == ["p-1", "7"] and examples[1].problem == "b\u2028c"
    assert len(data.read_jsonl(write(tmp_path, "\n".join(rows)), limit=2)) == 2


def test_other_field_names(tmp_path):
    path = write(tmp_path, json.dumps({"question": "1+1?", "solution": 2}) + "\n")
    assert data.read_jsonl(path, "question", "solution")[0].answer == "2"


def test_hub_data_set_out_of_reach_is_one_sentence(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def no_network(*args, **kwargs):
        raise ConnectionError("cannot reach the hub\nand many more lines")

    monkeypatch.setattr(datasets, "load_dataset", no_network)
    with pytest.raises(UserError, match="--data openai/gsm8k: .*cannot reach the hub$"):
        data.read_hub("openai/gsm8k", "train", "question", "answer", "main")


def test_hub_rows_become_examples(monkeypatch):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([{"question": "a", "answer": "steps #### 1,200"}, {"question": "b", "answer": "#### 3"}])
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config, split: table)
    examples = data.read_hub("openai/gsm8k", "train", "question", "answer", "main", limit=1)
    assert [(e.problem, e.answer, e.id) for e in examples] == [("a", "1,200", "openai/gsm8k-train-0")]


def word_tokenizer(**special):
    words = "Problem: Please reason step by step, and put your final answer within \\boxed{}. Solution: 1+1? U A".split()
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(dict.fromkeys(["?"] + words))}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)


def test_plain_template_without_a_chat_template():
    tokenizer = word_tokenizer()
    policy = Policy(tiny_model("gpt2"), tokenizer, (), False)
    text = tokenizer.decode(data.encode_prompt(policy, "1+1?"))
    assert text.startswith("Problem: 1+1? Please reason") and text.endswith("\\boxed{}. Solution:")
    assert data.stop_strings(policy) == ["\nProblem:"]


def test_chat_template_is_used():
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}U {{ m.content }} {% endfor %}{% if add_generation_prompt %}A{% endif %}"
    policy = Policy(tiny_model("gpt2"), tokenizer, (), False)
    text = tokenizer.decode(data.encode_prompt(policy, "1+1?"))
    assert text.startswith("U 1+1? Please") and text.endswith("\\boxed{}. A") and data.stop_strings(policy) == []


def test_lab_prompts_are_bare(policy):
    assert policy.tokenizer.decode(data.encode_prompt(policy, "x 3 y 5 ; x + 4 ?")) == "x 3 y 5 ; x + 4 ?"
    assert EOS_ID not in data.encode_prompt(policy, "x 3 y 5 ; x + 4 ?")

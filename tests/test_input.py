"""What users hand in: files of every kind, flags, model folders; each mistake is one sentence that names its place."""
import json
import resource
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, tiny_model
from test_data import GOOD, word_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import evaluate
import train
from oar import checkpoint, data, lab, models
from oar.errors import UserError


def problems(tmp_path, content) -> str:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


# --------------------------------------------------------------------------------------------------------------------
# files (tests/test_data.py has broken lines, fields, ids, BOM, U+2028, numbers)

@pytest.mark.parametrize("content, message", [
    (GOOD.encode("utf-16"), "line 1: byte 1 is not UTF-8"),
    (GOOD.encode("utf-16-le"), "line 1: not valid JSON"),
    (GOOD.encode("utf-32"), "line 1: byte 1 is not UTF-8"),
    (GOOD.encode() + "{\"problem\": \"数\", \"answer\": \"2\"}\n".encode("gb18030"), "line 2: byte 14 is not UTF-8"),
    (b"\x00" * 100, "line 1: not valid JSON"),
    (b"PK\x03\x04 a zip file \xff", "line 1: byte 17 is not UTF-8"),
    (GOOD + "null\n", "line 2: expected an object with 'problem' and 'answer', got NoneType"),
    (GOOD + '"text"\n', "line 2: expected an object with 'problem' and 'answer', got str"),
    (GOOD + '{"problem": {"a": 1}, "answer": "2"}\n', "line 2: field 'problem' must be text, not {\"a\": 1}"),
    (GOOD + '{"problem": ["a"], "answer": "2"}\n', "line 2: field 'problem' must be text"),
    (GOOD + '{"problem": "a", "answer": {}}\n', "line 2: field 'answer' must be text, not {}"),
    (GOOD + '{"problem": "a", "answer": -Infinity}\n', "line 2: field 'answer' is not a finite number"),
    (GOOD + '{"problem": "a\\ud800", "answer": "2"}\n', "line 2: field 'problem' holds half of a surrogate pair"),
    (GOOD + '{"answer": "2"}\n', "line 2: no field 'problem' (there are: 'answer')"),
    (GOOD + "{}\n", "line 2: no field 'problem' (there are: none)"),
    (GOOD.strip() + GOOD, "line 1: not valid JSON (Extra data)"),
    ('[{"problem": "a", "answer": "2"}]', "line 1: expected an object"),
])
def test_bad_files(tmp_path, content, message):
    with pytest.raises(UserError) as error:
        data.read_jsonl(problems(tmp_path, content))
    assert message in str(error.value) and "p.jsonl" in str(error.value) and "\n" not in str(error.value)


def test_a_folder_in_place_of_a_file(tmp_path):
    with pytest.raises(UserError, match="Is a directory"):
        data.read_jsonl(str(tmp_path))


def in_little_memory(code: str) -> str:
    """Standard output of python code that may take 64 MiB more than its imports."""
    limit = "import resource, sys; from oar import data; from oar.errors import UserError\n" \
            "used = int(open('/proc/self/statm').read().split()[0]) * 4096; resource.setrlimit(resource.RLIMIT_AS, (used + (192 << 20),) * 2)\n"
    done = subprocess.run([sys.executable, "-c", limit + code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS") or sys.platform != "linux", reason="needs Linux's address space limit")
def test_files_of_thousands_of_megabytes_are_read_line_by_line(tmp_path):
    """4 GiB (sparse) behind good lines: the first problems, and a fault on line 3, come without reading on."""
    path = problems(tmp_path, GOOD * 2 + '{"problem": 1}\n')
    with open(path, "r+b") as file:
        file.truncate(4 << 30)
    code = f"print(len(data.read_jsonl({path!r}, limit=2)))\ntry: data.read_jsonl({path!r})\nexcept UserError as e: print(e)"
    assert in_little_memory(code) == f"2\n{path}, line 3: no field 'answer' (there are: 'problem')\n"


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS") or sys.platform != "linux", reason="needs Linux's address space limit")
def test_a_line_without_end_is_refused(tmp_path):
    path = problems(tmp_path, GOOD)
    with open(path, "r+b") as file:
        file.truncate(4 << 30)
    assert in_little_memory(f"try: data.read_jsonl({path!r})\nexcept UserError as e: print(e)") == f"{path}, line 2: longer than 64 MiB\n"


# --------------------------------------------------------------------------------------------------------------------
# flags

@pytest.mark.parametrize("argv, message", [
    ("--method magic", "argument --method: invalid choice: 'magic'"), ("--probe first", "argument --probe: invalid choice"),
    ("--device tpu", "argument --device: invalid choice: 'tpu'"), ("--dtype float8", "argument --dtype: invalid choice"),
    ("--gate none", "argument --gate: invalid choice"), ("--loss-norm mean", "argument --loss_norm/--loss-norm: invalid choice"),
    ("--steps ten", "argument --steps: invalid int value: 'ten'"), ("--steps 1.5", "argument --steps: invalid int value"),
    ("--lr", "argument --lr: expected one argument"), ("--bogus 1", "unknown argument --bogus"),
    ("--group-size 1", "--group-size must be at least 2"), ("--group-size 10000000", "--group-size must be at most 10,000"),
    ("--steps 0", "--steps must be positive, got 0"), ("--steps -3", "--steps must be positive, got -3"),
    ("--steps 1000000000", "--steps must be at most 1,000,000, got 1000000000"), ("--prompts-per-step 0", "--prompts-per-step must be positive"),
    ("--lr -1", "--lr must be positive, got -1.0"), ("--lr 0", "--lr must be positive"), ("--lr nan", "--lr must be positive, got nan"),
    ("--lr inf", "--lr must be"), ("--lr 30", "--lr must be at most 1, got 30.0"), ("--temperature 0", "--temperature must be positive"),
    ("--temperature -1", "--temperature must be positive"), ("--temperature inf", "--temperature must be"), ("--clip-low -0.1", "--clip-low must be at least 0"),
    ("--clip-high inf", "--clip-high must be finite, got inf"), ("--kl-beta nan", "--kl-beta must be"), ("--kl-beta -1", "--kl-beta must be at least 0"),
    ("--threshold 1.5", "--threshold must be between 0 and 1"), ("--floor -1", "--floor must be between 0 and 1"),
    ("--boost inf", "--boost must be"), ("--noise-std 0", "--noise-std must be positive"), ("--max-skipped 0", "--max-skipped must be positive, got 0"),
    ("--tokens-per-pass 0", "--tokens-per-pass must be positive"), ("--save-every 0", "--save-every must be positive"),
    ("--validation-size -1", "--validation-size must be at least 0"),
    ("--eval-every 4 --validation-size 0", "--eval-every 4 with --validation-size 0: there is nothing to validate on"),
    ("--max-new-tokens 0", "--max-new-tokens must be positive"),
    ("--max-new-tokens 600", "--instructions 4 and --max-new-tokens 600 do not fit the context together"),
    ("--instructions 200", "--instructions 200 and --max-new-tokens 80 do not fit the context together"),
    ("--data p.jsonl", "--model lab with --data p.jsonl: the lab's policy and the lab's problems go together only"),
    ("--model ./nowhere", "--model ./nowhere: no such folder"), ("--model nowhere.gguf", "--model nowhere.gguf: no such file"),
    ("--resume nowhere", "--resume nowhere: cannot read its config.json"),
])
def test_flags_of_train(tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--quiet", *([] if "--resume" in argv else ["--out", "run"]), *argv.split()])
    with pytest.raises(UserError) as error:
        train.main()
    assert str(error.value).startswith(message) and "\n" not in str(error.value) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content, message", [("[]", "method"), ("{", "cannot read its config.json"), ('["a"]', "cannot read its config.json"),
                                              ("", "cannot read its config.json")])
def test_a_damaged_config_is_refused(tmp_path, monkeypatch, content, message):
    (tmp_path / "config.json").write_text(content)
    monkeypatch.setattr(sys, "argv", ["train.py", "--resume", str(tmp_path), "--model", "./nowhere"])
    with pytest.raises(UserError):
        train.main()


@pytest.mark.parametrize("argv, message", [("--samples two", "argument --samples: invalid int value: 'two'"), ("--dtype int4", "argument --dtype: invalid choice"),
                                           ("--device tpu", "argument --device: invalid choice")])
def test_flags_of_evaluate(monkeypatch, argv, message):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *argv.split()])
    with pytest.raises(UserError, match=message):
        evaluate.main()


def test_the_command_prints_one_line():
    done = subprocess.run([sys.executable, "train.py", "--method", "magic"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("error: argument --method: invalid choice: 'magic'")
    assert done.stderr.count("\n") == 1


# --------------------------------------------------------------------------------------------------------------------
# models and problems that do not fit each other

def model_folder(tmp_path, tokenizer, vocabulary, positions=64):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                                 max_position_embeddings=positions, eos_token_id=None, bos_token_id=None, pad_token_id=None)).save_pretrained(tmp_path / "m")
    if tokenizer:
        tokenizer.save_pretrained(tmp_path / "m")
    return ["--model", str(tmp_path / "m")]


def run(tmp_path, *argv):
    sys.argv = ["train.py", "--quiet", *"--steps 1 --prompts-per-step 2 --group-size 4 --max-new-tokens 8 --device cpu".split(), "--validation-size", "1",
                "--out", str(tmp_path / "run"), *argv]
    train.main()
    return checkpoint.read_records(tmp_path / "run" / "metrics.jsonl")[-1]


def test_no_chat_template_no_special_tokens_and_a_larger_vocabulary_train(tmp_path):
    """Ids that the tokenizer does not know are sampled too: more than half of this vocabulary."""
    argv = model_folder(tmp_path, word_tokenizer(), 50)
    line = run(tmp_path, *argv, "--data", problems(tmp_path, "".join(json.dumps({"problem": f"{i} 1+1?", "answer": "U"}) + "\n" for i in range(5))))
    assert line["skipped"] is None and line["length"] == 8 and line["truncated_share"] == 1


def test_a_larger_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match="the tokenizer has .* tokens but the model only 5"):
        run(tmp_path, *model_folder(tmp_path, word_tokenizer(), 5), "--data", problems(tmp_path, GOOD))
    assert not (tmp_path / "run").exists()


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError) as error:
        run(tmp_path, *model_folder(tmp_path, None, 50), "--data", problems(tmp_path, GOOD))
    assert str(error.value).startswith(f"--model {tmp_path / 'm'}: cannot be loaded: ") and "\n" not in str(error.value)


@pytest.mark.parametrize("harm", [lambda f: f.write_bytes(f.read_bytes()[:500]), lambda f: f.write_bytes(b"not weights"), lambda f: f.unlink()])
def test_damaged_weights_are_one_sentence(tmp_path, harm):
    argv = model_folder(tmp_path, word_tokenizer(), 50)
    harm(tmp_path / "m" / "model.safetensors")
    with pytest.raises(UserError) as error:
        run(tmp_path, *argv, "--data", problems(tmp_path, GOOD))
    assert str(error.value).startswith(f"--model {tmp_path / 'm'}: cannot be loaded: ") and "\n" not in str(error.value)


def test_prompts_beyond_the_context_are_counted_and_skipped(tmp_path, capsys):
    argv = model_folder(tmp_path, word_tokenizer(), 50)
    rows = [{"problem": "1+1? " + "U " * (60 if i in (2, 5) else i), "answer": "2", "id": str(i)} for i in range(7)]
    policy = models.load(argv[1], torch.device("cpu"))
    config = train.Config(data=problems(tmp_path, "".join(json.dumps(r) + "\n" for r in rows)), problem_field="problem", validation_size=1,
                          prompts_per_step=2, max_new_tokens=8)
    examples, held_out, note = train.load_examples(config, policy)
    assert note == "4 problems, 1 held out, 2 too long and left out"
    assert {e.id for e in examples + held_out} == {"0", "1", "3", "4", "6"} and all(e.problem in {r["problem"] for r in rows} for e in examples)
    config.prompts_per_step = 5
    with pytest.raises(UserError, match="4 problems are left for training .2 of 7 do not fit the context, 1 are held out., fewer than --prompts-per-step 5"):
        train.load_examples(config, policy)


def test_quiet_silences_the_bar_of_a_gguf_file(monkeypatch, capsys):
    from transformers import modeling_gguf_pytorch_utils as reader
    monkeypatch.setattr(reader, "tqdm", reader.tqdm)                                 # put back afterwards
    list(reader.tqdm(range(3), desc="Converting"))
    assert "Converting" in capsys.readouterr().err
    models.silence_gguf_bar()
    assert list(reader.tqdm(range(3), desc="Converting")) == [0, 1, 2] and capsys.readouterr().err == ""


def test_words_of_the_lab(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "m")
    lab.build_tokenizer().save_pretrained(tmp_path / "m")
    with pytest.raises(UserError, match="the lab's policy and the lab's problems go together only"):
        run(tmp_path, "--model", str(tmp_path / "m"), "--data", problems(tmp_path, GOOD))

"""The two-register lab: a synthetic chain-of-thought task whose pivotal tokens are known by construction.

A problem is a small program on two registers, all arithmetic modulo 10; the completion states one step per
instruction, padded with filler words that mean nothing, and closes with the two final values:

    prompt       x 3 y 5 ; x + 4 ; y * x ; x - y ?
    completion   hmm so x : 3 + 4 = 7 ; well now y : 5 * 7 = 5 ; and then x : 7 - 5 = 2 ; #### 2 5 <eos>

Why this task.  The answer has two tokens fed by two chains of values, so the outcome probes really differ.
Which tokens matter is known: digits carry values (pivotal), fillers are random words without effect, the rest is
fixed form; and slicing the program tells which steps matter at all (`x * 0` makes the past of x irrelevant).
Difficulty is a dial: number of instructions, fillers per step, sloppiness.

1. The number of fillers before a step is fixed and only their choice is random: filler is then pure nuisance, and
   greedy decoding is well defined.
2. The warm-start policy (about 0.65 M parameters) is trained on *sloppy* traces: each result is wrong with
   probability 0.2 and the error carries through.  It knows arithmetic but is careless, which is what RL can mend.
3. Train, validation and test problems are disjoint by construction: a hash of the program text decides the split.

    python -m oar.lab --rebuild      # trains the warm-start policy again, in oar/lab_policy (8 minutes, two cores)
    python -m oar.lab                # prints its greedy and sampled accuracy and one labelled completion
"""
import random
import zlib
from pathlib import Path
from typing import NamedTuple

POLICY_DIR = Path(__file__).parent / "lab_policy"
INSTRUCTIONS, FILLERS, SLOPPINESS = 4, 8, 0.2     # the setting the warm-start policy was built for

PAD, EOS, CONCLUSION = "<pad>", "<eos>", "####"
DIGITS = [str(d) for d in range(10)]
REGISTERS, OPERATORS = ["x", "y"], ["+", "-", "*"]
FORM_WORDS = REGISTERS + OPERATORS + [":", "=", ";", "?", CONCLUSION]
FILLER_WORDS = "well so now then let us see okay next hmm right thus indeed and".split()
VOCABULARY = [PAD, EOS] + DIGITS + FORM_WORDS + FILLER_WORDS


class Instruction(NamedTuple):
    register: str      # "x" or "y": the register that is read and written
    operator: str      # "+", "-" or "*"
    operand: str       # a digit, or the other register


class Problem(NamedTuple):
    """Initial register values and the program run on them."""
    x: int
    y: int
    program: tuple[Instruction, ...]

    def text(self) -> str:
        steps = "".join(f"; {i.register} {i.operator} {i.operand} " for i in self.program)
        return f"x {self.x} y {self.y} {steps}?"


class Step(NamedTuple):
    """One executed instruction, `register : left operator right = result`."""
    register: str
    left: int
    operator: str
    right: int
    result: int


class TokenRole(NamedTuple):
    """What a completion token is for.

    kind: "operand" or "result" (digits of a step: the pivotal tokens), "form" (fixed syntax), "filler", or "answer"
    (the marker and all after it).  step: index of the instruction it belongs to, -1 for the answer.  matters: whether
    some other result of that step would change the final values (see `steps_that_matter`); False for filler and form.
    """
    kind: str
    step: int
    matters: bool


# --------------------------------------------------------------------------------------------------------------------
# problems

def parse_problem(text: str) -> Problem:
    """Inverse of `Problem.text`. Raises ValueError on anything else."""
    words = text.split()
    if len(words) < 5 or words[0] != "x" or words[2] != "y" or words[-1] != "?":
        raise ValueError(f"not a lab problem: {text!r}")
    body = words[4:-1]
    program = tuple(Instruction(*body[i + 1:i + 4]) for i in range(0, len(body), 4))
    return Problem(int(words[1]), int(words[3]), program)


def split_of(problem: Problem) -> str:
    """Split of a problem: "train" (8 in 10), "validation" or "test" (1 in 10 each), by a hash of its text."""
    bucket = zlib.crc32(problem.text().encode()) % 10
    return {8: "validation", 9: "test"}.get(bucket, "train")


def random_problem(rng: random.Random, instructions: int = INSTRUCTIONS, split: str = "train") -> Problem:
    """A uniformly drawn problem of the given split; operands are a digit or the other register with equal chance."""
    while True:
        program = []
        for _ in range(instructions):
            register = rng.choice(REGISTERS)
            other = "y" if register == "x" else "x"
            operand = rng.choice(DIGITS) if rng.random() < 0.5 else other
            program.append(Instruction(register, rng.choice(OPERATORS), operand))
        problem = Problem(rng.randrange(10), rng.randrange(10), tuple(program))
        if split_of(problem) == split:
            return problem


def apply(operator: str, left: int, right: int) -> int:
    """left operator right, modulo 10."""
    return {"+": left + right, "-": left - right, "*": left * right}[operator] % 10


def execute(problem: Problem, results: dict[int, int] | None = None) -> tuple[list[Step], str]:
    """Run the program; `results` forces the result of some steps (index -> digit), and the error carries through.

    Returns the steps and the final values as the answer text, "x y".
    """
    values, steps = {"x": problem.x, "y": problem.y}, []
    for index, (register, operator, operand) in enumerate(problem.program):
        left = values[register]
        right = values[operand] if operand in values else int(operand)
        result = apply(operator, left, right)
        if results and index in results:
            result = results[index]
        values[register] = result
        steps.append(Step(register, left, operator, right, result))
    return steps, f"{values['x']} {values['y']}"


def steps_that_matter(problem: Problem, results: dict[int, int] | None = None) -> list[bool]:
    """Per step: would some other result of it change the final values, all later steps being computed correctly?

    `results` gives the results already written (a sampled completion may be wrong); a step is judged with the results
    before it as written.  This is program slicing by trial: x * 0 makes every earlier step on x irrelevant.
    """
    matter = []
    for step in range(len(problem.program)):
        before = {i: r for i, r in (results or {}).items() if i < step}
        finals = {execute(problem, before | {step: digit})[1] for digit in range(10)}
        matter.append(len(finals) > 1)
    return matter


# --------------------------------------------------------------------------------------------------------------------
# completions

def write_trace(problem: Problem, rng: random.Random, fillers: int = FILLERS, sloppiness: float = SLOPPINESS) -> str:
    """A worked completion: `fillers` random words before each step, each result wrong with probability `sloppiness`."""
    wrong = {}
    for index in range(len(problem.program)):
        if rng.random() < sloppiness:
            right = execute(problem, wrong)[0][index].result
            wrong[index] = rng.choice([d for d in range(10) if d != right])
    steps, answer = execute(problem, wrong)
    words = []
    for step in steps:
        words += rng.choices(FILLER_WORDS, k=fillers)
        words += f"{step.register} : {step.left} {step.operator} {step.right} = {step.result} ;".split()
    return " ".join(words + [CONCLUSION, answer, EOS])


def label_tokens(problem: Problem, words: list[str]) -> list[TokenRole]:
    """The role of every token of a completion, sampled or written (`words` = its tokens; one token is one word).

    Steps are told apart by their closing ";".  A digit after "=" is a result, any other digit of a step an operand;
    in a malformed completion the labels follow the same rules as far as they go.
    """
    roles, step, previous, results = [], 0, "", {}
    in_answer = False
    for word in words:
        in_answer = in_answer or word in (CONCLUSION, EOS, PAD)
        if in_answer:
            roles.append(("answer", -1))
        elif word in FILLER_WORDS:
            roles.append(("filler", step))
        elif word in DIGITS:
            roles.append(("result" if previous == "=" else "operand", step))
            if previous == "=":
                results.setdefault(step, int(word))
        else:
            roles.append(("form", step))
            step += word == ";"
        previous = word
    matter = dict(enumerate(steps_that_matter(problem, results)))
    return [TokenRole(kind, step, kind in ("operand", "result") and matter.get(step, False)) for kind, step in roles]


def role_mask(roles: list[list[TokenRole]], width: int, wanted):
    """Where `wanted(role)` is true: roles of each completion's tokens -> (B, width) bool, False behind their end."""
    import torch
    return torch.tensor([[wanted(role) for role in row] + [False] * (width - len(row)) for row in roles])


# --------------------------------------------------------------------------------------------------------------------
# tokenizer and warm-start policy

def build_tokenizer():
    """Word-level tokenizer of the lab's vocabulary, as an ordinary `PreTrainedTokenizerFast` (pad and eos set)."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=EOS,
                                   clean_up_tokenization_spaces=False, model_max_length=512)


def is_lab(tokenizer) -> bool:
    """Whether a tokenizer is the lab's (a checkpoint folder of a lab run is recognised by its vocabulary)."""
    return set(tokenizer.get_vocab()) == set(VOCABULARY)


def build_model(hidden: int = 128, layers: int = 3, heads: int = 4, seed: int = 0):
    """A randomly initialised Llama of about 0.65 M parameters over the lab's vocabulary.

    Llama and not Qwen2, since AutoTokenizer gives every Qwen2 folder Qwen2's own tokenizer (transformers 5.24).
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY), hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=512, tie_word_embeddings=True,
        pad_token_id=VOCABULARY.index(PAD), eos_token_id=VOCABULARY.index(EOS), bos_token_id=None)
    return LlamaForCausalLM(config)


def rebuild(out: Path, instructions: int, fillers: int, sloppiness: float, steps: int, hidden: int, layers: int) -> None:
    """Train the warm-start policy by supervised learning on sloppy traces and save it, in half precision, to `out`.

    AdamW at 2e-3 with warm-up and cosine decay, 128 fresh traces a step: programs of one and two instructions for the
    first 300 steps (arithmetic is learnt there), then of the full length.
    """
    import torch
    from tqdm import tqdm
    tokenizer, model, rng = build_tokenizer(), build_model(hidden, layers), random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps, pct_start=0.05)
    bar = tqdm(range(steps), desc="warm start")
    for step in bar:
        length = 1 + step % 2 if step < 300 else instructions
        problems = [random_problem(rng, length) for _ in range(128)]
        prompts = tokenizer([p.text() for p in problems], return_tensors="pt").input_ids          # (B, P) equal lengths
        traces = [write_trace(p, rng, fillers, sloppiness) for p in problems]
        completions = tokenizer(traces, return_tensors="pt").input_ids                            # (B, T) equal lengths
        logits = model(torch.cat([prompts, completions], 1)).logits[:, prompts.shape[1] - 1:-1]   # (B, T, V)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), completions.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    model.half().save_pretrained(out)
    tokenizer.save_pretrained(out)


def report(policy_dir: Path, instructions: int, count: int = 400) -> None:
    """Print a policy's greedy and sampled accuracy on validation problems, and one labelled completion."""
    import torch
    from oar import data, models
    from oar.batch import random_stream
    from oar.rollout import draw_uniforms, sample
    from oar.verify import is_correct
    policy = models.load(str(policy_dir), torch.device("cpu"))
    examples = data.lab_examples("validation", count, instructions, seed=0)
    prompts = [data.encode_prompt(policy, e.problem) for e in examples]
    longest = 4 * instructions * (FILLERS + 8)
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        batch = sample(policy, prompts, 1, longest, draw_uniforms(count, longest, random_stream(0)), temperature)
        right = sum(is_correct(text, e.answer) for text, e in zip(batch.texts, examples))
        print(f"{name:<8} accuracy {right / count:.3f} on {count} validation problems of {instructions} instructions")
    print(examples[0].problem)
    words = policy.tokenizer.convert_ids_to_tokens(batch.row_ids(0))
    for word, role in zip(words, label_tokens(parse_problem(examples[0].problem), words)):
        print(f"  {word:<8}{role.kind}{', matters' if role.matters else ''}")


def main() -> None:
    import argparse
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rebuild", action="store_true", help="train the warm-start policy and write it to --out")
    parser.add_argument("--out", type=Path, default=POLICY_DIR, help="policy folder")
    parser.add_argument("--instructions", type=int, default=INSTRUCTIONS, help="instructions per program")
    parser.add_argument("--fillers", type=int, default=FILLERS, help="filler words before each step")
    parser.add_argument("--sloppiness", type=float, default=SLOPPINESS, help="probability of a wrong result per step")
    parser.add_argument("--steps", type=int, default=1000, help="training steps")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size")
    parser.add_argument("--layers", type=int, default=3, help="layers")
    args = parser.parse_args()
    if args.rebuild:
        rebuild(args.out, args.instructions, args.fillers, args.sloppiness, args.steps, args.hidden, args.layers)
    report(args.out, args.instructions)


if __name__ == "__main__":
    main()

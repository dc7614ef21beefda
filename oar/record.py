"""What a training step and a run leave behind: a line of metrics.jsonl, a few samples, the closing table."""
import math
from pathlib import Path

from oar import checkpoint, lab, metrics


def lab_roles(policy, batch, owners) -> list[list[lab.TokenRole]]:
    """Known role of every token of every completion."""
    return [lab.label_tokens(lab.parse_problem(e.problem), policy.tokenizer.convert_ids_to_tokens(batch.row_ids(row)))
            for row, e in enumerate(owners)]


def describe(batch, rewards, advantages, credit, roles, group_size: int) -> dict[str, float]:
    """The rollout's and the credit's metrics (README explains each)."""
    mask, scored, kept = batch.completion_mask, advantages != 0, rewards.isfinite()
    reasoning = credit.reasoning_mask & scored[:, None]
    numbers = {"reward": metrics.masked_mean(rewards, kept), "dropped": int((~kept).sum()),
              "informative_share": metrics.informative_share(advantages, group_size),
              "length": mask.sum(1).float().mean().item(), "truncated_share": 1 - batch.finished.float().mean().item(),
              "entropy": metrics.masked_mean(batch.entropy, mask),
              "ess_ratio": metrics.ess_ratio(credit.weights, reasoning), "top10_mass": metrics.top_mass(credit.token_advantages, mask)}
    if roles:
        for name, kinds in (("filler", ["filler"]), ("pivotal", ["operand", "result"])):
            at = lab.role_mask(roles, mask.shape[1], lambda role: role.kind in kinds).to(mask.device)
            numbers[f"entropy_{name}"] = metrics.masked_mean(batch.entropy, at)
    return numbers


def finite(numbers: dict) -> dict:
    """The same record with NaN (nothing to average) and infinities as None: JSON has no word for them."""
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in numbers.items()}


def skipped_in_a_row(file: Path) -> int:
    """Steps at the end of the metrics that were skipped for a number that is not finite."""
    records, count = checkpoint.read_records(file), 0
    while count < len(records) and records[-1 - count].get("skipped"):
        count += 1
    return count


def postfix(line: dict) -> str:
    """What the bar shows of a step."""
    return ", ".join(f"{name} {'-' if line[name] is None else format(line[name], form)}"
                     for name, form in (("reward", ".2f"), ("length", ".0f"), ("entropy", ".2f")))


def remarks(line: dict, max_new_tokens: int) -> list[str]:
    """What a user should hear about a step at once."""
    said = []
    if line["skipped"]:
        said.append(f"step {line['step']}: its {line['skipped']} is not finite; skipped, and the weights stay as they were before it")
    if line["truncated_share"] == 1:
        said.append(f"step {line['step']}: every completion was cut at --max-new-tokens {max_new_tokens}; none could end by itself")
    return said


def describe_samples(policy, batch, owners, rewards, advantages, credit, step: int) -> list[dict]:
    """The best and the worst completion of the step with their per-token weights."""
    rows = sorted({int(rewards.nan_to_num(nan=-math.inf).argmax()), int(rewards.nan_to_num(nan=math.inf).argmin())})
    return [finite({"step": step, "id": owners[row].id, "problem": owners[row].problem, "gold": owners[row].answer, "text": batch.texts[row],
             "reward": rewards[row].item(), "advantage": advantages[row].item(), "finished": bool(batch.finished[row]),
             "tokens": [policy.tokenizer.decode([token]) for token in batch.row_ids(row)],
             "weights": [round(w, 4) for w in credit.weights[row][batch.completion_mask[row]].tolist()],
             "importance": [float(f"{s:.4g}") for s in credit.importance[row][batch.completion_mask[row]].tolist()]}) for row in rows]


def summarise(records: list[dict]) -> None:
    """Print the last table: accuracy before and after, time split, memory."""
    steps = [r for r in records if "reward" in r]
    first, last = records[0], records[-1]
    print(f"\n{'validation accuracy':<22}{'before':>8}{'after':>8}")
    for name in ("greedy", "sampled"):
        if f"validation_{name}" in first and f"validation_{name}" in last:
            print(f"{name:<22}{first[f'validation_{name}']:>8.3f}{last[f'validation_{name}']:>8.3f}")
    rewards = [r["reward"] for r in steps if r["reward"] is not None]
    print(f"{'training reward':<22}{rewards[0]:>8.3f}{rewards[-1]:>8.3f}" if rewards else "no completion of this run had a reward")
    for name, what in (("skipped", "steps skipped for a number that is not finite"), ("dropped", "completions without a reward, left out"),
                       ("memory_halvings", "halvings of a budget, for lack of memory")):
        count = sum(1 if isinstance(r.get(name), str) else r.get(name) or 0 for r in steps)
        if count:
            print(f"{count} {what}")
    total = {p: sum(r[f"seconds_{p}"] for r in steps) for p in ("rollout", "attribution", "update")}
    print("time per step          " + ", ".join(f"{p} {t / len(steps):.2f} s ({t / sum(total.values()):.0%})" for p, t in total.items()))
    print(f"peak memory            {max(r['memory_mb'] for r in steps):.0f} MiB")

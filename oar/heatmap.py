"""Token weights made visible: in the terminal, as one self-contained HTML page, and as a PNG.

A weight of 1 is plain, below 1 blue, above 1 orange.  Model output is untrusted text: `visible` turns every control,
format and surrogate character (ANSI escapes, bidirectional overrides, line separators) into harmless marks, and the page escapes
HTML, loads nothing from elsewhere and forbids it by a content security policy.
"""
import html
import os
import shutil
import unicodedata
import warnings
from pathlib import Path

from oar.attribution import Attribution

BLUE, ORANGE = (58, 118, 196), (240, 130, 30)
TOKENS_PER_PANEL = 72      # of the PNG
PANELS = 8                 # of the PNG; longer completions are cut there (the page shows them whole)
MARKS = {"\n": "⏎", "\t": "⇥"}


def visible(text: str) -> str:
    """Text without any character that could act: control characters become marks or \\x.. escapes."""
    def safe(c: str) -> str:
        if c in MARKS:
            return MARKS[c]
        return f"\\x{ord(c):02x}" if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") else c
    return "".join(map(safe, text))


def colour(weight: float) -> tuple[int, int, int]:
    """Background of a token: white at 1, full blue at 0, full orange at 2 and above."""
    strength = max(-1.0, min(1.0, weight - 1))
    full = ORANGE if strength > 0 else BLUE
    return tuple(round(255 + (channel - 255) * abs(strength) * 0.85) for channel in full)


# --------------------------------------------------------------------------------------------------------------------
# terminal

def terminal(result: Attribution, colours: bool, width: int | None = None) -> str:
    """One line (wrapped) per method, its tokens coloured by weight; causal tokens are underlined.

    Without colours, tokens of weight 1.25 or more stand in [brackets] and causal ones end in *.
    """
    width = width or shutil.get_terminal_size((120, 24)).columns
    indent = max(map(len, [*result.weights, "problem"])) + 2
    lines = [f"{'problem':<{indent}}{visible(result.problem)}", f"{'answer':<{indent}}{visible(result.answer)}"]
    for method, weights in result.weights.items():
        line, used, column = f"{method:<{indent}}", "", 0
        for t, weight in enumerate(weights):
            text = visible(result.tokens[t]) or "·"
            causal = bool(result.causal and result.causal[t])
            if not colours:
                core = text.strip() or "·"
                text = " " * text.startswith(" ") + (f"[{core}]" if weight >= 1.25 else core) + "*" * causal
            if column and column + len(text) > width - indent:
                line, used, column = line + used + "\n" + " " * indent, "", 0
            used += paint(text, weight, causal) if colours else text
            column += len(text)
        lines.append(line + used)
    return "\n".join(lines)


def paint(text: str, weight: float, causal: bool) -> str:
    red, green, blue = colour(weight)
    return f"\x1b[30;48;2;{red};{green};{blue}m{chr(27) + '[1;4m' if causal else ''}{text}\x1b[0m"


def wants_colours(stream, choice: str) -> bool:
    """"always", "never", or "auto": on a terminal, unless NO_COLOR is set."""
    return choice == "always" or (choice == "auto" and stream.isatty() and not os.environ.get("NO_COLOR"))


# --------------------------------------------------------------------------------------------------------------------
# page

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:1180px;padding:24px;color:#1b1f24;background:#fff}
h1{font-size:21px;margin:0 0 4px} h2{font-size:15px;margin:34px 0 2px} .note,.legend{color:#57606a;font-size:13px}
.problem{white-space:pre-wrap;margin:2px 0 10px} nav{position:sticky;top:0;background:#fffd;padding:10px 0;z-index:2}
nav label{display:inline-block;border:1px solid #d0d7de;border-radius:6px;padding:2px 10px;margin:0 4px 4px 0;cursor:pointer;font-size:13px}
nav input{position:absolute;opacity:0} nav label:has(:checked){background:#1b1f24;color:#fff} nav label:has(:focus-visible){outline:2px solid #f0821e}
.row{display:grid;grid-template-columns:92px 1fr;gap:12px;padding:7px 0;border-top:1px solid #eaeef2} .row>b{font:600 13px/1.9 ui-monospace,monospace}
.tokens{font:14px/1.95 ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere} .tokens span{position:relative;white-space:pre-wrap;border-radius:3px;padding:2px 0}
.causal{border-bottom:3px solid #c1121f} .off{color:#8c959f} .same{outline:2px solid #1b1f24}
.tokens span:hover::after{content:attr(data-tip);position:absolute;left:0;top:105%;z-index:3;white-space:pre;background:#1b1f24;color:#fff;
font:12px/1.45 system-ui,sans-serif;padding:6px 9px;border-radius:6px;pointer-events:none} .swatch{display:inline-block;padding:0 8px;border-radius:3px;margin-right:6px;color:#1b1f24}
"""
SCRIPT = """
const rows=[...document.querySelectorAll('.row')];
document.querySelectorAll('nav input').forEach(i=>i.addEventListener('change',()=>rows.forEach(r=>{r.hidden=i.value!=='*'&&r.dataset.method!==i.value})));
document.addEventListener('mouseover',e=>{document.querySelectorAll('.same').forEach(s=>s.classList.remove('same'));
const s=e.target.closest('.tokens span');if(s)s.closest('section').querySelectorAll(`[data-t="${s.dataset.t}"]`).forEach(o=>o.classList.add('same'))});
"""


def page(results: list[Attribution], title: str, oracle: str) -> str:
    """A self-contained HTML page: methods side by side or one at a time; hover shows score, weight and role."""
    methods = list(results[0].weights)
    choices = "".join(f'<label><input type="radio" name="method" value="{value}"{" checked" * (value == "*")}>{name}</label>'
                      for value, name in [("*", "side by side"), *((html.escape(m), html.escape(m)) for m in methods)])
    legend = "".join(f'<span class="swatch" style="background:rgb{colour(w)}">{w:g}</span>' for w in (0.25, 0.5, 1, 1.5, 2))
    marks = f'; <span class="causal">underlined</span>: causal by the oracle "{oracle}"' if oracle != "none" else ""
    body = "".join(section(result, i) for i, result in enumerate(results, 1))
    return (f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
            f"<title>{html.escape(visible(title))}</title><style>{STYLE}</style></head><body><h1>{html.escape(visible(title))}</h1>"
            f'<div class="legend">weight {legend} grey: not reasoning, weight 1{marks}</div>'
            f"<nav>{choices}</nav>{body}<script>{SCRIPT}</script></body></html>\n")


def section(result: Attribution, number: int) -> str:
    rows = "".join(f'<div class="row" data-method="{html.escape(method)}"><b>{html.escape(method)}</b><div class="tokens">'
                   + "".join(span(result, method, t) for t in range(len(result.tokens))) + "</div></div>" for method in result.weights)
    return (f'<section><h2>completion {number}, answer {html.escape(visible(result.answer))}</h2>'
            f'<div class="problem note">{html.escape(visible(result.problem))}</div>{rows}</section>')


def span(result: Attribution, method: str, t: int) -> str:
    weight, part, causal = result.weights[method][t], result.parts[t], bool(result.causal and result.causal[t])
    tip = [f"token {t}: {visible(result.tokens[t]).strip() or '(part of a character or a blank)'}", f"score {result.importance[method][t]:.4g}",
           f"weight {weight:.3f}", part + (f", {result.roles[t]}" if result.roles[t] and part == "reasoning" else "")]
    tip += [f"{'causal' if causal else 'not causal'}"] if result.causal is not None and part == "reasoning" else []
    classes = " ".join(name for name, applies in (("causal", causal), ("off", part != "reasoning")) if applies)
    text, line_break = html.escape(visible(result.tokens[t]) or "·"), "<br>" * ("\n" in result.tokens[t])
    return f'<span data-t="{t}" class="{classes}" style="background:rgb{colour(weight)}" data-tip="{html.escape(chr(10).join(tip))}">{text}</span>{line_break}'


# --------------------------------------------------------------------------------------------------------------------
# picture

def picture(result: Attribution, title: str, path: Path) -> None:
    """A PNG: methods by tokens, in panels of neighbouring tokens; triangles above mark the causal ones."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    methods, shown = list(result.weights), min(len(result.tokens), TOKENS_PER_PANEL * PANELS)
    panels = -(-shown // TOKENS_PER_PANEL)
    columns = min(shown, TOKENS_PER_PANEL)
    figure, axes = plt.subplots(panels, 1, figsize=(1.6 + 0.2 * columns, 0.5 + panels * (1.2 + 0.26 * len(methods))), squeeze=False, layout="constrained")
    for panel, axis in enumerate(axes[:, 0]):
        tokens = range(panel * TOKENS_PER_PANEL, min((panel + 1) * TOKENS_PER_PANEL, shown))
        axis.imshow([[colour(result.weights[m][t]) for t in tokens] for m in methods], aspect="auto")
        axis.set_yticks(range(len(methods)), methods, fontsize=9, family="monospace")
        labels = [visible(result.tokens[t]).strip()[:14] or "·" for t in tokens]
        axis.set_xticks(range(len(tokens)), labels, rotation=90, fontsize=8, family="monospace", parse_math=False)
        axis.set_xlim(-0.5, columns - 0.5)
        axis.set_ylim(len(methods) - 0.5, -1.1)
        axis.set_xticks([x - 0.5 for x in range(len(tokens) + 1)], minor=True)
        axis.set_yticks([y - 0.5 for y in range(len(methods) + 1)], minor=True)
        axis.grid(which="minor", color="white", linewidth=1)
        axis.tick_params(which="both", length=0)
        axis.spines[:].set_visible(False)
        causal = [x for x, t in enumerate(tokens) if result.causal and result.causal[t]]
        axis.plot(causal, [-0.82] * len(causal), "v", color="#c1121f", markersize=4)
        for x, t in enumerate(tokens):
            axis.get_xticklabels()[x].set_color("#8c959f" if result.parts[t] != "reasoning" else "#c1121f" if result.causal and result.causal[t] else "black")
    cut = f" (first {shown} of {len(result.tokens)} tokens)" if shown < len(result.tokens) else ""
    legend = "weight: blue below 1, orange above" + ("; triangles: causal tokens" if result.causal is not None else "")
    figure.suptitle(f"{visible(title)}{cut}\n{legend}", fontsize=9, parse_math=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")      # a character that the font lacks shows as a box
        figure.savefig(path, dpi=130)
    plt.close(figure)

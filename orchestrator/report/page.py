"""The page: one HTML file with its pictures inside, light and dark, readable without this program and without a network."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import Any

from orchestrator.commands.output import duration
from orchestrator.report.collect import RunHistory
from orchestrator.report.style import PHASES
from orchestrator.report.words import CAUSES, count, evidence_lines, outcome
from orchestrator.verify import Verdict
from trainer.rundir.records import Ending


@dataclass(frozen=True)
class Pictures:
    """PNG bytes of one picture on a light and on a dark page, and what it shows, for those who cannot see it."""

    light: bytes
    dark: bytes
    alt: str


def page(run: RunHistory, verdict: Verdict, summary: Mapping[str, Any], pictures: Mapping[str, Pictures]) -> str:
    """The whole document. `pictures`: loss, timeline, coverage."""
    title = f"{run.name}: {'done' if run.done else 'not done'} at step {run.committed_step:,} of {run.target_step:,}"
    sections = [
        _header(run, verdict, summary),
        _figure("Loss", pictures["loss"], _loss_caption(summary)),
        _figure(
            "Timeline",
            pictures["timeline"],
            "One row per start: attempt.start and its device type. Phases are stacked in their natural order from when the start came up;"
            " thin ticks are commits, at their true times.",
        ),
        _endings(run),
        _figure("Coverage", pictures["coverage"], _coverage_caption(run, summary)),
        _proof(run, verdict),
        _words(),
    ]
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title><style>{CSS}</style></head>\n'
        f"<body><main>\n{''.join(sections)}</main></body></html>\n"
    )


def headline(run: RunHistory, verdict: Verdict, summary: Mapping[str, Any]) -> str:
    """The result in one or two sentences, the same on the page and at the end of the demo."""
    interruptions = [e for e in run.endings if e.cause != "completed"]
    causes = len({e.cause for e in interruptions})
    state = (
        f"Done at step {run.committed_step:,}"
        if run.done
        else f"Step {run.committed_step:,} of {run.target_step:,} is committed"
    )
    parts = [f"{state} after {count(len(interruptions), 'interruption')} by {count(causes, 'cause')}."]
    repeated, missed = summary["repeated_instances"], summary["missed_instances"]
    if repeated == 0 and missed == 0:
        parts.append("No instance was read twice in what was committed, and none was skipped.")
    elif repeated is not None:
        parts.append(f"{count(repeated, 'instance')} repeated, {missed:,} missed.")
    until = summary["digest_equal_reference_until_step"]
    if until:
        resize = run.first_resize_step
        why = ", where the number of devices first changed" if resize == until else ""
        if summary["ends_as_reference"]:
            why = ": the same parameters and moments"
            why += f", though the number of devices changed at step {resize:,}" if resize is not None else ""
        parts.append(f"Bit for bit the run that was never interrupted, through step {until:,}{why}.")
    if not verdict.passed:
        failed = ", ".join(check.name for check in verdict.checks if not check.passed)
        parts.append(f"NOT PROVEN: {failed}.")
    return " ".join(parts)


def _header(run: RunHistory, verdict: Verdict, summary: Mapping[str, Any]) -> str:
    began = datetime.fromtimestamp(run.began, UTC).strftime("%Y-%m-%d %H:%M UTC")
    tokens = run.committed_step * run.recipe.global_batch * run.recipe.sequence_length
    redone = summary["redone_steps"]
    redone_note = f"{summary['redone_steps_bitwise_equal']:,} of them bit-equal" if redone else "none was needed"
    tiles = [
        ("committed", f"{run.committed_step:,} / {run.target_step:,}", "steps"),
        ("starts", f"{len(run.starts)}", f"in {count(len(run.specs), 'attempt')}"),
        ("tokens", _short(tokens), f"{run.recipe.global_batch:,} × {run.recipe.sequence_length:,} per step"),
        ("done again", "–" if redone is None else f"{redone:,} steps", redone_note),
        ("wall time", duration(run.seconds), "queueing included"),
        ("proofs", f"{sum(c.passed for c in verdict.checks)} / {len(verdict.checks)}", "passed"),
    ]
    cells = "".join(
        f'<div class="tile"><span>{escape(a)}</span><b>{escape(b)}</b><small>{escape(c)}</small></div>'
        for a, b, c in tiles
    )
    good = "good" if verdict.passed else "bad"
    return (
        f'<header><p class="eyebrow">untildone · run <code>{escape(run.name)}</code> · recipe {escape(run.recipe.name)}'
        f" <code>{run.recipe.fingerprint()[:12]}</code> · began {began}</p>"
        f'<h1 class="{good}">{escape(headline(run, verdict, summary))}</h1></header>\n<div class="tiles">{cells}</div>\n'
    )


def _loss_caption(summary: Mapping[str, Any]) -> str:
    until = summary["loss_equal_reference_until_step"]
    if until is None:
        return "Dotted lines: where each start began."
    resize = summary["first_resize_step"]
    after = (
        " From there on another number of devices adds the same numbers in another order, so the last bits may differ;"
        " each step still reads the same instances."
        if resize is not None and summary["reduction"] == "fast"
        else ""
    )
    if until == 0:
        return "Dotted lines: where each start began."
    return f"Dotted lines: where each start began. Every loss up to step {until:,} has the same 32 bits as the reference's.{after}"


def _coverage_caption(run: RunHistory, summary: Mapping[str, Any]) -> str:
    return (
        f"Step t reads instances order[{run.recipe.global_batch:,}·t … {run.recipe.global_batch:,}·(t+1)) whatever the devices."
        f" A hash of the instance ids that reached the devices was logged with each step and compared with the order:"
        f" {_or_dash(summary['repeated_instances'])} repeated, {_or_dash(summary['missed_instances'])} missed."
        " Steps lost with a start were computed again on the same instances."
    )


def _figure(title: str, picture: Pictures, caption: str) -> str:
    light, dark = (base64.b64encode(data).decode() for data in (picture.light, picture.dark))
    return (
        f'<section><h2>{escape(title)}</h2><figure><picture><source media="(prefers-color-scheme: dark)" srcset="data:image/png;base64,{dark}">'
        f'<img alt="{escape(picture.alt)}" src="data:image/png;base64,{light}"></picture><figcaption>{escape(caption)}</figcaption></figure></section>\n'
    )


def _endings(run: RunHistory) -> str:
    rows = "".join(_ending_row(run, ending) for ending in run.endings)
    live = [s for s in run.starts if s.ending is None]
    rows += "".join(
        f'<tr><td class="n">{s.name}</td><td class="plan">{_plan(run, s.record.attempt)}</td><td colspan="4">no ending yet: '
        f"{escape(s.progress.phase if s.progress else 'Starting')}, step {s.last_step:,}</td></tr>"
        for s in live
    )
    return (
        '<section><h2>Attempts, and why each ended</h2><div class="scroll"><table><thead><tr><th>start</th><th>devices</th>'
        "<th>steps</th><th>cause</th><th>evidence</th><th>time</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div><p class='note'>A start is named attempt.start. Global batch = data-parallel devices × micro-batch × accumulation,"
        f" always {run.recipe.global_batch:,}.</p></section>\n"
    )


def _ending_row(run: RunHistory, ending: Ending) -> str:
    name = f"{ending.attempt}.{ending.start}" if ending.start is not None else f"{ending.attempt}.–"
    first = "–" if ending.first_step is None else f"{ending.first_step:,}"
    last = "–" if ending.last_step is None else f"{ending.last_step:,}"
    facts = "".join(f"<li>{escape(line)}</li>" for line in evidence_lines(ending)) or "<li>none</li>"
    order = sorted(ending.seconds, key=lambda phase: PHASES.index(phase) if phase in PHASES else len(PHASES))
    spent = " · ".join(f"{phase} {duration(ending.seconds[phase])}" for phase in order if ending.seconds[phase] >= 0.5)
    total = duration(ending.ended - ending.began) if ending.began is not None and ending.ended is not None else "–"
    charged = "" if not ending.charged else "<small>counts against its budget</small>"
    good = "good" if ending.cause == "completed" else "cause"
    return (
        f'<tr><td class="n">{name}</td><td class="plan">{_plan(run, ending.attempt)}</td>'
        f'<td class="n">{first} → {last}<small>{escape(outcome(ending))}</small></td>'
        f'<td><b class="{good}">{escape(ending.cause)}</b><small>{escape(CAUSES.get(ending.cause, ""))}</small>{charged}</td>'
        f'<td class="facts"><ul>{facts}</ul></td><td class="n">{total}<small>{escape(spent)}</small></td></tr>'
    )


def _plan(run: RunHistory, attempt: int) -> str:
    plan = run.specs[attempt].plan
    empty = f"<br>{plan.padding:,} of {plan.rows:,} rows empty" if plan.padding else ""
    return (
        f"<b>{escape(plan.device_type)}</b>{f' × {plan.slices}' if plan.slices > 1 else ''}"
        f"<small>{count(plan.devices, 'device')}<br>micro-batch {plan.micro_batch}<br>× accumulation {plan.accumulation}{empty}</small>"
    )


def _proof(run: RunHistory, verdict: Verdict) -> str:
    rows = "".join(
        f'<tr><td><b class="{"good" if c.passed else "bad"}">{"PASS" if c.passed else "FAIL"}</b></td><td>{escape(c.name)}</td><td>{escape(c.text)}</td></tr>'
        for c in verdict.checks
    )
    return (
        f'<section><h2>Proof</h2><div class="scroll"><table class="proof"><tbody>{rows}</tbody></table></div>{_digests(run)}'
        f"<p class='note'>Check it yourself: <code>untildone verify {escape(run.uri)}</code></p></section>\n"
    )


def _digests(run: RunHistory) -> str:
    if not run.lineage:
        return ""
    newest = run.lineage[-1]
    rows = "".join(
        f"<tr><td><code>{escape(leaf)}</code></td><td><code>{value:08x}</code></td></tr>"
        for leaf, value in sorted(newest.digest.items())
    )
    return (
        f"<details><summary>State digest of {escape(str(newest.ref))}: {len(newest.digest)} leaves</summary>"
        '<p class="note">Per leaf: Σ bits(x<sub>i</sub>) · odd(hash(i)) mod 2³², on the devices, the same on any number of them.</p>'
        f'<div class="scroll"><table class="proof"><tbody>{rows}</tbody></table></div></details>'
    )


WORDS: Sequence[tuple[str, str]] = (
    ("step", "an optimizer step that was completed; checkpoint N holds the state after N of them"),
    ("attempt", "one submission to the cluster, on one plan"),
    ("start", "each time the processes of an attempt come up; the cluster may take them down and bring them up again"),
    ("commit", "a checkpoint that counts: its record is reached from HEAD, which only the newest start can move"),
    (
        "micro-batch × accumulation",
        "instances per device and forward pass × forward passes per step; changes with the devices, the global batch never does",
    ),
)


def _words() -> str:
    items = "".join(f"<dt>{escape(word)}</dt><dd>{escape(text)}</dd>" for word, text in WORDS)
    return f"<section><h2>Words</h2><dl>{items}</dl></section>\n"


def _or_dash(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"


def _short(number: float) -> str:
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return f"{number:,.0f}"


CSS = """
:root{--bg:#f5f6f8;--card:#fff;--text:#1b2230;--muted:#5e6878;--line:#e3e7ec;--good:#0a7d4f;--bad:#c0392b;--cause:#9a5b00}
@media(prefers-color-scheme:dark){:root{--bg:#0f131a;--card:#161b24;--text:#e8ecf2;--muted:#98a3b3;--line:#2a323e;--good:#4ec995;--bad:#ff7b6b;--cause:#f0b35a}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--text);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1060px;margin:0 auto;padding:32px 20px 64px}
h1{font-size:23px;line-height:1.35;font-weight:650;margin:4px 0 22px;letter-spacing:-.01em;text-wrap:pretty}
h1.good{border-left:5px solid var(--good);padding-left:14px}h1.bad{border-left:5px solid var(--bad);padding-left:14px}
h2{font-size:17px;margin:0 0 12px}
.eyebrow,.note,figcaption,small{color:var(--muted)}
.eyebrow{margin:0 0 8px;font-size:13px}
.note,figcaption{font-size:13.5px;margin:10px 0 0}
small{display:block;font-size:12.5px;line-height:1.4}
code{font:12.5px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
section{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:20px 22px;margin:0 0 18px}
figure{margin:0}img{display:block;width:100%;height:auto}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(145px,1fr));gap:12px;margin:0 0 18px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:12px 16px}
.tile span{display:block;color:var(--muted);font-size:12.5px}.tile b{font-size:21px;font-weight:650;font-variant-numeric:tabular-nums;white-space:nowrap}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th{text-align:left;color:var(--muted);font-weight:500;font-size:12.5px}
th,td{padding:8px 14px 8px 0;border-bottom:1px solid var(--line);vertical-align:top}
tr:last-child td{border-bottom:0}
td.n{font-variant-numeric:tabular-nums;white-space:nowrap}td.n small{white-space:normal;min-width:110px}
.plan{white-space:nowrap}
.facts{min-width:230px}.facts ul{margin:0;padding:0;list-style:none;font:12px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
.good{color:var(--good)}.bad{color:var(--bad)}.cause{color:var(--cause)}h1.good{color:inherit}
.proof td{padding:5px 14px 5px 0}
details{margin-top:12px}summary{cursor:pointer}
dl{display:grid;grid-template-columns:max-content 1fr;gap:6px 18px;margin:0;font-size:13.5px}dt{font-weight:600}dd{margin:0;color:var(--muted)}
@media(max-width:620px){dl{grid-template-columns:1fr}h1{font-size:20px}}
@media print{body{background:#fff}section{break-inside:avoid}}
"""

"""The evidence of some answers as a page of its own: pictures, tables, and the document's text.

One file, nothing fetched. Without scripts it shows the pictures of all layers together; with them,
single layers can be chosen, and a click on a picture opens the text that stands there.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence

import numpy as np

from infllm_cli.heatmap import (
    FULL,
    LEFT,
    ROW,
    STYLE,
    TOP,
    WIDTH,
    Heatmap,
    as_xml,
    body,
    height_of,
    in_words,
    strengths,
)
from infllm_cli.wording import place

# Of the document's text so much is put into the page; of longer ones what was attended most.
MOST_CHARS = 4_000_000
PAGE_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:1010px;margin:2rem auto;padding:0 1rem;
color:#1f2328;background:#fff}
h1{font-size:1.3rem}h2{font-size:1.1rem;margin:2.5rem 0 .3rem}
figure{margin:1rem 0;overflow-x:auto}svg{max-width:none}.cell{cursor:pointer}
pre{white-space:pre-wrap;font:13px/1.5 ui-monospace,monospace;margin:.3rem 0 1rem}
table{border-collapse:collapse}td,th{padding:.15rem .8rem .15rem 0;text-align:left;
vertical-align:top}details{margin:.2rem 0}summary{cursor:pointer}
details:target>summary,details.hit>summary{outline:2px solid #c2410c;outline-offset:2px}
@media(prefers-color-scheme:dark){body{color:#e6e6e6;background:#16181d}a{color:#8ab4f8}}
"""
SCRIPT = """
const at=(s)=>Uint8Array.from(atob(s),c=>c.charCodeAt(0));
const open_=(id)=>{const d=document.getElementById(id);if(!d)return;
document.querySelectorAll('.hit').forEach(e=>e.classList.remove('hit'));
d.open=true;d.classList.add('hit');d.scrollIntoView({block:'center'});
d.querySelector('summary').focus({preventScroll:true});};
addEventListener('hashchange',()=>open_(location.hash.slice(1)));
document.querySelectorAll('section.answer').forEach(section=>{
const data=JSON.parse(section.querySelector('script').textContent);
const cells=section.querySelector('.cells'),first=cells.innerHTML;
const choice=section.querySelector('select');
choice.closest('label').hidden=false;
choice.addEventListener('change',()=>{
if(choice.value==='all'){cells.innerHTML=first;return;}
const v=at(data.layers[choice.value]);let out='';
for(let i=0;i<v.length;i++){if(v[i]<8)continue;const c=i%data.columns,r=(i-c)/data.columns;
out+=`<rect class="cell" data-column="${c}" x="${data.left+data.wide*c}"`+
` y="${data.top+data.row*r}" width="${Math.max(data.wide,1.5)}" height="${data.row-1}"`+
` fill-opacity="${(v[i]/255).toFixed(2)}"/>`;}
cells.innerHTML=out;});
section.querySelector('svg').addEventListener('click',e=>{
const c=e.target.dataset&&e.target.dataset.column;if(c!==undefined)open_('c'+c);});});
"""


def page(maps: Sequence[Heatmap], name: str) -> str:
    """The page for answers on the document `name`."""
    sections = "".join(_section(one, number) for number, one in enumerate(maps))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
        f"<title>Evidence: {as_xml(name)}</title><style>{PAGE_STYLE}{STYLE}</style></head><body>"
        f"<h1>Where the answers looked in {as_xml(name)}</h1>"
        "<p>The document runs from left to right, the answer from top to bottom; colour is the "
        "part of the attention that lay on a stretch, beyond what any question draws to it. "
        "Evidence is where attention lay, not a proof.</p>"
        f"{sections}<h2>Text</h2>{_texts(maps)}<script>{SCRIPT}</script></body></html>\n"
    )


def _section(one: Heatmap, number: int) -> str:
    options = "".join(f'<option value="{index}">layer {index}</option>' for index in one.layers)
    data = {
        "columns": len(one.columns),
        "left": LEFT,
        "top": TOP,
        "row": ROW,
        "wide": WIDTH / len(one.columns),
        "layers": {str(index): _packed(cells) for index, cells in one.layers.items()},
    }
    height = height_of(one)
    best = "".join(
        f'<li><a href="#c{index}">{as_xml(place(one.columns[index].passage))}</a>, '
        f"{100 * share:.1f} %</li>"
        for index, share in one.best(most=5)
    )
    return (
        f'<section class="answer"><h2>{as_xml(one.answer.question)}</h2>'
        f"<p>{as_xml(one.answer.text)}</p>"
        f'<label hidden>Layers <select><option value="all">all together</option>{options}'
        "</select></label>"
        f'<figure><svg xmlns="http://www.w3.org/2000/svg" class="map" role="img" '
        f'width="{FULL}" height="{height}" aria-labelledby="told{number}">'
        f'<title id="told{number}">{as_xml(in_words(one))}</title>{body(one)}</svg></figure>'
        f"<p>Attended most:</p><ol>{best}</ol>{_table(one)}"
        f'<script type="application/json">{json.dumps(data)}</script></section>'
    )


def _table(one: Heatmap) -> str:
    rows = []
    for number, token in enumerate(one.tokens):
        places = "; ".join(
            f'<a href="#c{index}">{as_xml(place(one.columns[index].passage))}</a> '
            f"{100 * share:.1f} %"
            for index, share in one.best(number)
        )
        rows.append(f'<tr><th scope="row">{as_xml(token)}</th><td>{places or "–"}</td></tr>')
    return (
        "<details><summary>The same as a table</summary><table><thead><tr><th>token</th>"
        f"<th>where it looked</th></tr></thead><tbody>{''.join(rows)}</tbody></table></details>"
    )


def _texts(maps: Sequence[Heatmap]) -> str:
    columns = maps[0].columns
    shares = np.max([one.cells.max(axis=0, initial=0.0) for one in maps], axis=0)
    shown = set()
    left = MOST_CHARS
    for index in np.argsort(-shares, kind="stable"):
        left -= len(columns[index].passage.text)
        if left < 0:
            break
        shown.add(int(index))
    pieces = []
    for index, column in enumerate(columns):
        text = as_xml(column.passage.text) if index in shown else "(not in this page)"
        pieces.append(
            f'<details id="c{index}"><summary>{as_xml(place(column.passage))}</summary>'
            f"<pre>{text}</pre></details>"
        )
    return "".join(pieces)


def _packed(cells: np.ndarray) -> str:
    """Strengths as one byte each, row by row, in base64."""
    return base64.b64encode((255 * strengths(cells)).astype(np.uint8).tobytes()).decode()

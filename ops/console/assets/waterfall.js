/** The spans of a request on one scale of time: where it waited, on which worker each leg ran, and what was lost. */
import { classes, html, useState } from './library.js';
import { Fields, WorkerLink } from './parts.js';
import * as format from './format.js';

/** The first and last moment of all that is drawn. */
function extent(request, until) {
  const ends = request.spans.flatMap((span) => [span.start_ms, span.end_ms ?? until]).concat(request.marks.map((mark) => mark.time_ms));
  const known = ends.filter(format.isNumber);
  const from = Math.min(request.accepted_ms ?? Infinity, ...known);
  return { from, to: Math.max(from + 1, ...known) };
}

function ticks({ from, to }) {
  const length = to - from;
  const rough = length / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
  const found = [];
  for (let at = 0; at <= length * 0.97; at += step) found.push(at);
  return found;
}

function place(time, { from, to }) {
  return `${Math.max(0, Math.min(100, ((time - from) / (to - from)) * 100))}%`;
}

function Bar({ span, range, until }) {
  const end = span.end_ms ?? until;
  const left = place(span.start_ms, range);
  const width = `max(3px, calc(${place(end, range)} - ${left}))`;
  return html`<span class=${classes('span-bar', `span-${span.name}`, span.end_ms === null && 'span-open')} style=${{ left, width }}></span>`;
}

function Details({ span, columns }) {
  const entries = Object.entries(span.detail || {}).map(([name, value]) => [name.replaceAll('_', ' '), format.anything(value)]);
  const shown = entries.length ? entries : [['details', 'The log holds none.']];
  return html`<tr class="span-detail"><td colspan=${columns}><${Fields} entries=${shown} /></td></tr>`;
}

function SpanRow({ span, range, until, choices, cursor }) {
  const [open, setOpen] = useState(false);
  const end = span.end_ms ?? until;
  return html`<tr class=${classes(`span-row`, open && 'span-row-open')}>
      <th scope="row" class="span-name">
        <button type="button" class="disclose" aria-expanded=${open} onClick=${() => setOpen(!open)}><span class=${`swatch span-${span.name}`} aria-hidden="true"></span>${span.label || span.name}</button>
        ${span.worker ? html`<span class="span-worker narrow-only"><${WorkerLink} name=${span.worker} /></span>` : null}
      </th>
      ${choices > 1 ? html`<td class="right number">${span.choice}</td>` : null}
      <td class="clip wide-only"><${WorkerLink} name=${span.worker} /></td>
      <td class="right number wide-only">${format.duration(span.start_ms - range.from)}</td>
      <td class="right number">${format.duration(end - span.start_ms)}${span.end_ms === null ? html`<span class="muted"> so far</span>` : null}</td>
      <td class="span-track" aria-hidden="true"><span class="span-lane"><${TickLines} range=${range} />${cursor === null ? null : html`<span class="span-cursor" style=${{ left: cursor }}></span>`}<${Bar} span=${span} range=${range} until=${until} /></span></td>
    </tr>
    ${open ? html`<${Details} span=${span} columns=${choices > 1 ? 6 : 5} />` : null}`;
}

function TickLines({ range }) {
  return ticks(range).map((at) => html`<span key=${at} class="tick-line" style=${{ left: place(range.from + at, range) }}></span>`);
}

function MarkLane({ marks, range }) {
  return html`<span class="span-lane mark-lane"><${TickLines} range=${range} />${marks.map((mark, index) => html`<span key=${index} class=${`span-mark span-mark-${mark.kind.replace(' ', '-')}`} style=${{ left: place(mark.time_ms, range) }} title=${`${mark.kind} ${mark.text}`}></span>`)}</span>`;
}

/** The table of spans with their bars. `time` is that of the position shown. */
export function Waterfall({ request, time }) {
  const until = request.spans.some((span) => span.end_ms === null) ? Math.max(time ?? 0, ...request.spans.map((span) => span.start_ms)) : null;
  const range = extent(request, until);
  const cursor = time !== null && time > range.from && time < range.to ? place(time, range) : null;
  const choices = request.choices || 1;
  return html`<div class="table-scroll" tabindex="0" role="region" aria-label="Spans"><table class="waterfall" aria-label="Spans">
    <thead><tr><th scope="col">Span</th>${choices > 1 ? html`<th scope="col" class="right">Choice</th>` : null}<th scope="col" class="wide-only">Worker</th><th scope="col" class="right wide-only">Start</th><th scope="col" class="right">Duration</th>
      <th scope="col" class="span-track"><span class="visually-hidden">Time since it was accepted</span><span class="span-lane axis-lane" aria-hidden="true">${ticks(range).map((at) => html`<span key=${at} class="axis-tick" style=${{ left: place(range.from + at, range) }}>${format.duration(at)}</span>`)}</span></th></tr></thead>
    <tbody>
      <tr class="mark-row" aria-hidden="true"><td></td>${choices > 1 ? html`<td></td>` : null}<td class="wide-only"></td><td class="wide-only"></td><td></td><td class="span-track"><${MarkLane} marks=${request.marks} range=${range} /></td></tr>
      ${request.spans.map((span, index) => html`<${SpanRow} key=${index} span=${span} range=${range} until=${until} choices=${choices} cursor=${cursor} />`)}
    </tbody>
  </table></div>`;
}

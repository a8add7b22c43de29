/** The candidates of a decision: inputs and cost of each, the terms of the cost as stacked bars. */
import { classes, html } from './library.js';
import { Badge, WorkerLink } from './parts.js';
import { Table } from './table.js';
import * as format from './format.js';

/** A cost with its unit. */
export function cost(value, unit) {
  if (!format.isNumber(value)) return format.UNKNOWN;
  return unit === 'ms' ? `${format.number(value)} ms` : `${format.number(value)} ${unit}`;
}

/** The usual order of terms; others follow. */
const TERMS = ['queue', 'prefill', 'transfer', 'delay of others', 'memory and rest'];

/** Names of the terms in the order of the stack. */
export function termNames(candidates) {
  const names = TERMS.filter((name) => candidates.some((candidate) => candidate.terms.some((term) => term.name === name && term.value !== 0)));
  for (const candidate of candidates) for (const term of candidate.terms) if (term.value !== 0 && !names.includes(term.name)) names.push(term.name);
  return names;
}

/** The terms as lengths on one scale; what lowers the cost is hatched to the left of zero. */
export function CostBar({ candidate, names, least, most }) {
  const size = Math.max(1e-9, most - least);
  const zero = (-least / size) * 100;
  let right = zero;
  let left = zero;
  const pieces = candidate.terms.filter((term) => term.value !== 0).map((term) => {
    const width = (Math.abs(term.value) / size) * 100;
    const at = term.value > 0 ? right : left - width;
    if (term.value > 0) right += width;
    else left -= width;
    const style = { left: `${at}%`, width: `${width}%` };
    return html`<span key=${term.name} class=${classes('cost-piece', `piece-${(names.indexOf(term.name) % 6) + 1}`, term.value < 0 && 'piece-negative')} style=${style}></span>`;
  });
  return html`<span class="cost-bar" aria-hidden="true">${pieces}</span>`;
}

/** The ends of the scale on which all bars are drawn. */
export function costScale(lists) {
  let most = 1e-9;
  let least = 0;
  for (const candidate of lists.flat()) {
    most = Math.max(most, candidate.terms.reduce((sum, term) => sum + Math.max(0, term.value), 0));
    least = Math.min(least, candidate.terms.reduce((sum, term) => sum + Math.min(0, term.value), 0));
  }
  return { least, most };
}

/** What the colours of the bars mean. */
export function TermLegend({ names, unit }) {
  return html`<ul class="legend">${names.map((name, index) => html`<li key=${name}><span class=${`swatch piece-${(index % 6) + 1}`} aria-hidden="true"></span>${name}</li>`)}<li class="muted">in ${unit === 'ms' ? 'milliseconds' : `${unit} to compute`}</li></ul>`;
}

function held(candidate, blocks) {
  const parts = [`${format.integer(candidate.cached_blocks)} of ${format.integer(blocks)}`];
  if (candidate.assumed_blocks) parts.push(`${format.integer(candidate.assumed_blocks)} assumed`);
  if (candidate.lower_blocks) parts.push(`${format.integer(candidate.lower_blocks)} on a lower tier`);
  return parts.join(', ');
}

function columnsFor({ unit, blocks, chosen, names, scale }) {
  const term = (name) => ({
    name: `term ${name}`, label: name, unit, align: 'right', wide: true,
    render: (candidate) => format.number(candidate.terms.find((one) => one.name === name)?.value ?? null),
  });
  return [
    { name: 'worker', label: 'Candidate', render: (candidate) => html`<${WorkerLink} name=${candidate.worker} />${candidate.worker === chosen ? html` <${Badge} kind="good">chosen<//>` : null}` },
    { name: 'cost', label: 'Cost', unit, align: 'right', render: (candidate) => html`<strong>${format.number(candidate.score)}</strong>` },
    { name: 'bar', label: 'Terms of the cost', className: 'bar-cell', render: (candidate) => html`<${CostBar} candidate=${candidate} names=${names} ...${scale} />` },
    { name: 'cached', label: 'Cached', unit: 'blocks', align: 'right', render: (candidate) => held(candidate, blocks) },
    { name: 'queued', label: 'Queued', unit: 'tokens', align: 'right', render: (candidate) => format.integer(candidate.queued_tokens) },
    { name: 'requests', label: 'Requests', align: 'right', render: (candidate) => format.integer(candidate.requests) },
    { name: 'held', label: 'Held', unit: 'blocks', align: 'right', wide: true, render: (candidate) => format.integer(candidate.held_blocks) },
    { name: 'ttft', label: 'First token', title: 'Estimate of the time to first token', align: 'right', render: (candidate) => format.duration(candidate.ttft_ms) },
    { name: 'itl', label: 'Between tokens', title: 'Estimate of the time between tokens', align: 'right', wide: true, render: (candidate) => format.duration(candidate.itl_ms) },
    { name: 'e2e', label: 'Whole answer', title: 'Estimate of the time to the last token', align: 'right', wide: true, render: (candidate) => format.duration(candidate.e2e_ms) },
    { name: 'lora', label: 'Loads LoRA', wide: true, render: (candidate) => (candidate.loads_lora ? 'yes' : 'no') },
    ...names.map(term),
  ];
}

/** The table of candidates, sorted by cost. */
export function Candidates({ label, candidates, unit, blocks, chosen, names, scale, brief = false }) {
  const all = columnsFor({ unit, blocks, chosen, names, scale });
  const columns = brief ? all.filter((column) => ['worker', 'cost', 'bar', 'ttft'].includes(column.name)) : all;
  return html`<${Table} label=${label} columns=${columns} rows=${candidates} keyOf=${(candidate) => `${candidate.worker} ${candidate.leg}`} isSelected=${(candidate) => candidate.worker === chosen} />`;
}

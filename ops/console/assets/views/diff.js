/** What changed between two positions of the log. */
import { html, useId, useSignal, useTyped } from '../library.js';
import { useAnswer } from '../answers.js';
import { readMoment } from '../moving.js';
import { Empty, Panel, PositionLink, TextField, Tile, Time, View } from '../parts.js';
import { Table } from '../table.js';
import * as format from '../format.js';
import * as state from '../state.js';

const COLUMNS = [
  { name: 'what', label: 'What', render: (change) => change.what },
  { name: 'field', label: 'Field', render: (change) => (change.field ? html`<span class="code">${change.field}</span>` : format.UNKNOWN) },
  { name: 'before', label: 'Before', align: 'right', className: 'clip', render: (change) => format.anything(change.before) },
  { name: 'after', label: 'After', align: 'right', className: 'clip', render: (change) => format.anything(change.after) },
  { name: 'change', label: 'Change', align: 'right', render: (change) => difference(change) },
];

function difference({ before, after }) {
  if (!format.isNumber(before) || !format.isNumber(after)) return '';
  return `${after >= before ? '+' : '−'}${format.number(Math.abs(after - before))}`;
}

function EndField({ label, name, value, current }) {
  const id = useId();
  const { form, field } = useTyped(format.integer(value), (text) => {
    const found = readMoment(text);
    if (found?.position !== undefined) state.adjust({ [name]: state.within(state.log.peek(), found.position) });
    else state.message.value = 'Type a position.';
  });
  return html`<form class="end-field" ...${form}>
    <label for=${id}>${label}</label>
    <input id=${id} class="number" type="text" inputmode="numeric" autocomplete="off" ...${field} />
    <button type="button" onClick=${() => state.adjust({ [name]: current })}>Use the position shown</button>
  </form>`;
}

/** The view: `a` is chosen, or the start of the window; `b` is chosen, or the position shown. */
export function Diff() {
  const position = useSignal(state.position);
  const log = useSignal(state.log);
  const values = useSignal(state.parameters);
  const b = values.b ? Number(values.b) : position;
  const a = values.a ? Number(values.a) : log ? state.within(log, position - 1000) : null;
  const answer = useAnswer('diff', a === null || b === null ? null : { a, b });
  const data = answer.data;
  const text = (values.text || '').toLowerCase();
  const changes = data ? data.changes.filter((change) => !text || `${change.what} ${change.field}`.toLowerCase().includes(text)) : [];
  const controls = html`<div class="filters">
      <${EndField} label="From" name="a" value=${a} current=${position} />
      <${EndField} label=${values.b ? 'To' : 'To (follows the position)'} name="b" value=${b} current=${position} />
      <${TextField} label="Filter" filter=${true} value=${values.text || ''} placeholder="worker or field" onChange=${(value) => state.adjust({ text: value }, 'replace')} />
    </div>`;
  return html`<${View} title="Difference" subtitle="What changed between two positions" controls=${controls} answer=${answer}>
    ${data && html`
      <dl class="tiles tiles-few">
        <${Tile} label="From" value=${html`<${PositionLink} position=${data.a} />`} detail=${html`<${Time} value=${data.a_ms} precise=${true} />`} />
        <${Tile} label="To" value=${html`<${PositionLink} position=${data.b} />`} detail=${html`<${Time} value=${data.b_ms} precise=${true} />`} />
        <${Tile} label="Between them" value=${format.duration(Math.abs(data.b_ms - data.a_ms))} />
        <${Tile} label="Decisions" value=${format.integer(data.counts.decisions)} />
        <${Tile} label="Requests" value=${format.integer(data.counts.requests)} />
        <${Tile} label="Messages" value=${format.integer(data.counts.messages)} />
      </dl>
      <${Panel} title="Changes" note=${`${changes.length} of ${data.changes.length}`}>
        <${Table} label="Changes" columns=${COLUMNS} rows=${changes} keyOf=${(change) => `${change.what} ${change.field}`}
          empty=${html`<${Empty} title="Nothing differs between these positions.">Choose positions that are further apart.<//>`} />
      <//>`}
  <//>`;
}
